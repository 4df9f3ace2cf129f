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
from models.errors import InputError
from models.kv_cache import KVCache
from specdec.training.frozen import Frozen, Seen, observe, rows_of_head, segment_mask
from specdec.training.guesses import UNASKED, agreement, counted, ranks, shifted
from specdec.training.labels import check_labels, labels_of
from specdec.training.losses import LOSSES, check_loss, masked_sum, overlap, smooth_l1
from specdec.training.roots import all_places, at, roots_of

INPUTS = ('both', 'token', 'feature')


def unroll(weights: EagleWeights, batch: dict[str, Array], features_BTF: Array, steps: int,
           roots_BN: Array) -> Iterator[Array]:
  """The guesses [B, N, D] of each step that began with the pairs `roots`; those past the end of a text mean nothing.

  All pairs go through in step 0. After it each root has one query a step, and what a step writes lies behind all that
  was written before, as it does when a chain is drafted.
  """
  tokens_BT, positions_BT = batch['tokens'], batch['positions']
  batch_size, width = tokens_BT.shape
  cache = _with_room(weights.head.init_cache(batch_size, 0), width)
  true_BTT = segment_mask(batch['segments'])
  guessed_BTD, cache = weights(shifted(tokens_BT, 1), weights.head.fuse(features_BTF), positions_BT, true_BTT, cache)
  features_BND, true_BNT = at(guessed_BTD, roots_BN), at(true_BTT, roots_BN)
  yield features_BND
  num_roots = roots_BN.shape[1]
  own_BNN = jnp.broadcast_to(jnp.eye(num_roots, dtype=bool), (batch_size, num_roots, num_roots))
  for step in range(1, steps):
    start_B = jnp.full((batch_size,), width + (step - 1) * num_roots)
    mask_BNS = jnp.concatenate([true_BNT] + [own_BNN] * step, axis=-1)
    features_BND, cache = weights(
        at(shifted(tokens_BT, 1 + step), roots_BN), features_BND, at(positions_BT, roots_BN) + step, mask_BNS,
        _with_room(cache, num_roots).with_length(start_B))
    yield features_BND


def _with_room(cache: KVCache, slots: int) -> KVCache:
  more = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, slots), (0, 0)))
  return cache.replace(k=tuple(map(more, cache.k)), v=tuple(map(more, cache.v)),
                       position_BS=jnp.pad(cache.position_BS, ((0, 0), (0, slots))))


