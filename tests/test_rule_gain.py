"""Two rules on the same prompts."""

import numpy as np
import pytest

from configs import tiny
from experiments import rule_gain


def test_gain_by_hand():
  first = np.array([[10, 10], [20, 10]])
  assert rule_gain.gain(first, first) == (0, (0, 0))
  mean, (low, high) = rule_gain.gain(first, np.array([[20, 10], [40, 10]]))
  assert mean == pytest.approx(1) and (low, high) == pytest.approx((1, 1))  # twice in every resample
  _, (low, high) = rule_gain.gain(first, np.array([[20, 10], [20, 10]]))
  assert low == pytest.approx(0) and high == pytest.approx(1)  # the second prompt alone, or the first


@pytest.mark.slow
def test_rows_on_the_toy():
  config = tiny.get_config('model')
  config.sampling.temperature, config.sampling.max_new_tokens = 1.0, 16
  row, other = rule_gain.rows_of(config, ('rejection', 'block'), (2, 4), 2)
  assert (row['gamma'], other['gamma'], row['samples']) == (2, 4, 2)
  assert set(row['tokens_per_pass']) == {'rejection', 'block'} and min(row['tokens_per_pass'].values()) >= 1
  assert row['gain_interval'][0] <= row['gain'] <= row['gain_interval'][1]
