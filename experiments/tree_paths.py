"""Drafters of trees as lists of what they can draw, for the enumeration."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools

import numpy as np

from experiments import draft_paths
from experiments.draft_paths import Law, Text
from specdec.tree import TreeSpec

Parents = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TreePath:
  """One outcome of a drafter's randomness.

  Attributes:
    tokens: of the nodes.
    prob: of this outcome.
    parents: the row under which each node hangs.
    laws: per row, what the drafter reports that its children were drawn from; rows of point masses may lack.
  """

  tokens: Text
  prob: float
  parents: Parents
  laws: tuple[np.ndarray, ...] = ()

  def text_to(self, row: int) -> Text:
    """The drafted tokens from below the root to a row, its own included."""
    return () if row == 0 else (*self.text_to(self.parents[row - 1]), self.tokens[row - 1])

  def children(self, row: int) -> list[int]:
    """The nodes under a row, in order."""
    return [node for node, parent in enumerate(self.parents) if parent == row]


@dataclasses.dataclass(frozen=True)
class TreeDrafter:
  """A drafter.

  Attributes:
    paths: its outcomes after a text; their probabilities sum to 1.
    levels, branching: of its trees, at most.
    num_drawn: so many nodes, the first, are drawn.
    replacement: whether siblings are drawn with replacement.
    matched: whether it says that all nodes are point masses, so that no test of drawn ones is needed.
  """

  paths: Callable[[Text], Iterator[TreePath]]
  levels: int
  branching: int
  num_drawn: int = 0
  replacement: bool = False
  matched: bool = False


def drawn(law: Law, spec: TreeSpec, replacement: bool = False, reported: Law | None = None) -> TreeDrafter:
  """Children drawn from the law after their row's text; an honest drafter reports that same law.

  Without replacement, a child for which the law has no token left is token 0.
  """
  grow = functools.partial(_children, law, spec, replacement)

  def paths(text: Text) -> Iterator[TreePath]:
    found = [TreePath((), 1.0, ())]
    for node in range(spec.num_nodes):
      found = [longer for path in found for longer in grow(text, path, spec.parents[node])]
    return (_with_laws(path, text, reported or law, spec.internal[-1]) for path in found)

  return TreeDrafter(paths, spec.levels, spec.branching, spec.num_nodes, replacement)


def _children(law: Law, spec: TreeSpec, replacement: bool, text: Text, path: TreePath,
              row: int) -> Iterator[TreePath]:
  """The path with one more node under `row`."""
  law_V = law(text + path.text_to(row)).copy()
  if not replacement:
    law_V[[path.tokens[node] for node in path.children(row)]] = 0
  total = law_V.sum()
  for token in np.flatnonzero(law_V) if total > 0 else (0,):
    prob = law_V[token] / total if total > 0 else 1.0
    yield TreePath((*path.tokens, int(token)), path.prob * prob, (*path.parents, row))


def _with_laws(path: TreePath, text: Text, law: Law, last_row: int) -> TreePath:
  return dataclasses.replace(path, laws=tuple(law(text + path.text_to(row)) for row in range(last_row + 1)))


def ranked(law: Law, spec: TreeSpec, reported: Law | None = None, walked: bool = False) -> TreeDrafter:
  """The likeliest tokens, best first: point masses, unless it (wrongly) reports a law.

  Args:
    law: whose tokens are ranked.
    spec: the tree.
    reported: the law that it says its children were drawn from, without replacement.
    walked: whether point masses are to go through the test of drawn nodes.
  """

  def paths(text: Text) -> Iterator[TreePath]:
    path = TreePath((), 1.0, ())
    for node, row in enumerate(spec.parents):
      order = np.argsort(-law(text + path.text_to(row)), kind='stable')
      path = TreePath((*path.tokens, int(order[spec.ranks[node]])), 1.0, (*path.parents, row))
    yield _with_laws(path, text, reported, spec.internal[-1]) if reported else path

  num_drawn = spec.num_nodes if reported else 0
  return TreeDrafter(paths, spec.levels, spec.branching, num_drawn, matched=not (reported or walked))


def confident(law: Law, levels: int, branching: int, num_nodes: int) -> TreeDrafter:
  """The nodes of the largest probability of the tree that holds the best children of each row (EAGLE-2).

  Another tree after each text. Point masses, so that choosing among them by value is harmless.
  """

  def paths(text: Text) -> Iterator[TreePath]:
    nodes: list[tuple[float, Text]] = [(1.0, ())]
    for _ in range(levels):
      deepest = max(len(drafted) for _, drafted in nodes)
      nodes += [(prob * law(text + drafted)[token], (*drafted, int(token)))
                for prob, drafted in nodes if len(drafted) == deepest
                for token in np.argsort(-law(text + drafted), kind='stable')[:branching]]
    best = sorted(nodes[1:], key=lambda node: (-node[0], len(node[1])))[:num_nodes]
    order = [(), *sorted((drafted for _, drafted in best), key=len)]
    yield TreePath(tuple(drafted[-1] for drafted in order[1:]), 1.0,
                   tuple(order.index(drafted[:-1]) for drafted in order[1:]))

  return TreeDrafter(paths, levels, branching, matched=True)


def with_copy(drafter: TreeDrafter, length: int) -> TreeDrafter:
  """One more branch: what followed the first occurrence of the newest token; token 0 where the text ends."""

  def paths(text: Text) -> Iterator[TreePath]:
    copied = next(draft_paths.copied(text, length)).tokens
    copied += (0,) * (length - len(copied))
    for path in drafter.paths(text):
      first = len(path.tokens) + 1
      yield dataclasses.replace(path, tokens=path.tokens + copied,
                                parents=(*path.parents, 0, *range(first, first + length - 1)))

  return dataclasses.replace(
      drafter, paths=paths, levels=max(drafter.levels, length), branching=drafter.branching + 1)


def siblings_by_token(drafter: TreeDrafter) -> TreeDrafter:
  """The siblings of the last level in the order of their ids, not of their draws. Biased."""

  def paths(text: Text) -> Iterator[TreePath]:
    for path in drafter.paths(text):
      tokens = list(path.tokens)
      for row in range(len(tokens) + 1):
        leaves = [node for node in path.children(row) if not path.children(node + 1)]
        for node, token in zip(leaves, sorted(tokens[node] for node in leaves), strict=True):
          tokens[node] = token
      yield dataclasses.replace(path, tokens=tuple(tokens))

  return dataclasses.replace(drafter, paths=paths)


NoisyTreeDrafter = Callable[[Text, Sequence[np.ndarray]], TreePath]  # a draft, given the noise of its positions


def shared_noise(law: Law, spec: TreeSpec) -> NoisyTreeDrafter:
  """The r-th child of a row is the draft's r-th choice under the noise that the target will use."""

  def propose(text: Text, noises: Sequence[np.ndarray]) -> TreePath:
    path = TreePath((), 1.0, ())
    for node, row in enumerate(spec.parents):
      with np.errstate(divide='ignore'):
        scores_V = np.log(law(text + path.text_to(row))) + noises[spec.depths[row]]
      order = np.argsort(-scores_V, kind='stable')
      path = TreePath((*path.tokens, int(order[spec.ranks[node]])), 1.0, (*path.parents, row))
    return path

  return propose


def noiseless(drafter: TreeDrafter) -> NoisyTreeDrafter:
  """A drafter that draws nothing."""
  return lambda text, noises: next(iter(drafter.paths(text)))
