"""Any drafter's tree with a lookup chain as one more branch: copies where the text repeats itself, drafts elsewhere."""

import dataclasses
from typing import Any

from flax import struct
from jax import Array
import jax.numpy as jnp

from models.source import Source
from specdec.draft import AnyDraft, TreeDraft
from specdec.drafters.lookup import Lookup, continuation
from specdec.drafters.protocol import Context, Drafter
from specdec.features import Reads


@struct.dataclass
class HybridState:
  """State between steps.

  Attributes:
    inner: of the drafter.
    drafted_BM: what it drafted in the last step.
    start_B: the text's length before that step.
  """

  inner: Any
  drafted_BM: Array
  start_B: Array


@dataclasses.dataclass(frozen=True)
class Hybrid:
  """Lossless like its parts: a copied token is a point mass, tried after all drawn siblings.

  Attributes:
    drafter: of the tree or chain.
    lookup: of the chain that is added under the newest token.
    own, copied: drafted tokens of each; γ is their sum.
  """

  drafter: Drafter
  lookup: Lookup
  own: int
  copied: int

  name = 'hybrid'
  is_tree = True

  def __post_init__(self):
    if min(self.own, self.copied) < 1:
      raise ValueError(f'own={self.own} and copied={self.copied} drafted tokens: both must be 1 or more')

  @property
  def reads(self) -> Reads:
    return self.drafter.reads

  @property
  def draws(self) -> bool:
    return self.drafter.draws

  def levels(self, gamma: int) -> int:
    if gamma not in (0, self.own + self.copied):
      raise ValueError(f'gamma={gamma} is not the sum of {self.own} drafted and {self.copied} copied tokens')
    return max(self.drafter.levels(self.own), self.copied)

  def init(self, params: Any, tokens_BL: Array, length_B: Array, bucket: int,
           features_BTF: Array | None, source: Source | None) -> HybridState:
    inner = self.drafter.init(params, tokens_BL, length_B, bucket, features_BTF, source)
    return HybridState(inner, jnp.zeros((tokens_BL.shape[0], self.own), jnp.int32), length_B)

  def propose(self, params: Any, state: HybridState, context: Context, gamma: int) -> tuple[TreeDraft, HybridState]:
    inner = state.inner
    if self.reads is Reads.NOTHING:
      inner = self.drafter.observe(inner, self._own_length(state, context), None)
    draft, inner = self.drafter.propose(params, inner, context, self.own)
    chain, _ = self.lookup.propose(None, (), context, self.copied)
    tree = with_branch(as_tree(draft), chain.tokens_BM)
    return tree, HybridState(inner, draft.tokens_BM, context.length_B)

  def observe(self, state: HybridState, length_B: Array, features_BEF: Array | None) -> HybridState:
    return state.replace(inner=self.drafter.observe(state.inner, length_B, features_BEF))

  def _own_length(self, state: HybridState, context: Context) -> Array:
    """[B]: how much of the text a drafter that keeps its own drafts in a cache has seen as it is.

    Where the copied branch was accepted, what it drafted is not what the text says.
    """
    same_BM = continuation(context.tokens_BL, state.start_B, self.own) == state.drafted_BM
    num_same_B = jnp.sum(jnp.cumprod(same_BM.astype(jnp.int32), axis=1), axis=1)
    return jnp.minimum(context.length_B, state.start_B + num_same_B + 1)


def as_tree(draft: AnyDraft) -> TreeDraft:
  """A chain as a tree; a drawn token past a row's count has no law, and so is never kept."""
  if isinstance(draft, TreeDraft):
    return draft
  tree = TreeDraft.of_chain(draft)
  if draft.probs_BMV is None:
    return tree
  drafted_BM1 = (jnp.arange(draft.width) < draft.count_B[:, None])[..., None]
  return dataclasses.replace(tree, laws_BRV=jnp.where(drafted_BM1, draft.probs_BMV, 0.0),
                             internal=tuple(range(draft.width)), num_drawn=draft.width)


def with_branch(tree: TreeDraft, tokens_BK: Array) -> TreeDraft:
  """The tree with one more chain of point masses under row 0."""
  copied = tokens_BK.shape[1]
  width = tree.width + copied
  parents_K = jnp.concatenate([jnp.zeros((1,), jnp.int32), tree.width + jnp.arange(1, copied)])
  parents_BK = jnp.broadcast_to(parents_K, tokens_BK.shape)
  return dataclasses.replace(
      tree, tokens_BM=jnp.concatenate([tree.tokens_BM, tokens_BK], axis=1),
      parents_BM=jnp.concatenate([tree.parents_BM, parents_BK], axis=1),
      count_B=jnp.where(tree.count_B > 0, width, 0), levels=max(tree.levels, copied), branching=tree.branching + 1)
