"""Acceptance measured on texts: by hand, against laws that are known, and as `experiments.plan_tree` uses it."""

import json

from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import tiny
from experiments.plan_tree import costs, held_out_ranks, planned
from launch.build_drafter import tree_of
from launch.corpus import Text, rows
from launch.session import Session
from models.errors import InputError
from specdec.training.acceptance import acceptance_table, kept_lengths, simulated_tokens_per_pass
from specdec.training.guesses import UNASKED, UNKNOWN
from specdec.tree import TreeSpec
from specdec.tree_planner import expected_tokens

SPEC = TreeSpec.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
N, U = UNASKED, UNKNOWN
# One row: an answer of five tokens after places 1..5, one of two after places 8 and 9.
RANKS = np.array([[[N, N, N], [0, 1, 0], [1, 0, 0], [0, 0, 0], [0, U, N], [U, N, N], [N, N, N], [N, N, N],
                   [1, 1, N], [0, N, N], [N, N, N]]])


def test_by_hand():
  """What each place would keep, and steps that go on behind what was kept."""
  np.testing.assert_array_equal(kept_lengths(SPEC, RANKS)[0], [0, 2, 2, 3, 1, 0, 0, 0, 1, 1, 0])
  # Places 1 (two kept and a correction), 4 (one kept and a correction), 8 (the same): seven tokens in three steps.
  assert simulated_tokens_per_pass(SPEC, RANKS) == 7 / 3
  chain = TreeSpec.chain(3)
  np.testing.assert_array_equal(kept_lengths(chain, RANKS)[0], [0, 1, 0, 3, 1, 0, 0, 0, 0, 1, 0])
  assert simulated_tokens_per_pass(chain, RANKS) == 7 / 4  # places 1, 3; 8, 9
  assert simulated_tokens_per_pass(chain, np.full_like(RANKS, N)) == 0


def test_table_by_hand():
  """Of rows that are kept: level 1 asks where rank 0 or 1 was right before."""
  table = acceptance_table(RANKS, 2)
  np.testing.assert_allclose(table[0], [4 / 7, 2 / 7])
  np.testing.assert_allclose(table[1], [2 / 5, 2 / 5])
  np.testing.assert_allclose(table[2], [1, 0])
  np.testing.assert_array_equal(acceptance_table(np.full_like(RANKS, N), 2), np.zeros((3, 2)))


def test_independent_ranks():
  """Texts whose ranks are drawn from a known table: it is found again, and a step keeps what the planner expects."""
  truth = np.array([[0.5, 0.2, 0.1], [0.4, 0.2, 0.2], [0.3, 0.1, 0.05]])
  random, count = np.random.default_rng(0), 40_000
  ranks = np.stack([random.choice(4, count, p=[*law, 1 - law.sum()]) for law in truth], axis=-1)
  ranks = np.where(ranks == 3, U, ranks)[None]
  np.testing.assert_allclose(acceptance_table(ranks, 3), truth, atol=0.015)
  for tree in (SPEC, TreeSpec.chain(3), TreeSpec.chain(1)):
    expected = expected_tokens(tree.paths, truth)
    np.testing.assert_allclose(1 + kept_lengths(tree, ranks).mean(), expected, rtol=0.01)
    np.testing.assert_allclose(simulated_tokens_per_pass(tree, ranks), expected, rtol=0.01)


# On a session


def session_of(name: str) -> Session:
  config = tiny.get_config('none')
  section = {'name': name, 'source': 'untrained', 'dtype': 'float32', 'tree': ((0,), (1,), (0, 0)), 'children': 'top',
             'version': 1, 'taps': (), 'num_heads': 3, 'own_head': False}
  with config.unlocked():
    config.drafter = ConfigDict(section if name != 'none' else {'name': name})
    config.engine.gamma, config.accept.rule, config.engine.capacity = 3 * (name != 'none'), 'multiround', 512
  return Session.from_config(config)


def some_rows() -> list[dict[str, np.ndarray]]:
  random = np.random.default_rng(0)
  return rows([Text(f'it/{i}', 'chat', 0.0, 5, tuple(random.integers(0, 200, 25).tolist())) for i in range(12)], 64)


@pytest.mark.parametrize('name', ['medusa', 'eagle'])
def test_planned_tree(name, tmp_path):
  """A tree in bounds, whose file configs take; heads that are always wrong get none."""
  session = session_of(name)
  costs = [1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], 0.1
  ranks = held_out_ranks(session.params, session.tokenizer.num_tokens, some_rows(), 3)
  assert ranks.shape == (len(some_rows()), 64, 3)
  asked = sum(row['trains'].sum() for row in some_rows())
  assert (ranks[..., 0] != UNASKED).sum() == asked
  right = np.where(ranks == UNASKED, UNASKED, 0)
  facts = planned(session, right, 4, *costs)
  tree = tree_of(written(tmp_path, facts))
  assert tree == TreeSpec.chain(3) and facts['expected_tokens'] == 4
  assert facts['simulated_tokens_per_pass'] == facts['simulated_chain'] > 1
  assert facts['cost'] == pytest.approx(1.3 + (0.1 if name == 'medusa' else 0.15))  # a level of two costs half a draft
  assert planned(session, np.where(ranks == UNASKED, UNASKED, UNKNOWN), 4, *costs)['tree'] == ()


def written(directory, facts) -> str:
  (directory / 'tree.json').write_text(json.dumps({'tree': facts['tree']}))
  return str(directory / 'tree.json')


def test_costs_and_refusals():
  session = session_of('none')
  verify_cost, draft_cost = costs(session, 5, 1)
  assert len(verify_cost) == 6 and min(verify_cost) > 0 and draft_cost >= 0
  with pytest.raises(InputError, match='use a config with the drafter medusa or eagle'):
    held_out_ranks(session.params, 256, some_rows(), 3)
  with pytest.raises(InputError, match='and there are 3 medusa heads: ask for fewer levels'):
    held_out_ranks(session_of('medusa').params, 256, some_rows(), 4)
