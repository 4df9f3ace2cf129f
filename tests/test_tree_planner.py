"""Planned trees: the optimum is the optimum, greedy growth where it must be, and what is expected happens."""

from collections.abc import Iterator
import itertools

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from models.errors import InputError
from specdec import tree_planner as planner
from specdec.tree import TreeSpec

MEDUSA_KI = np.array([[0.56, 0.1, 0.05, 0.04, 0.03], [0.32, 0.11, 0.06, 0.04, 0.03], [0.2, 0.09, 0.06, 0.04, 0.03]])
SEEDS = range(12)


def shares(seed: int, levels: int = 3, ranks: int = 3, monotone: bool = False) -> np.ndarray:
  """A random table, whose later ranks may be likelier than earlier ones."""
  table = np.random.default_rng(seed).dirichlet(np.ones(ranks + 1), levels)[:, :ranks]
  return -np.sort(-table, axis=1) if monotone else table


tables = st.builds(shares, st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 4), st.booleans())


def all_trees(num_nodes: int, levels: int, ranks: int) -> Iterator[planner.Tree]:
  """Every tree of that size, by adding one node at a time."""
  trees: set[frozenset] = {frozenset()}
  for _ in range(num_nodes):
    trees = {tree | {path} for tree in trees for path in addable(tree, levels, ranks)}
  return (tuple(sorted(tree, key=lambda path: (len(path), path))) for tree in trees)


def addable(tree: frozenset, levels: int, ranks: int) -> set[planner.Path]:
  paths = {(*above, rank) for above in tree | {()} if len(above) < levels for rank in range(ranks)} - tree
  return {path for path in paths if path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree}


@pytest.mark.parametrize('seed', SEEDS)
@pytest.mark.parametrize('depth', [1, 2, 3])
def test_best_tree_is_the_best_of_all(seed, depth):
  table = shares(seed)
  for num_nodes in range(1, 7):
    values = [planner.expected_tokens(tree, table) for tree in all_trees(num_nodes, depth, 3)]
    if not values:
      assert planner.best_tokens(table, num_nodes)[depth, num_nodes] == -np.inf
      continue
    best = planner.best_tree(table, num_nodes, depth)
    assert len(best) == num_nodes and max(map(len, best)) <= depth
    assert planner.expected_tokens(best, table) == pytest.approx(max(values), abs=1e-12)
    assert planner.best_tokens(table, num_nodes)[depth, num_nodes] == pytest.approx(max(values), abs=1e-12)


def test_there_are_as_many_trees_as_there_should_be():
  """Binary trees: the Catalan numbers; any ranks and depths: the same one size on."""
  assert [len(list(all_trees(n, 9, 9))) for n in range(1, 6)] == [1, 2, 5, 14, 42]


@pytest.mark.parametrize('seed', SEEDS)
def test_growth_is_optimal_where_earlier_ranks_are_likelier(seed):
  table = shares(seed, monotone=True)
  for num_nodes in (1, 4, 9, 20):
    grown, best = planner.grow(table, num_nodes), planner.best_tree(table, num_nodes)
    assert planner.expected_tokens(grown, table) == pytest.approx(planner.expected_tokens(best, table), abs=1e-12)


def test_growth_is_not_optimal_where_a_later_rank_is_likelier():
  table = np.array([[0.3, 0.05, 0.6], [0.2, 0.1, 0.05]])
  grown, best = planner.grow(table, 3), planner.best_tree(table, 3)
  assert best == ((0,), (1,), (2,))
  assert planner.expected_tokens(grown, table) < planner.expected_tokens(best, table) == pytest.approx(1.95)


def test_growth_by_hand():
  table = np.array([[0.5, 0.3], [0.4, 0.3]])  # .5, .3, then .2 and .15 under the first, .12 and .09 under the second
  assert planner.grow(table, 3) == ((0,), (1,), (0, 0))
  assert planner.grow(table, 6) == ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
  assert planner.expected_tokens(planner.grow(table, 3), table) == pytest.approx(2.0)


@pytest.mark.parametrize('num_nodes', [1, 7, 30, 62])
@pytest.mark.parametrize('make', [planner.grow, planner.best_tree])
def test_trees_are_trees(make, num_nodes):
  tree = make(MEDUSA_KI, num_nodes)
  assert TreeSpec.from_paths(tree).paths == tree  # prefixes and elder siblings there, breadth first
  assert len(set(tree)) == num_nodes


@given(tables)
def test_more_nodes_and_more_depth_never_yield_less(table):
  tokens_DN, ranks = planner.best_tokens(table, 20), table.shape[1]
  deeper = tokens_DN[1:] >= tokens_DN[:-1] - 1e-12
  larger = (tokens_DN[:, 1:] >= tokens_DN[:, :-1] - 1e-12) | np.isneginf(tokens_DN[:, 1:])  # or there is no room
  assert deeper.all() and larger.all()
  np.testing.assert_array_equal(tokens_DN[:, 0], 1)
  assert np.isneginf(tokens_DN[0, 1:]).all()
  np.testing.assert_array_equal(np.isneginf(tokens_DN[1]), np.arange(21) > ranks)


