"""What drafters produce and what accept rules decide, as plain arrays."""

import dataclasses

import jax
from jax import Array
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
  """A chain of drafted tokens per row.

  Attributes:
    tokens_BM: drafted ids; anything past `count_B`.
    probs_BMV: the law each token was really drawn from, after every filter; None is a point mass.
    count_B: how many of the M tokens are drafted (0 is a plain decoding step).
  """

  tokens_BM: Array
  probs_BMV: Array | None
  count_B: Array

  @property
  def width(self) -> int:
    return self.tokens_BM.shape[1]

  def prob_of_tokens(self) -> Array:
    """[B, M]: the draft probability of each drafted token."""
    if self.probs_BMV is None:
      return jnp.ones(self.tokens_BM.shape)
    return prob_of(self.probs_BMV, self.tokens_BM)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
  """What an accept rule decided.

  Attributes:
    num_accepted_B: leading drafted tokens kept.
    next_token_B: the correction after a rejection, the bonus after full acceptance.
  """

  num_accepted_B: Array
  next_token_B: Array


def prob_of(laws_BMV: Array, tokens_BM: Array) -> Array:
  """[B, M]: each law's probability of its token."""
  return jnp.take_along_axis(laws_BMV, tokens_BM[..., None], axis=-1)[..., 0]


def law_at(laws_BMV: Array, index_B: Array) -> Array:
  """[B, V]: one law per row."""
  return jnp.take_along_axis(laws_BMV, index_B[:, None, None], axis=1)[:, 0]


def overlap(draft: Draft, target_probs_BTV: Array) -> Array:
  """[B, M]: sum of min(target, draft): how likely a tested token is kept (Leviathan et al., 2023, corollary 3.6).

  A law that is NaN overlaps with nothing, as the rules keep none of its tokens.
  """
  target_BMV = target_probs_BTV[:, :draft.width]
  if draft.probs_BMV is None:
    return prob_of(target_BMV, draft.tokens_BM)
  overlap_BM = jnp.sum(jnp.minimum(target_BMV, draft.probs_BMV), axis=-1)
  return jnp.where(jnp.isnan(overlap_BM), 0.0, overlap_BM)
