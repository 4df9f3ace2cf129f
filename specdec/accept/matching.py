"""Judging by matching: the target chooses at every row, and a drafted token is kept iff it is what was chosen above it.

What is emitted is the target's own choice, whatever was drafted.
"""

from jax import Array
import jax.numpy as jnp

from specdec.draft import AnyDraft, Draft, TreeDraft, Verdict
from specdec.tree import ancestors, depths, rows_to


def match(choice_BT: Array, draft: AnyDraft) -> Verdict:
  """Keeps the longest path whose tokens equal the choices; the next token is the choice after it."""
  return match_chain(choice_BT, draft) if isinstance(draft, Draft) else match_tree(choice_BT, draft)


def match_chain(choice_BT: Array, draft: Draft) -> Verdict:
  kept_BM = (draft.tokens_BM == choice_BT[:, :draft.width]) & (jnp.arange(draft.width) < draft.count_B[:, None])
  num_accepted_B = jnp.sum(jnp.cumprod(kept_BM.astype(jnp.int32), axis=1), axis=1)
  return Verdict(num_accepted_B, jnp.take_along_axis(choice_BT, num_accepted_B[:, None], axis=1)[:, 0])


def match_tree(choice_BT: Array, draft: TreeDraft) -> Verdict:
  hit_BM = draft.tokens_BM == at_parent(choice_BT, draft)
  row_B, num_accepted_B = deepest(hit_BM, draft)
  next_B = jnp.take_along_axis(choice_BT, row_B[:, None], axis=1)[:, 0]
  return Verdict(num_accepted_B, next_B, rows_to(row_B, draft.parents_BM, draft.levels))


def deepest(hit_BM: Array, draft: TreeDraft, prefer_BT: Array | None = None) -> tuple[Array, Array]:
  """The deepest row that is hit like all rows above it, and its depth; of several that `prefer` ranks highest."""
  hit_BT = jnp.pad(hit_BM & (draft.count_B > 0)[:, None], ((0, 0), (1, 0)), constant_values=True)
  above_BTT = ancestors(draft.parents_BM, draft.levels)
  kept_BT = jnp.all(hit_BT[:, None] | ~above_BTT, axis=-1)
  depth_BT = jnp.where(kept_BT, jnp.sum(above_BTT, axis=-1) - 1, -1)
  depth_B = jnp.max(depth_BT, axis=1)
  candidate_BT = depth_BT == depth_B[:, None]
  if prefer_BT is None:
    return jnp.argmax(candidate_BT, axis=1), depth_B
  return jnp.argmax(jnp.where(candidate_BT, prefer_BT, -jnp.inf), axis=1), depth_B


def row_depths(draft: TreeDraft) -> Array:
  """[B, T]"""
  return depths(draft.parents_BM, draft.levels)


def at_parent(x_BT: Array, draft: TreeDraft) -> Array:
  """[B, M]: what belongs to the row above each node."""
  return jnp.take_along_axis(x_BT, draft.parents_BM, axis=1)
