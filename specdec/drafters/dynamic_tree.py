"""Trees that grow where the draft is confident (Li et al., 2024, EAGLE-2): expanded level by level, then cut to size.

The value of a node is the log-probability of its path under the draft. All is chosen without drawing, so the nodes are
point masses and the choice is free. A candidate is named by its place in the order of creation, level by level.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import struct
import jax
from jax import Array
import jax.numpy as jnp

from models.errors import InputError
from specdec.drafters.children import likeliest


@dataclasses.dataclass(frozen=True)
class Dynamic:
  """The size of a dynamic tree; its shape is another one in every step and row.

  Attributes:
    levels: depth.
    top_k: children of each expanded node, and nodes that are expanded in each level.
    nodes: kept of all candidates for the verify pass: γ.
  """

  levels: int
  top_k: int
  nodes: int

  def __post_init__(self):
    if min(self.levels, self.top_k, self.nodes) < 1:
      raise InputError(f'a dynamic tree needs levels, top_k and nodes of 1 or more, not {self.levels}, {self.top_k} '
                       f'and {self.nodes}')
    if self.nodes > self.num_candidates:
      raise InputError(f'a dynamic tree of {self.levels} levels and top_k {self.top_k} has {self.num_candidates} '
                       f'candidates: {self.nodes} nodes are too many')

  @property
  def num_nodes(self) -> int:
    return self.nodes

  @property
  def num_fed(self) -> int:
    """Nodes that the head runs on."""
    return (self.levels - 1) * self.top_k

  @property
  def num_candidates(self) -> int:
    return self.top_k * (1 + self.num_fed)


@struct.dataclass
class Candidates:
  """All nodes that were drafted, [B, C].

  Attributes:
    tokens_BC: their tokens.
    values_BC: log-probabilities of their paths.
    parents_BC: the candidates that they hang under; -1 is row 0.
  """

  tokens_BC: Array
  values_BC: Array
  parents_BC: Array

  def __add__(self, later: 'Candidates') -> 'Candidates':
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), self, later)


@struct.dataclass
class Beam:
  """The nodes of one level that are expanded, [B, K].

  Attributes:
    index_BK: which candidates they are.
    features_BKD: guessed above them.
    seen_BKF: which of the nodes that the head has run on they see, themselves included.
  """

  index_BK: Array
  features_BKD: Array
  seen_BKF: Array


# Runs the head on nodes of one depth: tokens, features above, what they see, depth, nodes run before, what else is
# carried -> guessed features, logits, what else is carried.
Expand = Callable[[Array, Array, Array, int, int, Any], tuple[Array, Array, Any]]


def grow(tree: Dynamic, root_BD: Array, logits_BU: Array, expand: Expand, carry: Any) -> tuple[Candidates, Any]:
  """All candidates, given the feature and the logits at row 0; tokens are indices into the logits."""
  K, F = tree.top_k, tree.num_fed
  candidates = _children(jnp.full((root_BD.shape[0], 1), -1), jnp.zeros((root_BD.shape[0], 1)), logits_BU[:, None], K)
  own_KF = jnp.arange(F) == jnp.arange(K)[:, None]
  beam = Beam(
      jnp.broadcast_to(jnp.arange(K), candidates.tokens_BC.shape),
      jnp.broadcast_to(root_BD[:, None], (root_BD.shape[0], K, root_BD.shape[1])),
      jnp.broadcast_to(own_KF, (root_BD.shape[0], K, F)))
  for depth in range(1, tree.levels):
    at_beam = lambda x_BC, beam=beam: jnp.take_along_axis(x_BC, beam.index_BK, axis=1)
    features_BKD, logits_BKU, carry = expand(
        at_beam(candidates.tokens_BC), beam.features_BKD, beam.seen_BKF, depth, (depth - 1) * K, carry)
    fresh = _children(beam.index_BK, at_beam(candidates.values_BC), logits_BKU, K)
    if depth + 1 < tree.levels:
      own_KF = jnp.arange(F) == depth * K + jnp.arange(K)[:, None]
      beam = _best_of(fresh, beam, features_BKD, own_KF, candidates.tokens_BC.shape[1])
    candidates += fresh
  return candidates, carry


def _children(index_BK: Array, values_BK: Array, logits_BKU: Array, count: int) -> Candidates:
  """The likeliest children of each node, [B, K * count]."""
  best_BKC, tokens_BKC = likeliest(logits_BKU, count)
  logprobs_BKC = best_BKC - jax.nn.logsumexp(logits_BKU, axis=-1, keepdims=True)
  logprobs_BKC = jnp.where(logprobs_BKC <= 0, logprobs_BKC, jnp.where(logprobs_BKC > 0, 0.0, -jnp.inf))  # rounding, NaN
  flat = lambda x_BKC: jnp.broadcast_to(x_BKC, tokens_BKC.shape).reshape(tokens_BKC.shape[0], -1)
  return Candidates(flat(tokens_BKC), flat(values_BK[..., None] + logprobs_BKC), flat(index_BK[..., None]))


def _best_of(fresh: Candidates, beam: Beam, features_BKD: Array, own_KF: Array, num_before: int) -> Beam:
  """The next beam: the best of a level that was just made under `beam`."""
  count = beam.index_BK.shape[1]
  _, place_BK = jax.lax.top_k(fresh.values_BC, count)
  above_BK1 = (place_BK // count)[..., None]
  return Beam(num_before + place_BK, jnp.take_along_axis(features_BKD, above_BK1, axis=1),
              jnp.take_along_axis(beam.seen_BKF, above_BK1, axis=1) | own_KF)


def rerank(candidates: Candidates, nodes: int) -> tuple[Array, Array]:
  """Tokens and parents [B, M] of the best candidates, in their order.

  A node is worth no more than the one it hangs under, which comes before it and so wins a tie: what is kept is a tree.
  """
  _, chosen_BM = jax.lax.top_k(candidates.values_BC, nodes)
  chosen_BM = jnp.sort(chosen_BM, axis=1)
  at_chosen = lambda x_BC: jnp.take_along_axis(x_BC, chosen_BM, axis=1)
  parents_BM = at_chosen(candidates.parents_BC)
  row_BM = jax.vmap(jnp.searchsorted)(chosen_BM, parents_BM) + 1
  return at_chosen(candidates.tokens_BC), jnp.where(parents_BM < 0, 0, row_BM).astype(jnp.int32)
