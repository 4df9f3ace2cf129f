"""What trees cost: shapes of the timed passes, and that commits move what they should."""

import jax
import numpy as np
import pytest

from configs import tiny
from experiments import tree_cost
from launch.session import Session
from models.errors import InputError
from specdec.drafters import Empty
from specdec.engine import Params
from specdec.tree import TreeSpec
from tests.toys import VOCAB, engine, request, target


def test_full_tree():
  tree = tree_cost.full_tree(8, 3)
  assert tree.parents == (0, 0, 0, 1, 1, 1, 2) and tree.levels == 2
  assert tree_cost.full_tree(5, 1) == TreeSpec.chain(4)


def test_commits_move_the_last_branch():
  """Slots behind the root hold the path to the last node; the rest of the state stays."""
  eng = engine(Empty(), 0)
  state = eng.start(Params(target()), request(20))
  tree = tree_cost.full_tree(6, 2)
  before = np.asarray(state.cache.k[0])
  lengths = np.asarray(state.cache.length_B)
  after = tree_cost.commits(tree, VOCAB, jax.tree.map(lambda x: x.copy(), state))
  np.testing.assert_array_equal(after.length_B, state.length_B)
  for row, length in enumerate(lengths):
    moved = before[row].copy()
    for _ in range(tree_cost.PASSES):  # row 5 hangs under row 2
      moved[:, length + 1], moved[:, length + 2] = moved[:, length + 2].copy(), moved[:, length + 5].copy()
    np.testing.assert_array_equal(np.asarray(after.cache.k[0])[row], moved)


def test_rows_on_the_toy():
  config = tiny.get_config('none')
  rows = tree_cost.cost_rows(Session.from_config(config), (2, 6), 3, 1)
  assert [row['width'] for row in rows] == [2, 6]
  assert all(row[name] > 0 for row in rows for name in ('chain_ms', 'tree_ms', 'commit_ms', 'tree_over_chain'))
  with pytest.raises(InputError, match='has room for'):
    tree_cost.cost_rows(Session.from_config(config), (2, 100_000), 3, 1)