@given(tables, st.integers(1, 20))
def test_every_tree_holds_prefixes_and_elder_siblings(table, num_nodes):
  if num_nodes > sum(table.shape[1]**depth for depth in range(1, len(table) + 1)):
    return
  grown, best = planner.grow(table, num_nodes), planner.best_tree(table, num_nodes)
  for tree in (grown, best):
    assert TreeSpec.from_paths(tree).paths == tree and len(tree) == num_nodes
  smaller = planner.grow(table, num_nodes - 1)
  assert set(smaller) < set(grown)
  values = [planner.expected_tokens(tree, table) for tree in (smaller, grown, best)]
  assert values[0] <= values[1] <= values[2] + 1e-12
  assert values[2] == pytest.approx(planner.best_tokens(table, num_nodes)[-1, num_nodes])


def test_expected_tokens_are_what_a_walk_yields():
  """Children are tried in order, each with its own probability given that those before it were refused."""
  generator, walks = np.random.default_rng(0), 20_000
  conditional_KI = generator.uniform(0.1, 0.7, (3, 4))
  table = planner.kept_share(conditional_KI)
  tree = planner.best_tree(table, 12)
  emitted = [1 + len(_walk(generator, set(tree), conditional_KI)) for _ in range(walks)]
  expected = planner.expected_tokens(tree, table)
  assert np.mean(emitted) == pytest.approx(expected, abs=4 * np.std(emitted) / walks**0.5)


def _walk(generator: np.random.Generator, tree: set[planner.Path], conditional_KI: np.ndarray) -> planner.Path:
  path: planner.Path = ()
  while True:
    children = list(itertools.takewhile(tree.__contains__, ((*path, rank) for rank in range(4))))
    kept = [child for child in children if generator.random() < conditional_KI[len(path), child[-1]]]
    if not kept:
      return path
    path = kept[0]


def test_kept_share_by_hand():
  np.testing.assert_allclose(planner.kept_share([[0.5, 0.5, 1.0], [0, 1, 0.5]]), [[0.5, 0.25, 0.25], [0, 1, 0]])


def test_a_chain_is_the_formula():
  table = np.full((4, 1), 0.8)
  assert planner.best_tree(table, 4) == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
  assert planner.best_tokens(table, 4)[4, 4] == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def test_plan_is_the_best_of_all_sizes_and_depths():
  cost = 1 + 0.03 * np.arange(40)
  found = planner.plan(MEDUSA_KI, cost, level_cost=0.05, overhead=0.02)
  speedups = {(size, depth): planner.expected_tokens(planner.best_tree(MEDUSA_KI, size, depth), MEDUSA_KI) / (
                  cost[size] + 0.05 * depth + 0.02)
              for size in range(1, 40) for depth in (1, 2, 3) if size <= 5 + 25 * (depth > 1) + 125 * (depth > 2)}
  size, depth = max(speedups, key=speedups.get)
  assert (len(found.tree), max(map(len, found.tree))) == (size, depth)
  assert found.speedup == pytest.approx(speedups[size, depth])
  assert found.cost == pytest.approx(cost[size] + 0.05 * depth + 0.02)


def test_plan_turns_with_the_costs():
  sizes = [len(planner.plan(MEDUSA_KI, 1 + slope * np.arange(64), level_cost=0).tree) for slope in (0, 0.005, 0.05, 1)]
  assert sizes[0] == 63 and sizes == sorted(sizes, reverse=True) and sizes[-1] == 0
  depths = [max(map(len, planner.plan(MEDUSA_KI, np.ones(9), level_cost=cost).tree), default=0)
            for cost in (0, 0.2, 0.5, 5)]
  assert depths[0] == 3 and depths == sorted(depths, reverse=True) and depths[-1] == 0
  assert planner.plan(MEDUSA_KI, [1.0, 9.0], level_cost=1).speedup == 1


def test_plan_keeps_to_the_nodes_that_are_allowed():
  assert len(planner.plan(MEDUSA_KI, np.ones(64), level_cost=0, max_nodes=10).tree) == 10


@pytest.mark.parametrize(('act', 'message'), [
    (lambda: planner.grow([0.5, 0.2], 1), 'shape'), (lambda: planner.grow([[1.2]], 1), 'outside of 0..1'),
    (lambda: planner.grow([[float('nan')]], 1), 'outside of 0..1'),
    (lambda: planner.best_tree([[0.7, 0.7]], 1), 'kept_share'), (lambda: planner.grow([[0.5]], 2), 'no tree of 2'),
    (lambda: planner.best_tree(MEDUSA_KI, 6, 1), 'no tree of 6'),
    (lambda: planner.expected_tokens([(0,), (0, 5)], MEDUSA_KI), r'node \(0, 5\)'),
    (lambda: planner.plan(MEDUSA_KI, [], 0), 'verify_cost'),
    (lambda: planner.plan(MEDUSA_KI, [1.0, 0.0], 0), 'positive'),
    (lambda: planner.plan(MEDUSA_KI, [1.0], -1), '0 or more')])
def test_what_is_refused(act, message):
  with pytest.raises(InputError, match=message) as raised:
    act()
  assert '\n' not in str(raised.value)
