"""ROUGE variants and stemming change the number, so they are named (fault 62)."""

import dataclasses
import sys

import numpy as np
import pytest

from experiments import rouge, xsum
from models.errors import InputError

REFERENCE, SWAPPED = 'the cat sat on the mat\na dog ran in the park', 'a dog ran in the park\nthe cat sat on the mat'


def one(reference: str, candidate: str, stemmer: bool = False) -> dict[str, float]:
  return {variant: float(values[0]) for variant, values in rouge.rouge([reference], [candidate], stemmer).items()}


def test_fault_62_swapped_lines():
  scores = one(REFERENCE, SWAPPED)
  assert scores == pytest.approx({'rouge1': 1.0, 'rouge2': .9091, 'rougeL': .5, 'rougeLsum': 1.0}, abs=5e-5)


def test_fault_62_space_instead_of_newline():
  assert one(REFERENCE.replace('\n', ' '), SWAPPED.replace('\n', ' '))['rougeLsum'] == pytest.approx(.5)


def test_fault_62_stemmer():
  pair = 'the engine activates pumps', 'the engine activate pump'
  assert one(*pair)['rouge1'] == pytest.approx(.5)
  assert one(*pair, stemmer=True)['rouge1'] == pytest.approx(1.0)


@pytest.mark.parametrize('candidate', ['', ' ', '\n', '...'])
def test_fault_62_empty_candidate(candidate):
  assert set(one(REFERENCE, candidate).values()) == {0.0}


def test_fault_62_setting_is_named():
  assert 'stemmer on' in rouge.setting(True) and 'stemmer off' in rouge.setting(False)
  assert 'rougeLsum' in rouge.setting(True) and 'rouge-score' in rouge.setting(True)


def test_missing_package(monkeypatch):
  monkeypatch.setitem(sys.modules, 'rouge_score', None)
  with pytest.raises(InputError, match='pip install rouge-score'):
    rouge.rouge([], [], True)


def test_interval_covers_the_mean():
  values = np.random.default_rng(1).normal(.2, .1, 400)
  found = rouge.interval(values)
  assert found.low < found.mean < found.high and found.mean == pytest.approx(values.mean())
  assert found.high - found.low == pytest.approx(2 * 1.96 * .1 / 20, rel=.15)


def test_interval_of_one_and_of_equal_values():
  assert rouge.interval(np.array([.3])) == rouge.Interval(.3, .3, .3)
  assert rouge.interval(np.zeros(5)) == rouge.Interval(0, 0, 0)


def test_intervals_are_paired():
  """Speculative summaries that all score .05 more differ by just that, however much the stories differ."""
  plain = np.random.default_rng(2).random(50)
  rows = xsum.comparison({name: dict.fromkeys(rouge.VARIANTS, values)
                          for name, values in (('plain', plain), ('speculative', plain + .05))})
  for row in rows:
    assert dataclasses.astuple(row['difference']) == pytest.approx((.05, .05, .05))
    assert row['plain'].high - row['plain'].low > .1