def read_only(fc_DX: Array, inputs: str) -> Array:
  """The projection of pairs, token first, without the part that is not read."""
  if inputs == 'both':
    return fc_DX
  is_token_X = jnp.arange(fc_DX.shape[1]) < fc_DX.shape[1] // 2
  return jnp.where(is_token_X == (inputs == 'token'), fc_DX, 0)


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
    inputs: 'both'; or 'token' or 'feature', the only part of a pair that is read (the paper's ablation).
    noise: the features read in step 0 are shifted by U(-noise, noise).
    roots: pairs of each row that guesses begin with where they are unrolled (`roots.roots_of`). Of one step every pair
      is one, since all pass through the layer anyway.
    unroll_from: before so many steps of training only the first of `steps` is learnt, at half the cost.
    unrolls: whether all are, in the step at hand (`at_step`).
  """

  graph: nnx.GraphDef
  num_tokens: int
  steps: int = 3
  token_loss: str = 'kl'
  labels: str = 'law'
  inputs: str = 'both'
  token_weight: float = 1.0
  feature_weight: float = 0.2
  noise: float = 0.0
  decay: float = 1.0
  roots: int = 0
  unroll_from: int = 0
  unrolls: Array | bool = True

  def __post_init__(self):
    check_labels(self.labels)
    if self.unroll_from < 0:
      raise InputError(f'unroll_from={self.unroll_from} must be 0 or more steps of training')
    if self.inputs not in INPUTS:
      raise InputError(f'inputs={self.inputs!r} are unknown: use one of {", ".join(INPUTS)}')
    check_loss(self.token_loss, self.decay, self.roots, token_weight=self.token_weight,
               feature_weight=self.feature_weight, noise=self.noise)
    if self.steps < 1 or not self.token_weight + self.feature_weight:
      raise InputError(f'steps={self.steps}, token_weight={self.token_weight}, feature_weight={self.feature_weight}: '
                       'nothing is learnt; use 1 step or more, and a weight above 0')

  def at_step(self, step: Array) -> 'EagleObjective':
    """See `specdec.training.step.Changing`."""
    return dataclasses.replace(self, unrolls=step >= self.unroll_from) if self.unroll_from else self

  def loss(self, trainable: nnx.State, frozen: Frozen, batch: dict[str, Array],
           key: Array) -> tuple[Array, dict[str, Array]]:
    if self.unrolls is True:
      return self._loss(self.steps, trainable, frozen, batch, key)
    learn = lambda steps: lambda: self._loss(steps, trainable, frozen, batch, key)
    return jax.lax.cond(self.unrolls, learn(self.steps), learn(1))

  def _loss(self, steps: int, trainable: nnx.State, frozen: Frozen, batch: dict[str, Array],
            key: Array) -> tuple[Array, dict[str, Array]]:
    """Of the first `steps` of all."""
    seen, weights = observe(frozen.target, batch, self.num_tokens), self._weights(trainable, frozen)
    noise_key, roots_key = jax.random.split(key)
    features_BTF, ids_U, width = self._features(seen), self._ids(weights), batch['tokens'].shape[1]
    if self.noise:
      features_BTF += jax.random.uniform(noise_key, features_BTF.shape, minval=-self.noise, maxval=self.noise)
    roots_BN = roots_of(batch, self.roots if steps > 1 else 0, roots_key)
    law_BTU = labels_of(self.labels, rows_of_head(frozen.target, ids_U, self.num_tokens), seen, batch, ids_U)
    total, sums, found, counts = jnp.zeros(()), {}, [], []
    for step, guess_BND in enumerate(unroll(weights, batch, features_BTF, steps, roots_BN)):
      about_BN = jnp.minimum(roots_BN + 1 + step, width - 1)  # the token whose vector is guessed, and what follows it
      counts_BN, law_BNU = at(counted(batch, 2) & counted(batch, 2 + step), roots_BN), at(law_BTU, about_BN)
      logits_BNU = self._logits(weights, guess_BND)
      losses_BN = self.token_weight * LOSSES[self.token_loss](law_BNU, logits_BNU)
      if self.feature_weight:
        losses_BN += self.feature_weight * smooth_l1(guess_BND, at(seen.hidden_BTD, about_BN))
      total += self.decay ** step * masked_sum(losses_BN, counts_BN)
      if self.labels == 'law' and not step:
        sums['overlap'] = masked_sum(overlap(law_BNU, logits_BNU), counts_BN)
      found.append(ranks(logits_BNU, at(shifted(batch['tokens'], 1), about_BN), counts_BN, ids_U))
      counts.append(counts_BN)
    found += [jnp.full_like(found[0], UNASKED)] * (self.steps - steps)
    counts += [jnp.zeros_like(counts[0])] * (self.steps - steps)
    counts_BNM = jnp.stack(counts, axis=-1)
    sums |= agreement(jnp.stack(found, axis=-1), counts_BNM)
    return total, jax.lax.stop_gradient(sums) | {'count': jnp.sum(counts_BNM[..., 0], dtype=jnp.float32)}

  def ranks(self, trainable: nnx.State, frozen: Frozen, batch: dict[str, Array], levels: int) -> Array:
    """See `acceptance.Guesser`: a chain whose newest token is i began with pair i - 1."""
    weights = self._weights(trainable, frozen)
    features_BTF = self._features(observe(frozen.target, batch, self.num_tokens))
    found = [ranks(self._logits(weights, guess_BTD), shifted(batch['tokens'], 2 + step), counted(batch, 2 + step),
                   self._ids(weights))
             for step, guess_BTD in enumerate(
                 unroll(weights, batch, features_BTF, levels, all_places(batch['tokens'])))]
    return jnp.pad(jnp.stack(found, axis=-1), ((0, 0), (1, 0), (0, 0)), constant_values=UNASKED)[:, :-1]

  def _features(self, seen: Seen) -> Array:
    return seen.hidden_BTD if seen.taps_BTF is None else seen.taps_BTF

  def _weights(self, trainable: nnx.State, frozen: Frozen) -> EagleWeights:
    head = nnx.merge(self.graph, jax.tree.map(lambda x: x, trainable), frozen.rest)  # a copy, which may be changed
    head.fc[...] = read_only(head.fc[...], self.inputs)
    return EagleWeights.create(head, frozen.target)

  def _ids(self, weights: EagleWeights) -> Array | None:
    ids = weights.head.draft_ids
    return None if ids is None else ids[...]

  def _logits(self, weights: EagleWeights, guess_BTD: Array) -> Array:
    logits_BTU = weights.logits(guess_BTD)
    return logits_BTU if weights.head.draft_ids is not None else logits_BTU[..., :self.num_tokens]
