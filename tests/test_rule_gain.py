"""Two rules on the same prompts."""

import types

import numpy as np
import pytest

from configs import tiny
from experiments import rule_gain
from launch import results
from launch.errors import RunError
from launch.session import Session
from models.errors import InputError


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
  assert (row['target'], row['draft']['name'], row['seed']) == ('random:tiny_target', 'model', 0)
  assert set(row['tokens_per_pass']) == {'rejection', 'block'} and min(row['tokens_per_pass'].values()) >= 1
  assert row['gain_interval'][0] <= row['gain'] <= row['gain_interval'][1]


@pytest.mark.parametrize('rules', [['block', 'block'], ['block'], ['block', 'none'], ['rejection', 'block', 'coupled']])
def test_two_rules(rules):
  with pytest.raises(InputError, match='name two of'):
    rule_gain.check_rules(rules)


def test_nothing_is_decoded_by_rules_that_refuse_the_draft(monkeypatch):
  """The second rule judges no trees, or no drawn tokens; lenience would be dropped."""
  monkeypatch.setattr(Session, 'generate', None)
  config = tiny.get_config('lookup').unlock()
  config.drafter.update(name='lookup_tree', branches=2)
  with pytest.raises(InputError, match="accept: the rule 'block' judges chains"):
    rule_gain.rows_of(config, ('multiround', 'block'), (config.engine.gamma,), 1)
  config = tiny.get_config('self')
  with pytest.raises(InputError, match="accept: the rule 'typical' judges point masses"):
    rule_gain.rows_of(config, ('rejection', 'typical'), (2,), 1)
  with config.unlocked():
    config.accept.lenience = .5
  with pytest.raises(InputError, match=r'accept\.lenience=0\.5'):
    rule_gain.rows_of(config, ('rejection', 'block'), (2,), 1)


def text(emitted, passes, reason='max_tokens'):
  return types.SimpleNamespace(metrics=types.SimpleNamespace(emitted=emitted, passes=passes), reason=reason)


def test_rows_are_written_as_they_come(tmp_path, monkeypatch):
  """The third γ breaks down: the rows of the others are in the file."""
  config, file = tiny.get_config('lookup'), str(tmp_path / 'rows.jsonl')
  reasons = {1: 'max_tokens', 2: 'eos', 3: 'error'}
  monkeypatch.setattr(rule_gain, 'load_prompts', lambda data: [types.SimpleNamespace(id='a')])
  monkeypatch.setattr(Session, 'generate', lambda self, prompts, seeds: [text(6, 3, reasons[self.engine.gamma])])
  with pytest.raises(RunError, match=r'1 of 1 texts \(rejection\) ended in numbers that are not finite'):
    rule_gain.rows_of(config, ('rejection', 'block'), (1, 2, 3), 1, file)
  rows = results.read_rows(file)
  assert [(row['gamma'], row['target'], row['draft']['name'], row['gain']) for row in rows] == [
      (gamma, 'random:tiny_target', 'lookup', 0) for gamma in (1, 2)]
