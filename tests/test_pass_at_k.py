"""pass@k is the unbiased estimator, not "any of n passed" (fault 60)."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
import pytest

from experiments.pass_at_k import mean_pass_at_k, pass_at_k
from models.errors import InputError


@pytest.mark.parametrize('samples, correct, k, expected', [
    (5, 2, 1, .4), (5, 2, 2, .7), (200, 1, 1, .005), (5, 0, 3, 0.0), (5, 5, 5, 1.0), (1, 1, 1, 1)])
def test_fault_60(samples, correct, k, expected):
  assert pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-15)


@given(st.integers(1, 7), st.data())
def test_equals_enumeration(samples, data):
  correct = data.draw(st.integers(0, samples))
  k = data.draw(st.integers(1, samples))
  draws = list(itertools.combinations(range(samples), k))
  solved = sum(any(draw < correct for draw in chosen) for chosen in draws)
  assert pass_at_k(samples, correct, k) == pytest.approx(solved / len(draws), abs=1e-15)


@pytest.mark.parametrize('k', [0, 3, -1])
def test_k_out_of_range(k):
  """Fault 60: k > n is an error, not 1.0."""
  with pytest.raises(InputError, match='samples_per_problem'):
    pass_at_k(2, 1, k)


def test_more_correct_than_samples():
  with pytest.raises(ValueError, match='3 correct of 2'):
    pass_at_k(2, 3, 1)


def test_large_counts_do_not_overflow():
  assert 0 < pass_at_k(10_000, 1, 5_000) == pytest.approx(.5)


def test_mean_over_problems():
  assert mean_pass_at_k([(5, 2), (1, 1)], 1) == pytest.approx(.7)
