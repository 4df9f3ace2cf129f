"""Block verification: the drafted chain is judged as a whole (Sun et al., 2024, arXiv 2403.10444)."""

import dataclasses

from jax import Array
import jax.numpy as jnp

from specdec import rng
from specdec.draft import Draft, Verdict, law_at, prob_of


def _shares(draft: Draft, target_probs_BTV: Array) -> Array:
  """[B, T]: how much of the target's mass on the first i drafted tokens the draft may claim, π_i; π_0 is 1."""
  target_BM = prob_of(target_probs_BTV[:, :draft.width], draft.tokens_BM)
  drafted_BM = draft.prob_of_tokens()
  shares = [jnp.ones(draft.count_B.shape, target_probs_BTV.dtype)]
  for i in range(draft.width):
    possible_B = drafted_BM[:, i] > 0
    ratio_B = target_BM[:, i] / jnp.where(possible_B, drafted_BM[:, i], 1)
    shares.append(jnp.minimum(1, shares[-1] * jnp.where(possible_B, ratio_B, 0)))
  return jnp.stack(shares, axis=1)


def _residuals(draft: Draft, target_probs_BTV: Array) -> Array:
  """[B, M, V]: max(π_i target - draft, 0) after the first i tokens."""
  share_BM1 = _shares(draft, target_probs_BTV)[:, :draft.width, None]
  return jnp.maximum(share_BM1 * target_probs_BTV[:, :draft.width] - draft.laws(target_probs_BTV.shape[-1]), 0)


def num_accepted(uniform_BM: Array, draft: Draft, target_probs_BTV: Array) -> Array:
  """[B]: the largest i whose uniform lies below its threshold, whatever the smaller ones did; 0 if none does.

  The threshold of the last drafted token is π; before it Z / (Z + 1 - π), Z the residual mass after it.
  """
  share_BT = _shares(draft, target_probs_BTV)
  mass_BM = jnp.sum(_residuals(draft, target_probs_BTV), axis=-1)
  index_M = jnp.arange(1, draft.width + 1)
  share_BM = share_BT[:, 1:]
  after_BM = jnp.pad(mass_BM[:, 1:], ((0, 0), (0, 1)))
  total_BM = after_BM + (1 - share_BM)  # so that it is no less than after_BM, rounded
  certain_BM = total_BM == 0  # π = 1, Z = 0: no doubt
  threshold_BM = jnp.where(certain_BM, 1, after_BM / jnp.where(certain_BM, 1, total_BM))
  is_last_BM = (index_M == draft.count_B[:, None]) | jnp.isnan(after_BM)  # nothing is drawn from a law that is NaN
  threshold_BM = jnp.where(is_last_BM, share_BM, threshold_BM)
  kept_BM = (uniform_BM < threshold_BM) & (index_M <= draft.count_B[:, None])
  return jnp.max(jnp.where(kept_BM, index_M, 0), axis=1, initial=0)


def next_law(draft: Draft, target_probs_BTV: Array, num_accepted_B: Array) -> Array:
  """[B, V]: norm(max(π target - draft, 0)) after a rejection, the target's own law after full acceptance."""
  target_BV = law_at(target_probs_BTV, num_accepted_B)
  if draft.width == 0:
    return target_BV
  residual_BV = law_at(_residuals(draft, target_probs_BTV), jnp.minimum(num_accepted_B, draft.width - 1))
  total_B1 = jnp.sum(residual_BV, axis=-1, keepdims=True)
  rejected_B1 = (num_accepted_B < draft.count_B)[:, None] & (total_B1 > 0)
  return jnp.where(rejected_B1, residual_BV / jnp.where(rejected_B1, total_B1, 1), target_BV)


@dataclasses.dataclass(frozen=True)
class Block:
  """Lossless; emits at least as much as the token rule in expectation, and the same for point masses."""

  name = 'block'
  lossless = True
  draft_purpose = rng.Purpose.DRAFT
  trees, laws = False, True
  by_step = True

  def __call__(self, row_key_B: Array, position_B: Array, draft: Draft, target_probs_BTV: Array) -> Verdict:
    uniform_BM = rng.uniforms(row_key_B, position_B, draft.width, rng.Purpose.ACCEPT)
    num_accepted_B = num_accepted(uniform_BM, draft, target_probs_BTV)
    law_BV = next_law(draft, target_probs_BTV, num_accepted_B)
    return Verdict(num_accepted_B, rng.draw(row_key_B, position_B + num_accepted_B, law_BV, rng.Purpose.EMIT))
