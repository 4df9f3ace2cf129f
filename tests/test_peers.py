"""The comparison with other software: what can be checked without it."""

from ml_collections import ConfigDict
import pytest

from configs import peers as peers_config
from experiments.peers import timing as peers
from experiments.peers.contestant import Contestant
from launch.errors import RunError
from launch.timing import Timing
from models.errors import InputError


def _contestant(software, drafter='none', first=None, **settings):
  return Contestant(software, '1', drafter, settings, prepare=list, decode=lambda prompt: [*prompt, 7], first=first)


def _timed(software, drafter, milliseconds, ids, **settings):
  timed = peers._Timed(ids, len(ids), 1e-3 * milliseconds * len(ids))
  return peers._row(_contestant(software, drafter, **settings), 'news', [timed, timed])


def test_first_divergence():
  assert peers.first_divergence([1, 2, 3], [1, 2, 3]) is None
  assert peers.first_divergence([1, 2, 3], [1, 5, 3]) == 1
  assert peers.first_divergence([1, 2], [1, 2, 3]) == 2
  assert peers.first_divergence([], [1]) == 0


def test_rows_are_compared_with_our_plain_text_and_best_times():
  rows = peers._compared([
      _timed('specdec', 'none', 15, [1, 2, 3, 4]), _timed('specdec', 'lookup', 9, [1, 2, 3, 4], gamma=4),
      _timed('specdec', 'lookup', 8, [1, 2, 3, 4], gamma=7), _timed('transformers', 'none', 40, [1, 2, 3, 4]),
      _timed('transformers', 'lookup', 24, [1, 2, 9, 4], num=10)])
  assert [row['setting'] for row in rows] == ['', 'gamma 4', 'gamma 7', '', 'num 10']
  assert [row['ours_over_it'] for row in rows] == pytest.approx([1, 9 / 8, 1, 40 / 15, 3])
  assert [row['own_speedup'] for row in rows] == pytest.approx([1, 15 / 9, 15 / 8, 1, 40 / 24])
  assert [row['same_text'] for row in rows] == ['2 of 2'] * 4 + ['0 of 2']
  assert rows[-1]['first_divergence'] == [2, 2]
  assert 'texts' not in rows[0]
  assert peers.summary(rows) == [
      'news, plain: specdec 15.00 ms/token, transformers 40.00: 0.38 of its time',
      'news, best lookup: specdec 8.00 ms/token, transformers 24.00: 0.33 of its time']


def test_time_to_the_first_token_is_taken_off(monkeypatch):
  everyone = [_contestant('specdec'), _contestant('transformers', first=lambda prompt: None)]
  seconds = {'specdec none': 3.0, 'transformers none': 5.0, 'transformers none, first token': 1.0}

  def measure(functions, repeats, prepare):
    assert set(functions) == set(seconds)
    return {name: Timing((seconds[name],), 0.0, function(prepare[name]())) for name, function in functions.items()}

  monkeypatch.setattr(peers.timing, 'measure', measure)
  timed = peers._measure(everyone, [5, 6], repeats=1)
  assert timed == {'specdec none': peers._Timed([5, 6, 7], 3, 3.0),
                   'transformers none': peers._Timed([5, 6, 7], 2, 4.0)}


def test_texts_that_end_at_the_first_token():
  """They have no time per token, and change nobody else's."""
  ended, timed = peers._Timed([1], 0, 0.1), peers._Timed([1, 2, 3], 2, 4.0)
  row = peers._row(_contestant('transformers'), 'news', [ended, timed])
  assert [row[name] for name in ('ms_per_token', 'ms_per_token_p10', 'prompts')] == [2000, 2000, 2]
  with pytest.raises(RunError, match='transformers none ended every text of news at its first token'):
    peers._row(_contestant('transformers'), 'news', [ended])


@pytest.mark.parametrize('software, message', [
    (('specdec', 'vllm'), "software='vllm' is not known"),
    ((), "software must hold 'specdec'"),
    (('specdec', 'missing'), 'missing needs the package no_such_package'),
])
def test_wrong_input_before_any_work(software, message, monkeypatch):
  monkeypatch.setitem(peers.PACKAGES, 'missing', ('no_such_package',))
  with pytest.raises(InputError, match=message):
    peers.check(ConfigDict({'software': software}))


def test_variants_of_the_config():
  assert peers_config.get_config('full').prompts > peers_config.get_config('quick').prompts
  with pytest.raises(ValueError, match='does not exist: use one of full, quick'):
    peers_config.get_config('anything')
