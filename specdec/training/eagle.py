"""Training of EAGLE heads: on the target's features, on noisy ones, and on the head's own guesses.

EAGLE-1 and -2 (Li et al., 2024, section 3.2): what follows a pair should be the next feature (smooth L1), and the law
that the LM head makes of it the target's; the features that are read are noisy. EAGLE-3 (Li et al., 2025,
"training-time test"): the head is unrolled, so that it reads in training what it will read when it drafts. In step
s = 0, 1, ... a guess that began with pair r stands at position r + s. It reads the embedding of token r + 1 + s and the
guess of step s - 1, sees the true pairs up to r and its own s guesses, and should say token r + 2 + s.
"""

from collections.abc import Iterator
import dataclasses

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp

from models.eagle import EagleWeights
from models.kv_cache import KVCache
from specdec.training.frozen import Frozen, Seen, observe, rows_of_head, segment_mask
from specdec.training.guesses import UNASKED, agreement, counted, ranks, shifted
from specdec.training.labels import check_labels, labels_of
from specdec.training.losses import LOSSES, masked_sum, overlap, smooth_l1


def unroll(weights: EagleWeights, batch: dict[str, Array], features_BTF: Array, steps: int) -> Iterator[Array]:
  """The guesses [B, T, D] of each step, of every pair of every row; those at the end of a text mean nothing.

  Keys and values of a step lie behind those of the steps before it, as they do when a chain is drafted.
  """
  batch_size, width = batch['tokens'].shape
  cache = weights.head.init_cache(batch_size, 0)
  true_BTT = segment_mask(batch['segments'])
  own_BTT = jnp.broadcast_to(jnp.eye(width, dtype=bool), true_BTT.shape)
  features_BTD = weights.head.fuse(features_BTF)
  for step in range(steps):
    cache = _with_room(cache, width)
    mask_BTS = jnp.concatenate([true_BTT] + [own_BTT] * step, axis=-1)
    start_B = jnp.full((batch_size,), step * width)
    features_BTD, cache = weights(shifted(batch['tokens'], 1 + step), features_BTD, batch['positions'] + step,
                                  mask_BTS, cache.with_length(start_B))
    yield features_BTD


def _with_room(cache: KVCache, slots: int) -> KVCache:
  more = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, slots), (0, 0)))
  return cache.replace(k=tuple(map(more, cache.k)), v=tuple(map(more, cache.v)),
                       position_BS=jnp.pad(cache.position_BS, ((0, 0), (0, slots))))


@dataclasses.dataclass(frozen=True)
class EagleObjective:
  """Σ over steps s of decay^s (token_weight · token loss + feature_weight · smooth L1).

  The paper's EAGLE-1: steps 1, noise .1, feature_weight 1, token_weight .1, 'cross_entropy'. EAGLE-3 has no features
  to be like: feature_weight 0.

  Attributes:
    graph: of the head, whose parameters are trained; its ids are in `Frozen.rest`.
    num_tokens: real tokens of the target.
    steps: unrolled.
    token_loss: one of `losses.LOSSES`.
    labels: one of `labels.LABELS`.
    noise: the features read in step 0 are shifted by U(-noise, noise).
  """

  graph: nnx.GraphDef
  num_tokens: int
  steps: int = 3
  token_loss: str = 'kl'
  labels: str = 'law'
  token_weight: float = 1.0
  feature_weight: float = 0.2
  noise: float = 0.0
  decay: float = 1.0

  def __post_init__(self):
    check_labels(self.labels)

  def loss(self, trainable: nnx.State, frozen: Frozen, batch: dict[str, Array],
           key: Array) -> tuple[Array, dict[str, Array]]:
    seen, weights = observe(frozen.target, batch, self.num_tokens), self._weights(trainable, frozen)
    features_BTF = self._features(seen)
    if self.noise:
      features_BTF += jax.random.uniform(key, features_BTF.shape, minval=-self.noise, maxval=self.noise)
    ids_U = self._ids(weights)
    law_BTU = labels_of(self.labels, rows_of_head(frozen.target, ids_U, self.num_tokens), seen, batch, ids_U)
    total, sums, found, counts = jnp.zeros(()), {}, [], []
    for step, guess_BTD in enumerate(unroll(weights, batch, features_BTF, self.steps)):
      about = 1 + step  # a guess about what follows token i stands at pair i - about
      guess_BTD, counts_BT = shifted(guess_BTD, -about), shifted(counted(batch, 1 + about), -about)
      logits_BTU = self._logits(weights, guess_BTD)
      losses_BT = self.token_weight * LOSSES[self.token_loss](law_BTU, logits_BTU)
      if self.feature_weight:
        losses_BT += self.feature_weight * smooth_l1(guess_BTD, seen.hidden_BTD)
      total += self.decay ** step * masked_sum(losses_BT, counts_BT)
      if self.labels == 'law' and not step:
        sums['overlap'] = masked_sum(overlap(law_BTU, logits_BTU), counts_BT)
      found.append(shifted(ranks(logits_BTU, shifted(batch['tokens'], 1), counts_BT, ids_U), about))
      counts.append(shifted(counts_BT, about))
    counts_BTM = jnp.stack(counts, axis=-1)
    sums |= agreement(jnp.stack(found, axis=-1), counts_BTM)
    return total, jax.lax.stop_gradient(sums) | {'count': jnp.sum(counts_BTM[..., 0], dtype=jnp.float32)}

  def ranks(self, trainable: nnx.State, frozen: Frozen, batch: dict[str, Array], levels: int) -> Array:
    """See `acceptance.Guesser`: a chain whose newest token is i began with pair i - 1."""
    weights = self._weights(trainable, frozen)
    features_BTF = self._features(observe(frozen.target, batch, self.num_tokens))
    found = [ranks(self._logits(weights, guess_BTD), shifted(batch['tokens'], 2 + step), counted(batch, 2 + step),
                   self._ids(weights))
             for step, guess_BTD in enumerate(unroll(weights, batch, features_BTF, levels))]
    return jnp.pad(jnp.stack(found, axis=-1), ((0, 0), (1, 0), (0, 0)), constant_values=UNASKED)[:, :-1]

  def _features(self, seen: Seen) -> Array:
    return seen.hidden_BTD if seen.taps_BTF is None else seen.taps_BTF

  def _weights(self, trainable: nnx.State, frozen: Frozen) -> EagleWeights:
    return EagleWeights.create(nnx.merge(self.graph, trainable, frozen.rest), frozen.target)

  def _ids(self, weights: EagleWeights) -> Array | None:
    ids = weights.head.draft_ids
    return None if ids is None else ids[...]

  def _logits(self, weights: EagleWeights, guess_BTD: Array) -> Array:
    logits_BTU = weights.logits(guess_BTD)
    return logits_BTU if weights.head.draft_ids is not None else logits_BTU[..., :self.num_tokens]
