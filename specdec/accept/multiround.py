"""Multi-round rejection in a tree: children are tried one after the other (Miao et al., 2023, SpecInfer; Li et al.,
2024, EAGLE, appendix A.2).

A child drawn from law q is kept with probability min(1, p / q); if it is refused, p becomes norm(max(0, p - q)) and the
next child is tried. Children drawn without replacement come from laws that leave out their elder siblings. A child that
was not drawn is a point mass: it is kept with probability p, and if refused it is taken out of p.
"""

import dataclasses

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from specdec import rng
from specdec.accept.matching import match_tree, row_depths
from specdec.accept.rejection import Rejection
from specdec.draft import AnyDraft, Draft, TreeDraft, Verdict, law_at
from specdec.tree import rows_to
from specdec.wide import invert_cdf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
  """Where the test stands.

  Attributes:
    row_B: the last kept row.
    law_BV: what is left of the target's law there.
    drawn_BV: the law that its next drawn child came from.
    depth_B: of the row.
  """

  row_B: Array
  law_BV: Array
  drawn_BV: Array
  depth_B: Array


def walk(uniform_BPK: Array, draft: TreeDraft, target_probs_BTV: Array) -> Walk:
  """The test with the uniforms of each depth and child."""
  batch, vocab = target_probs_BTV.shape[0], target_probs_BTV.shape[-1]
  row_of_law = np.zeros(draft.width + 1, np.int32)
  row_of_law[list(draft.internal)] = np.arange(len(draft.internal))
  turn_BM = turns(draft.parents_BM)

  def enter(row_B: Array) -> tuple[Array, Array]:
    return law_at(target_probs_BTV, row_B), law_at(draft.laws_BRV, jnp.asarray(row_of_law)[row_B])

  def try_child(turn: Array, state: Walk) -> Walk:
    depth, rank = turn // draft.branching, turn % draft.branching
    is_it_BM = (draft.parents_BM == state.row_B[:, None]) & (turn_BM == rank)
    node_B = jnp.argmax(is_it_BM, axis=1).astype(jnp.int32)
    token_B1 = jnp.take_along_axis(draft.tokens_BM, node_B[:, None], axis=1)
    is_drawn_B = node_B < draft.num_drawn
    point_BV = (jnp.arange(vocab) == token_B1).astype(state.law_BV.dtype)
    child_BV = jnp.where(is_drawn_B[:, None], state.drawn_BV, point_BV)
    at_token = lambda law_BV: jnp.take_along_axis(law_BV, token_B1, axis=1)[:, 0]
    # A drawn child of probability 0 is none: its elder siblings had taken all there was.
    is_there_B = jnp.any(is_it_BM, axis=1) & (draft.count_B > 0) & (state.depth_B == depth) & (at_token(child_BV) > 0)
    kept_B = is_there_B & (uniform_BPK[:, depth, rank] * at_token(child_BV) < at_token(state.law_BV))
    refused_B1 = (is_there_B & ~kept_B)[:, None]
    law_BV = jnp.where(refused_B1, residual(state.law_BV, child_BV), state.law_BV)
    drawn_BV = state.drawn_BV
    if not draft.replacement:
      drawn_BV = jnp.where(refused_B1 & is_drawn_B[:, None], left_over(drawn_BV, point_BV > 0), drawn_BV)
    row_B = jnp.where(kept_B, node_B + 1, state.row_B)
    target_BV, fresh_BV = enter(row_B)
    return Walk(row_B, jnp.where(kept_B[:, None], target_BV, law_BV),
                jnp.where(kept_B[:, None], fresh_BV, drawn_BV), state.depth_B + kept_B)

  zeros_B = jnp.zeros((batch,), jnp.int32)
  return jax.lax.fori_loop(0, draft.levels * draft.branching, try_child, Walk(zeros_B, *enter(zeros_B), zeros_B))


def turns(parents_BM: Array) -> Array:
  """[B, M]: how many siblings are tried before each node; they are tried in the order in which they were drafted."""
  siblings_BMM = parents_BM[:, :, None] == parents_BM[:, None]
  return jnp.sum(jnp.tril(siblings_BMM, -1), axis=-1)


def residual(law_BV: Array, child_BV: Array) -> Array:
  """What is left of the target's law after a child of that law was refused."""
  return _normed(law_BV - child_BV, law_BV)


def left_over(drawn_BV: Array, is_child_BV: Array) -> Array:
  """The law of the next child that is drawn without replacement."""
  return _normed(jnp.where(is_child_BV, 0, drawn_BV), jnp.zeros_like(drawn_BV))


def _normed(law_BV: Array, otherwise_BV: Array) -> Array:
  """max(0, law) as a law; the other one where nothing is left."""
  law_BV = jnp.maximum(law_BV, 0)
  total_B1 = jnp.sum(law_BV, axis=-1, keepdims=True)
  return jnp.where(total_B1 > 0, law_BV / jnp.where(total_B1 > 0, total_B1, 1), otherwise_BV)


def match_drawn(uniform_BL: Array, draft: TreeDraft, target_probs_BTV: Array) -> Verdict:
  """The test of point masses: with the uniform of its depth the target draws at each row, and the tree is matched."""
  uniform_BT = jnp.take_along_axis(uniform_BL, row_depths(draft), axis=1)
  return match_tree(invert_cdf(target_probs_BTV, uniform_BT), draft)


@dataclasses.dataclass(frozen=True)
class Multiround:
  """Lossless for every tree whose children are point masses or drawn from the laws it carries; a chain is one child
  per row, for which this is the token rule.

  Where all children are point masses, the target draws once at each row and descends to the child that it drew: the
  same law, and the same text as plain decoding with the same seed.
  """

  name = 'multiround'
  lossless = True
  draft_purpose = rng.Purpose.DRAFT
  trees, laws = True, True
  by_step = False

  def __call__(self, row_key_B: Array, position_B: Array, draft: AnyDraft, target_probs_BTV: Array) -> Verdict:
    if isinstance(draft, Draft):
      return Rejection()(row_key_B, position_B, draft, target_probs_BTV)
    if draft.laws_BRV is None:
      uniform_BL = rng.uniforms(row_key_B, position_B, draft.levels + 1, rng.Purpose.EMIT)
      return match_drawn(uniform_BL, draft, target_probs_BTV)
    uniform_BPK = rng.uniforms(row_key_B, position_B, draft.levels, rng.Purpose.ACCEPT, each=draft.branching)
    end = walk(uniform_BPK, draft, target_probs_BTV)
    next_B = rng.draw(row_key_B, position_B + end.depth_B, end.law_BV, rng.Purpose.EMIT)
    return Verdict(end.depth_B, next_B, rows_to(end.row_B, draft.parents_BM, draft.levels))
