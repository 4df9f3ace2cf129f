"""What the enumeration of trees is run on: every kind of child and filter, each of which must leave the law exact."""

from collections.abc import Iterator

import numpy as np

from experiments import exact_cases
from experiments import tree_paths as trees
from experiments.draft_paths import Law, Text
from experiments.enumeration import table_law, warped
from experiments.exact_cases import FILTERS, REPEATING, pair, without
from experiments.tree_enumeration import TreeCase
from experiments.tree_paths import NoisyTreeDrafter, TreeDrafter
from specdec.tree import TreeSpec

DEEP = TreeSpec.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])  # three levels
WIDE = TreeSpec.from_paths([(0,), (1,), (2,), (0, 0)])
FLAT = TreeSpec.from_paths([(0,), (1,), (2,)])
SMALL = TreeSpec.from_paths([(0,), (1,), (1, 0)])
KINDS = {'without replacement': False, 'with replacement': True}


def all_cases() -> list[TreeCase]:
  """Cases of multi-round rejection."""
  return [*_drawn(), *_point_masses(), *_mixed(), *_filters(), *_vocabularies(), *_edges()]


def _drawn() -> Iterator[TreeCase]:
  for kind, replacement in KINDS.items():
    for vocab, spec in ((3, DEEP), (3, TreeSpec.chain(3)), (4, WIDE), (5, FLAT)):
      target, draft = map(table_law, pair(vocab, seed=spec.num_nodes))
      yield TreeCase(f'{kind}, {vocab} tokens, {_shape(spec)}', target, trees.drawn(draft, spec, replacement), vocab)


def _shape(spec: TreeSpec) -> str:
  return 'nodes per level ' + ' '.join(str(len(spec.nodes_at(depth))) for depth in range(1, spec.levels + 1))


def _point_masses() -> Iterator[TreeCase]:
  target, draft = map(table_law, pair(3, seed=5))
  drafters = {
      'likeliest children': trees.ranked(draft, DEEP),
      'likeliest children, tested one by one': trees.ranked(draft, DEEP, walked=True),
      'nodes chosen by confidence': trees.confident(draft, 3, 2, 5),
      'all tokens as children': trees.ranked(draft, FLAT),
      'all tokens as children, tested one by one': trees.ranked(draft, FLAT, walked=True),
  }
  for name, drafter in drafters.items():
    yield TreeCase(name, target, drafter, 3)
  copies = trees.with_copy(trees.ranked(draft, SMALL), 2)
  yield TreeCase('likeliest children and a copy', target, copies, 3, REPEATING, order=None)


def _mixed() -> Iterator[TreeCase]:
  target, draft = map(table_law, pair(3, seed=6))
  for kind, replacement in KINDS.items():
    drafter = trees.with_copy(trees.drawn(draft, SMALL, replacement), 2)
    yield TreeCase(f'{kind}, then a copy', target, drafter, 3, REPEATING, order=None)
  chain = trees.with_copy(trees.drawn(draft, TreeSpec.chain(1)), 3)
  yield TreeCase('one drawn child, then a copy', target, chain, 3, REPEATING, order=None)


def _filters() -> Iterator[TreeCase]:
  target, draft = pair(4, seed=7)
  for name, values in FILTERS.items():
    laws = table_law(warped(target, *values)), table_law(warped(draft, *values))
    for kind, replacement in KINDS.items():
      yield TreeCase(f'filtered: {name}, {kind}', laws[0], trees.drawn(laws[1], SMALL, replacement), 4)
    yield TreeCase(f'filtered: {name}, likeliest children', laws[0], trees.ranked(laws[1], SMALL), 4)
  for name, temperature in (('cooler', 0.5), ('warmer', 2.0), ('greedy', 0.0)):
    law = table_law(warped(draft, temperature))
    yield TreeCase(f'{name} draft', table_law(target), trees.drawn(law, SMALL), 4)


def _vocabularies() -> Iterator[TreeCase]:
  target, draft = pair(4, seed=9)
  tables = {
      'draft over part of the vocabulary': (target, without(draft, 2)),
      'more children than tokens to draft': (target, without(draft, 0, 3)),
      'target that forbids tokens': (without(target, 1), draft),
      'nothing in common': (without(target, 0, 1), without(draft, 2, 3)),
  }
  for name, laws in tables.items():
    target_law, draft_law = map(table_law, laws)
    for kind, replacement in KINDS.items():
      yield TreeCase(f'{name}, {kind}', target_law, trees.drawn(draft_law, WIDE, replacement), 4)


def _edges() -> Iterator[TreeCase]:
  target, draft = map(table_law, pair(3, seed=10))
  greedy = table_law(warped(pair(3, seed=10)[0], 0.0))
  drafters = {
      'draft equal to the target': trees.drawn(target, DEEP),
      'draft equal to the target but for the last bit': trees.drawn(_nudged(target), DEEP),
      'draft equal to the target, with replacement': trees.drawn(target, DEEP, replacement=True),
  }
  for name, drafter in drafters.items():
    yield TreeCase(name, target, drafter, 3)
  yield TreeCase('greedy target, likeliest children with soft laws', greedy, trees.ranked(draft, DEEP, draft), 3)


def _nudged(law: Law) -> Law:
  return lambda text: exact_cases.nudged(law(text))


def coupled_cases() -> list[tuple[TreeCase, NoisyTreeDrafter]]:
  """Cases of the coupled rule, whose text must be that of plain decoding under every noise."""
  target, draft = map(table_law, pair(3, seed=11))
  deep, copies = trees.ranked(draft, DEEP), trees.with_copy(trees.ranked(draft, SMALL), 3)
  proposers = {
      'shared noise': (deep, trees.shared_noise(draft, DEEP)),
      'shared noise, draft equal to the target': (deep, trees.shared_noise(target, DEEP)),
      'likeliest children': (deep, trees.noiseless(deep)),
      'nodes chosen by confidence': (deep, trees.noiseless(trees.confident(draft, 3, 2, 5))),
      'likeliest children and a copy': (copies, trees.noiseless(copies)),
  }
  cases = [(TreeCase(name, target, drafter, 3, REPEATING, order=None), propose)
           for name, (drafter, propose) in proposers.items()]
  for name, values in FILTERS.items():
    target, draft = (table_law(warped(table, *values)) for table in pair(3, seed=12))
    cases.append((TreeCase(f'filtered: {name}', target, deep, 3), trees.shared_noise(draft, DEEP)))
  return cases


def single(target: np.ndarray, drafter: TreeDrafter, vocab: int, prompt: Text = (0, 1)) -> TreeCase:
  """A target that looks back at nothing."""
  return TreeCase('', table_law(target), drafter, vocab, prompt, order=0)
