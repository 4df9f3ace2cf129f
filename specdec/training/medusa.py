"""Training of Medusa heads (Cai et al., 2024, section 2.2): on a frozen target, or together with it.

Head k = 0, 1, ... at the vector of token t should say token t + 2 + k, whose law is the target's after token t + 1 + k.
Medusa-1 trains the heads alone: Σ_k λ^k loss_k, λ = .8. Medusa-2 trains the target too, and adds its own loss
on the next token: L_LM + λ_0 Σ_k λ^k loss_k, λ_0 = .2, the heads with four times its learning rate (`learning_rates`).
Self-distillation (section 2.3.2) trains an adapter of the target (`specdec.training.lora`), and L_LM is its divergence
from the target without the adapter.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp
import optax

from models.decoder import Decoder
from models.heads import MedusaHeads
from models.sequence import Stack
from specdec.training.frozen import Frozen, Seen, observe, rows_of_head
from specdec.training.guesses import UNASKED, agreement, counted, ranks, shifted
from specdec.training.labels import check_labels, target_law, text_law
from specdec.training.lora import Adapter, adapted
from specdec.training.losses import LOSSES, check_loss, masked_sum, overlap
from specdec.training.roots import at, roots_of

HEADS, BACKBONE = 'heads', 'backbone'  # of what Medusa-2 trains


@dataclasses.dataclass(frozen=True)
class MedusaObjective:
  """Medusa-1: Σ_k λ^k loss_k of heads that borrow the target's LM head.

  Attributes:
    graph: of the heads.
    num_tokens: real tokens of the target.
    token_loss: one of `losses.LOSSES`.
    labels: one of `labels.LABELS`.
    decay: λ.
    roots: vectors of each row that the heads read (`roots.roots_of`).
  """

  graph: nnx.GraphDef
  num_tokens: int
  token_loss: str = 'kl'
  labels: str = 'law'
  decay: float = 0.8
  roots: int = 0

  def __post_init__(self):
    check_labels(self.labels)
    check_loss(self.token_loss, self.decay, self.roots)

  def loss(self, trainable: nnx.State, frozen: Frozen, batch: dict[str, Array],
           key: Array) -> tuple[Array, dict[str, Array]]:
    heads, seen = self.heads_of(trainable, frozen), observe(frozen.target, batch, self.num_tokens)
    return self.losses(heads, frozen.target, seen.hidden_BTD, self.law(heads, frozen.target, seen, batch), batch,
                       roots_of(batch, self.roots, key))

  def law(self, heads: MedusaHeads, target: Decoder | Stack | None, seen: Seen | None,
          batch: dict[str, Array]) -> Array:
    """[B, T, U]: what should be said after each token; the text alone tells it without a target."""
    ids_U = _ids(heads)
    if self.labels == 'text':
      return text_law(batch, ids_U, self.num_tokens if ids_U is None else len(ids_U))
    return target_law(rows_of_head(target, ids_U, self.num_tokens), seen)

  def losses(self, heads: MedusaHeads, target: Decoder | Stack, hidden_BTD: Array, law_BTU: Array,
             batch: dict[str, Array], roots_BN: Array) -> tuple[Array, dict[str, Array]]:
    """The sum, and what is reported, of these heads on these vectors of the target, from these places on."""
    total, sums, found, counts = jnp.zeros(()), {}, [], []
    for k in range(heads.config.num_heads):
      about_BN = jnp.minimum(roots_BN + 1 + k, hidden_BTD.shape[1] - 1)  # the token after which the guess comes
      counts_BN = at(counted(batch, 2) & counted(batch, 2 + k), roots_BN)
      logits_BNU, law_BNU = self._logits(heads, k, target, at(hidden_BTD, roots_BN)), at(law_BTU, about_BN)
      total += self.decay ** k * masked_sum(LOSSES[self.token_loss](law_BNU, logits_BNU), counts_BN)
      if self.labels == 'law' and not k:
        sums['overlap'] = masked_sum(overlap(law_BNU, logits_BNU), counts_BN)
      found.append(ranks(logits_BNU, at(shifted(batch['tokens'], 1), about_BN), counts_BN, _ids(heads)))
      counts.append(counts_BN)
    counts_BNM = jnp.stack(counts, axis=-1)
    sums |= agreement(jnp.stack(found, axis=-1), counts_BNM)
    return total, jax.lax.stop_gradient(sums) | {'count': jnp.sum(counts_BNM[..., 0], dtype=jnp.float32)}

  def ranks(self, trainable: nnx.State, frozen: Frozen, batch: dict[str, Array], levels: int) -> Array:
    """See `acceptance.Guesser`: where the newest token is i, the heads read the vector of token i - 1."""
    hidden_BTD = observe(frozen.target, batch, self.num_tokens).hidden_BTD
    return self.ranks_of(self.heads_of(trainable, frozen), frozen.target, hidden_BTD, batch, levels)

  def ranks_of(self, heads: MedusaHeads, target: Decoder | Stack, hidden_BTD: Array, batch: dict[str, Array],
               levels: int) -> Array:
    """`ranks` of these heads on these vectors of the target."""
    found = [ranks(self._logits(heads, k, target, hidden_BTD), shifted(batch['tokens'], 2 + k), counted(batch, 2 + k),
                   _ids(heads)) for k in range(levels)]
    return jnp.pad(jnp.stack(found, axis=-1), ((0, 0), (1, 0), (0, 0)), constant_values=UNASKED)[:, :-1]

  def heads_of(self, trainable: nnx.State, frozen: Frozen) -> MedusaHeads:
    return nnx.merge(self.graph, trainable, frozen.rest)

  def _logits(self, heads: MedusaHeads, k: int, target: Decoder | Stack, hidden_BTD: Array) -> Array:
    """[B, T, U]: one head at a time, since the logits of all would not fit."""
    ids_U = _ids(heads)
    rows_UD = target.lm_head if ids_U is None else rows_of_head(target, ids_U, self.num_tokens)
    return heads.logits_of(k, hidden_BTD, rows_UD)[..., :self.num_tokens]


@dataclasses.dataclass(frozen=True)
class JointObjective:
  """Medusa-2: L_LM of the target, and λ_0 times the loss of the heads on its vectors.

  Trained are `{HEADS: state, BACKBONE: Stack or Adapter}`. `Frozen.target` is the target as it was, a `Stack`: what an
  adapter is added to, and whose law is learnt from where labels are 'law'; None where neither is so.

  Attributes:
    heads: what is minimised of the heads.
    scale: α / r of the adapter; None where the weights themselves are trained.
    labels: of the target's own loss. 'text' is the cross entropy of the next token, 'law' is KL(as it was ‖ as it is),
      which keeps it what it was.
    weight: λ_0.
    ramp: steps in which λ_0 grows to that, as the first quarter of a sine; 0 begins with it.
    remat: see `Stack.__call__`.
  """

  heads: MedusaObjective
  scale: float | None = None
  labels: str = 'text'
  weight: float | Array = 0.2
  ramp: int = 0
  remat: bool = False

  def __post_init__(self):
    check_labels(self.labels)

  @property
  def reads_law(self) -> bool:
    """Whether the target as it was is asked about each token."""
    return 'law' in (self.labels, self.heads.labels)

  def at_step(self, step: Array) -> 'JointObjective':
    """See `specdec.training.step.Changing`."""
    if not self.ramp:
      return self
    share = jnp.minimum((step + 1) / self.ramp, 1.0)
    return dataclasses.replace(self, weight=self.weight * jnp.sin(share * jnp.pi / 2), ramp=0)

  def loss(self, trainable: dict[str, Any], frozen: Frozen, batch: dict[str, Array],
           key: Array) -> tuple[Array, dict[str, Array]]:
    heads, backbone = self.heads.heads_of(trainable[HEADS], frozen), self.target(trainable[BACKBONE], frozen)
    seen = observe(frozen.target, batch, self.heads.num_tokens) if self.reads_law else None
    hidden_BTD, roots_BN = self._hidden(backbone, batch), roots_of(batch, self.heads.roots, key)
    law_BTU = self.heads.law(heads, frozen.target, seen, batch)
    total, sums = self.heads.losses(heads, backbone, hidden_BTD, law_BTU, batch, roots_BN)
    own = self._own(backbone, frozen.target, seen, hidden_BTD, batch, roots_BN)
    return own + self.weight * total, sums | {'own': jax.lax.stop_gradient(own)}

  def ranks(self, trainable: dict[str, Any], frozen: Frozen, batch: dict[str, Array], levels: int) -> Array:
    """See `acceptance.Guesser`: of the heads on the target as it is by now; the texts are of the one that it was."""
    heads, backbone = self.heads.heads_of(trainable[HEADS], frozen), self.target(trainable[BACKBONE], frozen)
    return self.heads.ranks_of(heads, backbone, self._hidden(backbone, batch), batch, levels)

  def target(self, part: Stack | Adapter, frozen: Frozen) -> Stack:
    """The target as it is by now, from what is trained of it."""
    return part if self.scale is None else adapted(frozen.target, part, self.scale)

  def _hidden(self, backbone: Stack, batch: dict[str, Array]) -> Array:
    return backbone(batch['tokens'], batch['positions'], batch['segments'], self.remat).hidden_BTD

  def _own(self, backbone: Stack, before: Stack | None, seen: Seen | None, hidden_BTD: Array, batch: dict[str, Array],
           roots_BN: Array) -> Array:
    """L_LM, a sum over the tokens that head 0 guesses, so that both losses are means over as many."""
    about_BN = jnp.minimum(roots_BN + 1, hidden_BTD.shape[1] - 1)
    logits_BNV = backbone.logits(at(hidden_BTD, about_BN))[..., :self.heads.num_tokens]
    if self.labels == 'text':
      next_BN = at(shifted(batch['tokens'], 1), about_BN)
      losses_BN = optax.softmax_cross_entropy_with_integer_labels(logits_BNV, next_BN)
    else:
      some = Seen(at(seen.hidden_BTD, about_BN), at(seen.log_total_BT, about_BN))
      law_BNV = target_law(rows_of_head(before, None, self.heads.num_tokens), some)
      losses_BN = LOSSES['kl'](law_BNV, logits_BNV)
    return masked_sum(losses_BN, at(counted(batch, 2), roots_BN))


def learning_rates(schedule: optax.Schedule, heads_factor: float,
                   make: Callable[[optax.Schedule], optax.GradientTransformation], heads_first: int = 0,
                   warmup: int = 0) -> optax.GradientTransformation:
  """One optimizer for each of the two, the heads' rate `heads_factor` times the target's (4 in the paper).

  Args:
    schedule: of the target.
    heads_factor: of the heads.
    make: an optimizer from a schedule.
    heads_first: steps in which the heads alone move (the first of the two stages); the target's moments are gathered.
    warmup: steps after these in which the target's rate grows from 0.
  """

  def backbone(step: Array) -> Array:
    return schedule(step) * jnp.clip((step - heads_first + 1) / (warmup + 1), 0.0, 1.0)

  rates = {HEADS: lambda step: heads_factor * schedule(step), BACKBONE: backbone if heads_first else schedule}
  return optax.multi_transform({name: make(rate) for name, rate in rates.items()}, {name: name for name in rates})


def _ids(heads: MedusaHeads) -> Array | None:
  return None if heads.draft_ids is None else heads.draft_ids[...]
