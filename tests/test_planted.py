"""Known mistakes can be planted in the real code, and the tests that fail are counted."""

import pytest

from experiments import mutations, planted, planting, tree_mutations
from launch.errors import RunError

EDGES = ('tests/test_warp.py::test_fault_25_acceptance_at_the_edges',)


def test_every_known_mistake_can_be_planted():
  plants = planting.plants()
  assert set(plants) == {
      *(mutation.name for mutation in mutations.all_mutations()), *(f'coupled: {name}' for name in mutations.COUPLED),
      *(f'block: {mutation.name}' for mutation in mutations.block_mutations()),
      *(f'tree: {mutation.name}' for mutation in tree_mutations.all_mutations())}
  for parts in plants.values():
    assert any(getattr(part.owner, part.name) is not part.wrong for part in parts)


@pytest.mark.parametrize(('mutation', 'failed'), [
    pytest.param(planted.NOTHING, 0, marks=pytest.mark.slow), ('test not strict at u = 0', 3)])
def test_failing_tests_are_counted(mutation, failed):
  """Of the seven cases two have u = 0 and a token that the target forbids, one has u exactly at the ratio."""
  assert planted.counts(mutation, EDGES) == {'failed': failed, 'tests': 7}


def test_pytest_that_does_not_run():
  with pytest.raises(RunError, match='pytest ended with status'):
    planted.counts('no such mistake', EDGES)
