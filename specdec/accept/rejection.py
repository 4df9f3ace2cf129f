"""The token rule: Chen et al. (2023), algorithm 2; Leviathan et al. (2023), algorithm 1."""

import dataclasses

from jax import Array
import jax.numpy as jnp

from specdec import rng
from specdec.draft import Draft, Verdict, law_at, prob_of


def num_accepted(uniform_BM: Array, draft: Draft, target_probs_BTV: Array) -> Array:
  """[B]: drafted tokens kept: token i iff u_i < target(x_i) / draft(x_i) and all before it are kept.

  Written without a division; strict, so that a token the target forbids is never kept, not even at u = 0.
  """
  target_BM = prob_of(target_probs_BTV[:, :draft.width], draft.tokens_BM)
  kept_BM = uniform_BM * draft.prob_of_tokens() < target_BM
  kept_BM &= jnp.arange(draft.width) < draft.count_B[:, None]
  return jnp.sum(jnp.cumprod(kept_BM.astype(jnp.int32), axis=1), axis=1)


def next_law(draft: Draft, target_probs_BTV: Array, num_accepted_B: Array) -> Array:
  """[B, V]: the law of the token after the kept ones.

  norm(max(0, target - draft)) after a rejection (for a point mass: the target without the drafted token), the
  target's own law after full acceptance. If rounding leaves no residual (target = draft), the target's law.
  """
  target_BV = law_at(target_probs_BTV, num_accepted_B)
  if draft.width == 0:
    return target_BV
  draft_BV = _draft_law_at(draft, jnp.minimum(num_accepted_B, draft.width - 1), target_BV.shape[-1])
  rejected_B1 = (num_accepted_B < draft.count_B)[:, None]
  residual_BV = jnp.where(rejected_B1, jnp.maximum(target_BV - draft_BV, 0), target_BV)
  total_B1 = jnp.sum(residual_BV, axis=-1, keepdims=True)
  return jnp.where(total_B1 > 0, residual_BV / jnp.where(total_B1 > 0, total_B1, 1), target_BV)


def _draft_law_at(draft: Draft, index_B: Array, vocab: int) -> Array:
  if draft.probs_BMV is not None:
    return law_at(draft.probs_BMV, index_B)
  token_B1 = jnp.take_along_axis(draft.tokens_BM, index_B[:, None], axis=1)
  return (jnp.arange(vocab) == token_B1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Rejection:
  """Lossless for every draft law, given the law the tokens were really drawn from, unless it is lenient.

  Attributes:
    lenience: l of Leviathan et al. (2023), appendix A.5, in (0, 1]. Below 1 a tested token is kept with probability
      sum min(target / l, draft), and no token is emitted with more than target / l: lossy. Laws of temperature 0 are
      one-hot, and there it changes nothing.
  """

  lenience: float = dataclasses.field(default=1.0, kw_only=True)

  draft_purpose = rng.Purpose.DRAFT
  trees, laws = False, True
  by_step = False

  def __post_init__(self):
    if not 0 < self.lenience <= 1:
      raise ValueError(f'lenience must lie in (0, 1], got {self.lenience}')

  @property
  def name(self) -> str:
    return 'rejection' if self.lossless else f'rejection, lenience {self.lenience:g}'

  @property
  def lossless(self) -> bool:
    return self.lenience == 1

  def __call__(self, row_key_B: Array, position_B: Array, draft: Draft, target_probs_BTV: Array) -> Verdict:
    uniform_BM = rng.uniforms(row_key_B, position_B, draft.width, rng.Purpose.ACCEPT)
    if not self.lossless:
      uniform_BM = self.lenience * uniform_BM  # u l draft < target: the draft is compared as if it were l of itself
    num_accepted_B = num_accepted(uniform_BM, draft, target_probs_BTV)
    law_BV = next_law(draft, target_probs_BTV, num_accepted_B)
    return Verdict(num_accepted_B, rng.draw(row_key_B, position_B + num_accepted_B, law_BV, rng.Purpose.EMIT))
