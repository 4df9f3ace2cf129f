"""Known-wrong decoders fail the enumeration, by as much as is known of them (faults 1 to 4)."""

import numpy as np
import pytest

from experiments import enumeration, mutations
from experiments.enumeration import Rule

NOISE_KV = np.random.default_rng(3).gumbel(size=(4, 3))
SMALLEST = {'epsilon 1e-9 in the ratio': 5e-10, 'test not strict at u = 0': 0}  # TV; all others .005


@pytest.mark.parametrize('mutation', mutations.all_mutations(), ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutation):
  outcome = mutations.measure(mutation)
  assert not outcome.joint.exact
  assert outcome.joint.total_variation > SMALLEST.get(mutation.name, 0.005)
  if mutation.known is not None:
    assert outcome.first.total_variation == pytest.approx(mutation.known, abs=5e-4)


@pytest.mark.parametrize('mutation', [m for m in mutations.all_mutations() if m.rule != Rule()], ids=lambda m: m.name)
def test_same_case_with_the_real_rule_is_exact(mutation):
  assert enumeration.enumerate_case(mutation.case).exact


def test_non_strict_test_emits_what_the_target_forbids():
  mutation = next(m for m in mutations.all_mutations() if m.rule.num_accepted is mutations.not_strict)
  outcome = mutations.measure(mutation)
  assert outcome.joint.forbidden > 0
  assert outcome.joint.max_error < 1e-12  # nothing but the point u = 0: no histogram would ever show it


def test_frequencies_of_the_wrong_decoders():
  laws = {m.name: enumeration.speculative_law(m.case, m.rule).sum(axis=1) for m in mutations.all_mutations()
          if m.case.gamma == 1}
  softmax, before = laws['argmax draft with its softmax as draft law'], laws['draft law before temperature']
  np.testing.assert_allclose(softmax, [0.4, 0.6, 0], atol=1e-12)
  np.testing.assert_allclose(before, [0.447, 0.395, 0.158], atol=5e-4)
  np.testing.assert_allclose(laws['correction from the target'], [0.35, 0.39, 0.26], atol=1e-12)
  np.testing.assert_allclose(laws['point mass resampled from the full target'], [0.75, 0.15, 0.1], atol=1e-12)


@pytest.mark.parametrize('name', mutations.COUPLED)
def test_coupled_mutation_is_caught(name):
  differing, law = mutations.coupled_differences(mutations.COUPLED[name], NOISE_KV)
  assert differing > 0
  assert law.total_variation > 0.3


def test_coupled_case_with_the_real_rule_is_exact():
  differing, law = mutations.coupled_differences(enumeration.CoupledRule(), NOISE_KV)
  assert differing == 0 and law.exact
