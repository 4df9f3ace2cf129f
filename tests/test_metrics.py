"""One definition for each name, by worked examples."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from specdec.metrics import Counters, Metrics

ROUNDS = (4, 0, 2, 4, 1)  # drafted tokens kept, of 4


def counters_after(rounds, gamma: int = 4) -> Counters:
  """Two rows: row 0 plays the rounds, row 1 has ended."""
  counters, live_B = Counters.zeros(2, gamma, 2), jnp.asarray([True, False])
  for drafted, kept, emitted, width_index in rounds:
    at = lambda number: jnp.asarray([number, gamma])
    counters = counters.add_round(
        live_B, at(drafted), at(kept), at(emitted), jnp.full((2, gamma), 0.25), width_index)
  return counters


def test_worked_example():
  """Fault 64."""
  metrics = Metrics.from_counters(counters_after([(4, kept, kept + 1, 1) for kept in ROUNDS]))
  assert (metrics.passes, metrics.drafted, metrics.accepted, metrics.tested) == (5, 20, 11, 14)
  assert (metrics.emitted, metrics.passes_by_width) == (16, (0, 5))
  assert metrics.acceptance_rate == 0.55
  assert metrics.mean_accepted == 2.2
  assert metrics.tokens_per_pass == 3.2
  assert metrics.accepted_per_position == (0.8, 0.6, 0.4, 0.4)
  assert metrics.conditional_per_position == pytest.approx((0.8, 0.75, 2 / 3, 1.0))
  assert metrics.alpha == pytest.approx(11 / 14)
  assert metrics.overlap == 0.25


def test_what_is_cut_does_not_count():
  """Fault 63: γ = 5, all match, EOS is the third token: three emitted, accepted and tested, not six."""
  metrics = Metrics.from_counters(counters_after([(5, 5, 3, 0)], gamma=5))
  assert (metrics.emitted, metrics.accepted, metrics.tested, metrics.drafted) == (3, 3, 3, 5)
  assert metrics.tested_at == metrics.accepted_at == (1, 1, 1, 0, 0)
  assert metrics.overlap_sum == 0.75


def test_rounds_that_draft_less():
  """A position counts only in the rounds that drafted it."""
  metrics = Metrics.from_counters(counters_after([(0, 0, 1, 0), (1, 1, 2, 0), (3, 1, 2, 1)]))
  assert metrics.drafted_at == (2, 1, 1, 0)
  assert metrics.tested_at == (2, 1, 0, 0)
  assert metrics.accepted_at == (2, 0, 0, 0)
  assert metrics.accepted_per_position[:3] == (1, 0, 0)
  assert metrics.conditional_per_position[:2] == (1, 0)
  assert all(map(math.isnan, (metrics.accepted_per_position[3], *metrics.conditional_per_position[2:])))
  assert metrics.passes_by_width == (2, 1)


def test_nothing_counted_is_nan():
  metrics = Metrics.from_counters(Counters.zeros(3, 2))
  rates = (metrics.tokens_per_pass, metrics.mean_accepted, metrics.acceptance_rate, metrics.alpha, metrics.overlap)
  assert all(map(math.isnan, rates))


def test_total_is_the_sum():
  parts = [Metrics.from_counters(counters_after([(4, kept, kept + 1, 0)])) for kept in ROUNDS]
  whole = Metrics.from_counters(counters_after([(4, kept, kept + 1, 0) for kept in ROUNDS]))
  assert Metrics.total(parts) == whole


def test_ended_rows_count_nothing():
  counters = counters_after([(4, 4, 5, 0)])
  for leaf in vars(counters).values():
    assert not np.any(leaf[1])
