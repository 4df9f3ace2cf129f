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

  def laws(self, vocab: int) -> Array:
    """[B, M, V]: the laws, one-hot for point masses."""
    return jax.nn.one_hot(self.tokens_BM, vocab) if self.probs_BMV is None else self.probs_BMV

  def prob_of_tokens(self) -> Array:
    """[B, M]: the draft probability of each drafted token."""
    if self.probs_BMV is None:
      return jnp.ones(self.tokens_BM.shape)
    return prob_of(self.probs_BMV, self.tokens_BM)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreeDraft:
  """A tree of drafted tokens per row of the batch (`specdec.tree`).

  Attributes:
    tokens_BM: drafted ids of the M nodes; siblings may repeat a token.
    parents_BM: the row under which each node hangs.
    laws_BRV: the law that the children of each row in `internal` were drawn from; None is point masses only.
    count_B: M, or 0 where nothing is drafted (a plain decoding step).
    levels: the depth of the tree, at most.
    internal: the rows that `laws_BRV` belongs to, in order.
    num_drawn: so many nodes, the first ones, were drawn; the rest are point masses, judged after all drawn siblings.
    branching: children of one row, at most.
    replacement: whether siblings were drawn with replacement; without, each from what its elder siblings left over.
  """

  tokens_BM: Array
  parents_BM: Array
  laws_BRV: Array | None
  count_B: Array
  levels: int = dataclasses.field(metadata={'static': True})
  branching: int = dataclasses.field(metadata={'static': True})
  internal: tuple[int, ...] = dataclasses.field(default=(), metadata={'static': True})
  num_drawn: int = dataclasses.field(default=0, metadata={'static': True})
  replacement: bool = dataclasses.field(default=False, metadata={'static': True})

  @property
  def width(self) -> int:
    return self.tokens_BM.shape[1]

  @classmethod
  def of_chain(cls, draft: Draft) -> 'TreeDraft':
    """A chain without laws as a tree; what is past a row's count hangs on, so the count must be heeded too."""
    parents_BM = jnp.broadcast_to(jnp.arange(draft.width), draft.tokens_BM.shape)
    return cls(draft.tokens_BM, parents_BM, None, draft.count_B, draft.width, 1)

  def along(self, verdict: 'Verdict') -> Draft:
    """The accepted path as a chain of `levels` tokens, and one more than was accepted where the path went on."""
    path_BP = verdict.path_BP
    tokens_BM = jnp.take_along_axis(self.tokens_BM, jnp.maximum(path_BP - 1, 0), axis=1)
    last_B = jnp.where(verdict.num_accepted_B > 0, path_BP[:, -1], 0)
    goes_on_B = jnp.any(self.parents_BM == last_B[:, None], axis=1) & (self.count_B > 0)
    return Draft(tokens_BM, None, verdict.num_accepted_B + goes_on_B)


AnyDraft = Draft | TreeDraft


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
  """What an accept rule decided.

  Attributes:
    num_accepted_B: leading drafted tokens kept; in a tree, the depth of the last one kept.
    next_token_B: the correction after a rejection, the bonus after full acceptance.
    path_BP: in a tree, the rows of the kept tokens from the top down; after the last of them it is repeated.
  """

  num_accepted_B: Array
  next_token_B: Array
  path_BP: Array | None = None


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
    overlap_BM = prob_of(target_BMV, draft.tokens_BM)
    return jnp.where(jnp.isnan(overlap_BM), 0.0, overlap_BM)
  overlap_BM = jnp.sum(jnp.minimum(target_BMV, draft.probs_BMV), axis=-1)
  return jnp.where(jnp.isnan(overlap_BM), 0.0, overlap_BM)
