"""Shapes of trees, and what the device makes of parents."""

import hypothesis
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from models.kv_cache import KVCache
from specdec import tree
from specdec.tree import TreeSpec


@st.composite
def specs(draw) -> TreeSpec:
  """Any breadth-first tree of up to 12 nodes."""
  paths = [()]
  for _ in range(draw(st.integers(1, 12))):
    above = draw(st.sampled_from(paths))
    paths.append((*above, sum(path[:-1] == above for path in paths if path)))
  return TreeSpec.from_paths(paths[1:])


def lineage(spec: TreeSpec, row: int) -> list[int]:
  """The rows from below the root down to `row`."""
  rows = []
  while row:
    rows.append(row)
    row = spec.parents[row - 1]
  return rows[::-1]


@hypothesis.given(specs())
@hypothesis.settings(deadline=None, max_examples=40)
def test_paths_and_depths(spec):
  assert TreeSpec.from_paths(spec.paths) == spec
  for row in range(spec.num_nodes + 1):
    assert spec.depths[row] == len(lineage(spec, row))
  assert spec.levels == max(map(len, spec.paths)) and spec.branching == max(path[-1] for path in spec.paths) + 1
  assert [node for depth in range(1, spec.levels + 1) for node in spec.nodes_at(depth)] == list(range(spec.num_nodes))


@pytest.mark.slow
@hypothesis.given(specs(), st.integers(0, 2))
@hypothesis.settings(deadline=None, max_examples=25)
def test_on_the_device(spec, spare):
  """Ancestors, depths and the way down to each row; `levels` may be more than the tree has."""
  levels = spec.levels + spare
  width = spec.num_nodes + 1
  parents_BM = jnp.broadcast_to(jnp.asarray(spec.parents), (width, spec.num_nodes))
  expected = np.array([[column in (0, row, *lineage(spec, row)) for column in range(width)] for row in range(width)])
  np.testing.assert_array_equal(tree.ancestors(parents_BM[:1], levels)[0], expected)
  np.testing.assert_array_equal(tree.depths(parents_BM[:1], levels)[0], spec.depths)
  down_BP = tree.rows_to(jnp.arange(width), parents_BM, levels)
  for row in range(width):
    rows = lineage(spec, row)
    assert down_BP[row].tolist() == rows + [row] * (levels - len(rows))


def test_named_shapes():
  assert TreeSpec.chain(3).depths == (0, 1, 2, 3)
  assert TreeSpec.branches(2, 2).parents == (0, 0, 1, 2)
  assert TreeSpec.branches(3, 1).internal == (0,)
  assert TreeSpec.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 1)]).ranks == (0, 1, 0, 1, 0)


@pytest.mark.parametrize('paths, message', [
    ([(0,), (1, 0)], r'\(1, 0\) of the tree hangs in the air'), ([(0,), (2,)], 'leaves out rank 1'),
    ([()], 'is empty'), ([(-1,)], 'leaves out')])
def test_what_is_no_tree(paths, message):
  with pytest.raises(ValueError, match=message):
    TreeSpec.from_paths(paths)
  with pytest.raises(ValueError, match='parents come before'):
    TreeSpec((1,))
  with pytest.raises(ValueError, match='breadth first'):
    TreeSpec((0, 1, 0))


@pytest.mark.parametrize('batch', (3, 40))  # few rows are moved one by one, many by one gather
def test_commit_of_a_path(batch):
  """Fault 35: the accepted rows come to stand behind the root, each row of the batch its own; no slot before moves."""
  rng = np.random.default_rng(0)
  capacity, width, levels = 24, 7, 3
  cache = KVCache.zeros(2, batch, 2, capacity, 4, jnp.float32)
  fill = lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype)
  cache = cache.replace(k=tuple(map(fill, cache.k)), v=tuple(map(fill, cache.v)),
                        position_BS=jnp.asarray(rng.integers(0, 99, (batch, capacity))))
  start_B = rng.integers(0, capacity - width, batch)
  rows_BP = np.sort(rng.integers(1, width, (batch, levels)), axis=1)
  moved = cache.with_length(start_B).compact(jnp.asarray(rows_BP), width)
  for row, start in enumerate(start_B):
    kept = [*range(start + 1), *(start + rows_BP[row])]
    for before, after in zip((*cache.k, *cache.v), (*moved.k, *moved.v), strict=True):
      np.testing.assert_array_equal(after[row, :, :start + 1 + levels], np.asarray(before)[row][:, kept])
    np.testing.assert_array_equal(moved.position_BS[row, :start + 1 + levels], np.asarray(cache.position_BS)[row, kept])


def test_mask_of_a_tree():
  """Fault 34: of the tree's own slots a row sees itself and what it hangs under: no sibling, no cousin."""
  spec = TreeSpec.from_paths([(0,), (1,), (0, 0), (1, 0)])
  length_B = np.array([0, 5, 9])
  cache = KVCache.zeros(1, 3, 1, 16, 2, jnp.float32).with_length(length_B)
  parents_BM = jnp.broadcast_to(jnp.asarray(spec.parents), (3, spec.num_nodes))
  mask_BTS = cache.tree_mask(tree.ancestors(parents_BM, spec.levels))
  for row, length in enumerate(length_B):
    for node in range(spec.num_nodes + 1):
      seen = {*range(length), *(length + at for at in (0, *lineage(spec, node)))}
      assert set(np.flatnonzero(mask_BTS[row, node]).tolist()) == seen
