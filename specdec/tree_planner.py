"""Static trees from measured acceptance, on the host: what to draft so that a step yields most.

Everything follows from one table [K, I]: entry (k, i) is the probability that, of a kept row at depth k, the child of
rank i is kept too. A node is then kept with the product along its path, and a tree yields 1 + the sum over its nodes.
For heads and other point masses the entry is how often the guess of rank i is right; for siblings that are tried one
after the other, `kept_share` makes it from what is measured.

    grow         node by node, always the likeliest (Cai et al., 2024, Medusa, section 2.3.3)
    best_tree    the optimum of its size and depth (Chen et al., 2024, Sequoia, section 3.1)
    plan         the size and depth that emit most per unit of time, from the measured cost of a verify of each width

Trees are tuples of paths, as configs write them and `TreeSpec.from_paths` reads them.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import heapq

import numpy as np
from numpy.typing import ArrayLike

from models.errors import InputError

Path = tuple[int, ...]
Tree = tuple[Path, ...]


def kept_share(conditional: ArrayLike) -> np.ndarray:
  """[..., I]: P(child i is the one kept) from [..., I]: P(child i is kept | all before it were refused)."""
  conditional = np.asarray(conditional, float)
  refused = np.cumprod(1 - conditional, axis=-1)
  return conditional * np.concatenate([np.ones_like(refused[..., :1]), refused[..., :-1]], axis=-1)


def expected_tokens(tree: Iterable[Path], accept_KI: ArrayLike) -> float:
  """Tokens per step, correction or bonus included.

  Raises:
    InputError: a table that is none (`checked`), or a node outside of it.
  """
  accept_KI, total = checked(accept_KI), 1.0
  for path in tree:
    if len(path) > accept_KI.shape[0] or max(path) >= accept_KI.shape[1]:
      raise InputError(f'node {path} of the tree lies outside of the acceptance table, which has '
                       f'{accept_KI.shape[0]} levels of {accept_KI.shape[1]} ranks: measure more, or shrink the tree')
    total += float(np.prod([accept_KI[depth, rank] for depth, rank in enumerate(path)]))
  return total


def checked(accept_KI: ArrayLike) -> np.ndarray:
  """The table as float64.

  Raises:
    InputError: not two-dimensional, not probabilities, or siblings that are kept more often than always.
  """
  accept_KI = np.asarray(accept_KI, float)
  if accept_KI.ndim != 2 or not accept_KI.size:
    raise InputError(f'the acceptance table has shape {accept_KI.shape}: give one row of ranks for each level')
  if not ((accept_KI >= 0) & (accept_KI <= 1)).all():
    raise InputError('the acceptance table holds values outside of 0..1: give probabilities')
  if (accept_KI.sum(axis=1) > 1 + 1e-9).any():
    level = int(np.argmax(accept_KI.sum(axis=1)))
    raise InputError(f'level {level} of the acceptance table sums to {accept_KI[level].sum():.3f}, over 1: '
                     'what is measured given that elder siblings were refused must go through kept_share first')
  return accept_KI


def grow(accept_KI: ArrayLike, num_nodes: int) -> Tree:
  """Adds the likeliest node whose parent and elder siblings are there, until there are `num_nodes`.

  The optimum wherever no rank of a level is likelier than the ranks before it. Of equal nodes the shallower is first.

  Raises:
    InputError: a table that is none (`checked`), or one that has no room for so many nodes.
  """
  accept_KI = checked(accept_KI)
  levels, ranks = accept_KI.shape
  tree: list[Path] = []
  likeliest = [(-accept_KI[0, 0], 1, (0,))]
  while len(tree) < num_nodes:
    if not likeliest:
      raise _no_room(num_nodes, levels, ranks)
    value, depth, path = heapq.heappop(likeliest)
    tree.append(path)
    if path[-1] + 1 < ranks:
      above = np.prod([accept_KI[level, rank] for level, rank in enumerate(path[:-1])])
      heapq.heappush(likeliest, (-above * accept_KI[depth - 1, path[-1] + 1], depth, (*path[:-1], path[-1] + 1)))
    if depth < levels:
      heapq.heappush(likeliest, (value * accept_KI[depth, 0], depth + 1, (*path, 0)))
  return _in_order(tree)


def best_tree(accept_KI: ArrayLike, num_nodes: int, max_depth: int | None = None) -> Tree:
  """The tree of `num_nodes` nodes, of depth `max_depth` at most, that yields most.

  Raises:
    InputError: a table that is none (`checked`), or one that has no room for so many nodes.
  """
  accept_KI = checked(accept_KI)
  accept_KI = accept_KI if max_depth is None else accept_KI[:max_depth]
  subtrees = _Subtrees.of(accept_KI, num_nodes)
  if subtrees.below[0][num_nodes] == -np.inf:
    raise _no_room(num_nodes, *accept_KI.shape)
  return _in_order(subtrees.paths(0, num_nodes))


def best_tokens(accept_KI: ArrayLike, max_nodes: int) -> np.ndarray:
  """[K + 1, max_nodes + 1]: tokens per step of the best tree of n nodes and depth d at most; -inf where none fits.

  Raises:
    InputError: a table that is none (`checked`).
  """
  accept_KI = checked(accept_KI)
  return 1 + np.stack([_Subtrees.of(accept_KI[:depth], max_nodes).below[0] for depth in range(len(accept_KI) + 1)])


@dataclasses.dataclass(frozen=True)
class Plan:
  """A tree and what it promises.

  Attributes:
    tree: for the config; empty where plain decoding is fastest.
    tokens: per step, expected.
    cost: of a step, in plain target passes.
  """

  tree: Tree
  tokens: float
  cost: float

  @property
  def speedup(self) -> float:
    """Over plain decoding."""
    return self.tokens / self.cost


def plan(accept_KI: ArrayLike, verify_cost: Sequence[float], level_cost: float, overhead: float = 0.0,
         max_nodes: int | None = None) -> Plan:
  """The tree with the most tokens per unit of time: E[tokens] / (v(n + 1) + depth c + overhead), by size and depth.

  Args:
    accept_KI: the table; its levels and ranks bound the tree.
    verify_cost: v(1), v(2), ...: a pass of that width over a plain pass, as measured.
    level_cost: c, what drafting one level costs, in plain passes.
    overhead: of a step that drafts anything, in plain passes.
    max_nodes: no larger tree; all that `verify_cost` speaks of without it.

  Raises:
    InputError: a table that is none (`checked`), or costs that are none.
  """
  verify_cost = np.asarray(verify_cost, float)
  if verify_cost.ndim != 1 or not verify_cost.size or not (verify_cost > 0).all():
    raise InputError('verify_cost must hold positive costs of passes of width 1, 2, ...')
  if not (level_cost >= 0 and overhead >= 0):
    raise InputError(f'costs must be 0 or more, got {level_cost} for a level and {overhead} besides')
  most = len(verify_cost) - 1 if max_nodes is None else min(max_nodes, len(verify_cost) - 1)
  tokens_DN = best_tokens(accept_KI, most)
  drafts_D1 = np.arange(len(tokens_DN))[:, None] * level_cost + overhead
  cost_DN = verify_cost[:most + 1] + np.where(np.arange(most + 1) > 0, drafts_D1, 0)
  depth, size = np.unravel_index(np.argmax(tokens_DN / cost_DN), tokens_DN.shape)  # of equals the shallowest
  tree = best_tree(accept_KI, int(size), int(depth)) if size else ()
  return Plan(tree, float(tokens_DN[depth, size]), float(cost_DN[depth, size]))


@dataclasses.dataclass(frozen=True)
class _Subtrees:
  """Best subtrees by depth of their root and by size.

  Attributes:
    below: per depth [N + 1], what n nodes under a row of that depth yield, given that the row is kept.
    first: per depth and rank [N + 1], of n nodes that go to the children of this rank and later ones, how many go to
      the first of them and what hangs under it.
  """

  below: list[np.ndarray]
  first: list[list[np.ndarray]]

  @classmethod
  def of(cls, accept_KI: np.ndarray, max_nodes: int) -> '_Subtrees':
    nothing = np.where(np.arange(max_nodes + 1) == 0, 0.0, -np.inf)
    below, first = [nothing], []
    for accept_I in accept_KI[::-1]:
      best, sizes = nothing, []
      for accept in accept_I[::-1]:
        best, size = _shared(_child(accept, below[0]), best)
        sizes.insert(0, size)
      below.insert(0, best)
      first.insert(0, sizes)
    return cls(below, first)

  def paths(self, depth: int, num_nodes: int, above: Path = ()) -> list[Path]:
    """Of the best `num_nodes` nodes under a row."""
    found: list[Path] = []
    for rank in range(len(self.first[depth]) if num_nodes else 0):
      size = int(self.first[depth][rank][num_nodes])
      if size == 0:
        break
      found += [(*above, rank), *self.paths(depth + 1, size - 1, (*above, rank))]
      num_nodes -= size
    return found


def _child(accept: float, below_N: np.ndarray) -> np.ndarray:
  """[N + 1]: the yield of a child with what hangs under it, by the nodes of both together; 0 nodes are no child."""
  with np.errstate(invalid='ignore'):
    value_N = np.where(np.isneginf(below_N), -np.inf, accept * (1 + below_N))
  return np.concatenate([[-np.inf], value_N[:-1]])


def _shared(child_N: np.ndarray, later_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Best yields of n nodes shared by a child and its younger siblings, and the child's part; no child, no younger."""
  best_N, size_N = np.full(len(child_N), -np.inf), np.zeros(len(child_N), int)
  best_N[0] = 0.0
  for nodes in range(1, len(child_N)):
    value = child_N[1:nodes + 1] + later_N[nodes - 1::-1][:nodes]
    size_N[nodes] = np.argmax(value) + 1
    best_N[nodes] = value[size_N[nodes] - 1]
  return best_N, size_N


def _in_order(tree: Iterable[Path]) -> Tree:
  return tuple(sorted(tree, key=lambda path: (len(path), path)))


def _no_room(num_nodes: int, levels: int, ranks: int) -> InputError:
  return InputError(f'no tree of {num_nodes} nodes has room in {levels} levels of {ranks} ranks: ask for fewer nodes, '
                    'or measure more levels or ranks')
