"""Training of Medusa heads (Cai et al., 2024, section 2.2): on a frozen target, or together with it.

Head k = 0, 1, ... at the vector of token t should say token t + 2 + k, whose law is the target's after token t + 1 + k.
Medusa-1 trains the heads alone: Σ_k λ^k loss_k, λ = .8. Medusa-2 trains the target too, and adds its own loss
on the next token: L_LM + λ_0 Σ_k λ^k loss_k, λ_0 = .2, the heads with four times its learning rate (`learning_rates`).
"""

from collections.abc import Callable
import dataclasses

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp
import optax

from models.decoder import Decoder
from models.heads import MedusaHeads
from specdec.training.frozen import Frozen, observe, over_rows, rows_of_head
from specdec.training.guesses import UNASKED, agreement, counted, ranks, shifted
from specdec.training.labels import check_labels, labels_of, target_law
from specdec.training.losses import LOSSES, masked_sum, overlap
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

  def loss(self, trainable: nnx.State, frozen: Frozen, batch: dict[str, Array],
           key: Array) -> tuple[Array, dict[str, Array]]:
    heads, seen = self.heads_of(trainable, frozen), observe(frozen.target, batch, self.num_tokens)
    law_BTU = labels_of(self.labels, self._rows(heads, frozen.target), seen, batch, _ids(heads))
    return self.losses(heads, frozen.target, seen.hidden_BTD, law_BTU, batch, key)

  def losses(self, heads: MedusaHeads, target: Decoder, hidden_BTD: Array, law_BTU: Array, batch: dict[str, Array],
             key: Array) -> tuple[Array, dict[str, Array]]:
    """The sum, and what is reported, of these heads on these vectors of the target."""
    total, sums, found, counts = jnp.zeros(()), {}, [], []
    roots_BN = roots_of(batch, self.roots, key)
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
    heads, seen = self.heads_of(trainable, frozen), observe(frozen.target, batch, self.num_tokens)
    found = [ranks(self._logits(heads, k, frozen.target, seen.hidden_BTD), shifted(batch['tokens'], 2 + k),
                   counted(batch, 2 + k), _ids(heads)) for k in range(levels)]
    return jnp.pad(jnp.stack(found, axis=-1), ((0, 0), (1, 0), (0, 0)), constant_values=UNASKED)[:, :-1]

  def heads_of(self, trainable: nnx.State, frozen: Frozen) -> MedusaHeads:
    return nnx.merge(self.graph, trainable, frozen.rest)

  def _rows(self, heads: MedusaHeads, target: Decoder) -> Array:
    return rows_of_head(target, _ids(heads), self.num_tokens)

  def _logits(self, heads: MedusaHeads, k: int, target: Decoder, hidden_BTD: Array) -> Array:
    """[B, T, U]: one head at a time, since the logits of all would not fit."""
    return heads.logits_of(k, hidden_BTD, self._rows(heads, target))[..., :self.num_tokens]


@dataclasses.dataclass(frozen=True)
class JointObjective:
  """Medusa-2: the loss of the target on what the texts go on with, and λ_0 times that of the heads.

  Trained are `{HEADS: state, BACKBONE: state}`; `Frozen.target` is the target as it was, whose laws the heads and the
  target itself learn from: so it stays what it was (self-distillation without an adapter).

  Attributes:
    heads: what is minimised of the heads.
    graph: of the target.
    weight: λ_0.
  """

  heads: MedusaObjective
  graph: nnx.GraphDef
  weight: float = 0.2

  def loss(self, trainable: dict[str, nnx.State], frozen: Frozen, batch: dict[str, Array],
           key: Array) -> tuple[Array, dict[str, Array]]:
    heads = self.heads.heads_of(trainable[HEADS], frozen)
    backbone = nnx.merge(self.graph, trainable[BACKBONE])
    law_BTV = target_law(rows_of_head(frozen.target, None, self.heads.num_tokens),
                         observe(frozen.target, batch, self.heads.num_tokens))
    hidden_BTD = over_rows(backbone, batch, logits=False).hidden_BTD
    ids = _ids(heads)
    law_BTU = law_BTV if ids is None else jnp.take(law_BTV, ids, axis=-1)
    total, sums = self.heads.losses(heads, backbone, hidden_BTD, law_BTU, batch, key)
    counts_BT = counted(batch, 1)
    own_BTV = backbone.logits(hidden_BTD)[..., :self.heads.num_tokens]
    own = masked_sum(LOSSES['kl'](law_BTV, own_BTV), counts_BT)
    return own + self.weight * total, sums | {'own': jax.lax.stop_gradient(own)}


def learning_rates(schedule: optax.Schedule, heads_factor: float,
                   make: Callable[[optax.Schedule], optax.GradientTransformation]) -> optax.GradientTransformation:
  """One optimizer for each of the two, the heads' rate `heads_factor` times the target's (4 in the paper).

  Args:
    schedule: of the target.
    heads_factor: of the heads.
    make: an optimizer from a schedule.
  """
  return optax.multi_transform(
      {HEADS: make(lambda step: heads_factor * schedule(step)), BACKBONE: make(schedule)},
      lambda trained: {name: jax.tree.map(lambda _, name=name: name, part) for name, part in trained.items()})


def _ids(heads: MedusaHeads) -> Array | None:
  return None if heads.draft_ids is None else heads.draft_ids[...]
