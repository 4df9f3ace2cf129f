"""Trees of drafted tokens: static shapes for the host, and what the device derives from parents.

A step verifies T = M + 1 rows: row 0 is the newest committed token, row i + 1 is node i of the tree. `parents` says
under which row each node hangs; a parent comes before its children. A chain of γ tokens is the tree in which every node
hangs under the one before it.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import functools

from jax import Array
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class TreeSpec:
  """A static tree: hashable, so that it can be part of a drafter.

  Attributes:
    parents: row under which each node hangs, breadth first; siblings stand in the order in which they are drafted.
  """

  parents: tuple[int, ...]

  def __post_init__(self):
    for node, parent in enumerate(self.parents):
      if not 0 <= parent <= node:
        raise ValueError(f'node {node} of the tree hangs under row {parent}: parents come before their children')
    if any(a > b for a, b in zip(self.depths, self.depths[1:], strict=False)):
      raise ValueError('the nodes of a tree must be named breadth first')

  @classmethod
  def chain(cls, gamma: int) -> 'TreeSpec':
    return cls(tuple(range(gamma)))

  @classmethod
  def branches(cls, count: int, length: int) -> 'TreeSpec':
    """`count` chains of `length` nodes, all under the newest token."""
    return cls(tuple(0 if i < count else i + 1 - count for i in range(count * length)))

  @classmethod
  def from_paths(cls, paths: Iterable[Sequence[int]]) -> 'TreeSpec':
    """From ranks: (0, 2) is the third child of the first child (the form in which Medusa's trees are published).

    Raises:
      ValueError: a path whose beginning is missing, or ranks that leave one out.
    """
    ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    rows: dict[tuple[int, ...], int] = {(): 0}
    for path in ordered:
      if not path:
        raise ValueError('a path of the tree is empty')
      if path[:-1] not in rows:
        raise ValueError(f'path {path} of the tree hangs in the air: {path[:-1]} is missing')
      if path[-1] < 0 or (path[-1] > 0 and (*path[:-1], path[-1] - 1) not in rows):
        raise ValueError(f'path {path} of the tree leaves out rank {path[-1] - 1}')
      rows[path] = len(rows)
    return cls(tuple(rows[path[:-1]] for path in ordered))

  @property
  def num_nodes(self) -> int:
    return len(self.parents)

  @functools.cached_property
  def depths(self) -> tuple[int, ...]:
    """Of each row; row 0 has depth 0."""
    depths = [0]
    for parent in self.parents:
      depths.append(depths[parent] + 1)
    return tuple(depths)

  @property
  def levels(self) -> int:
    """The largest depth."""
    return max(self.depths)

  @functools.cached_property
  def ranks(self) -> tuple[int, ...]:
    """Of each node among its siblings."""
    return tuple(self.parents[:node].count(parent) for node, parent in enumerate(self.parents))

  @property
  def branching(self) -> int:
    """The most children of one row."""
    return max(self.ranks, default=-1) + 1

  @functools.cached_property
  def internal(self) -> tuple[int, ...]:
    """The rows that have children, in order."""
    return tuple(sorted(set(self.parents)))

  def nodes_at(self, depth: int) -> tuple[int, ...]:
    """The nodes of one level, which are consecutive."""
    return tuple(node for node in range(self.num_nodes) if self.depths[node + 1] == depth)

  @property
  def paths(self) -> tuple[tuple[int, ...], ...]:
    """The ranks that lead to each node: `from_paths` turned round."""
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(self.parents, self.ranks, strict=True):
      paths.append((*paths[parent], rank))
    return tuple(paths[1:])


def with_root(parents_BM: Array) -> Array:
  """[B, T]: the parent of every row; row 0 is its own."""
  return jnp.pad(parents_BM, ((0, 0), (1, 0)))


def ancestors(parents_BM: Array, levels: int) -> Array:
  """[B, T, T]: whether row j is row i or one that it hangs under."""
  parent_BT = with_root(parents_BM)
  rows = jnp.arange(parent_BT.shape[1])
  up_BT = jnp.broadcast_to(rows, parent_BT.shape)
  seen_BTT = rows[:, None] == rows
  for _ in range(levels):
    up_BT = jnp.take_along_axis(parent_BT, up_BT, axis=1)
    seen_BTT = seen_BTT | (up_BT[..., None] == rows)
  return jnp.broadcast_to(seen_BTT, (*parent_BT.shape, parent_BT.shape[1]))


def depths(parents_BM: Array, levels: int) -> Array:
  """[B, T]: how many rows each row hangs under."""
  return jnp.sum(ancestors(parents_BM, levels), axis=-1) - 1


def rows_to(row_B: Array, parents_BM: Array, levels: int) -> Array:
  """[B, levels]: the rows on the way from below the root down to `row_B`; after it, `row_B` again."""
  parent_BT = with_root(parents_BM)
  upward = [row_B]
  for _ in range(levels):
    upward.append(jnp.take_along_axis(parent_BT, upward[-1][:, None], axis=1)[:, 0])
  upward_BL = jnp.stack(upward[::-1], axis=1)  # [levels + 1], zeros first where the row is shallow
  depth_B1 = jnp.sum(upward_BL > 0, axis=1, keepdims=True)
  index = jnp.arange(1, levels + 1)
  return jnp.take_along_axis(upward_BL, jnp.minimum(index + levels - depth_B1, levels), axis=1)
