"""Table 1 and Figure 1 of Chen et al. (2023): the model of one parameter, the paper's rows, the toy's beside them."""

import sys
import types

from absl import flags
import numpy as np
import pytest

from configs import chen_figure1, chen_table1, chinchilla, tiny
from experiments import chen, sweep
from experiments.published import CHEN_FIGURE_1, CHEN_TABLE_1
from launch import results
from launch.errors import RunError
from models.errors import InputError


@pytest.mark.parametrize('gamma', CHEN_FIGURE_1['humaneval_ms'])
def test_one_parameter_gives_the_humaneval_curve(gamma):
  """alpha = .876, a step of 14.1 + 2.07 γ ms: within 3 % of every point that was read off Figure 1."""
  published = CHEN_FIGURE_1['humaneval_ms'][gamma]
  assert chen.one_parameter_ms(chen.IMPLIED_ALPHA['humaneval'], gamma) == pytest.approx(published, rel=.03)


def test_one_parameter_step_is_linear():
  assert chen.one_parameter_ms(0.0, 3) == pytest.approx(128 * (14.1 + 3 * 2.07), rel=1e-3)


@pytest.mark.parametrize('task, name', [('humaneval', 'humaneval'), ('xsum', 'xsum nucleus')])
def test_implied_alpha_gives_table_1(task, name):
  ms = chinchilla.WORKLOADS[name]['published_ms']
  assert chinchilla.WORKLOADS[name]['alpha'] == chen.IMPLIED_ALPHA[task]
  assert chen.one_parameter_ms(chen.IMPLIED_ALPHA[task], 4) / 128 == pytest.approx(ms, rel=.01)


def test_xsum_has_its_best_gamma_near_the_published_one():
  times = [chen.one_parameter_ms(chen.IMPLIED_ALPHA['xsum'], gamma) for gamma in range(8)]
  assert abs(times.index(min(times)) - CHEN_FIGURE_1['xsum_best_gamma']) <= 1


def kinds(row):
  """Which of the columns that must not mix a row fills."""
  return {name.partition('_')[0] for name, value in row.items()
          if value is not None and name.startswith(('measured_', 'predicted_', 'published_'))}


def test_rows_of_the_paper_are_published_and_predicted():
  rows = chen.published_rows(chen_table1.get_config())
  assert [row['published_ms_per_token'] for row in rows if row['gamma']] == [row[6] for row in CHEN_TABLE_1['rows']]
  assert {row['task'] for row in rows} == set(chen_table1.TASKS)
  assert all(kinds(row) == {'published', 'predicted'} and row['predicted_slice_speedup'] >= 1 for row in rows)


def test_points_of_the_paper():
  rows = chen.paper_points(chen_figure1.get_config())
  by_point = {(row['task'], row['gamma']): row for row in rows}
  assert len(rows) == 16 and all(row['predicted_ms'] > 0 for row in rows)
  for name in ('ms', 'acceptance'):
    for task in ('humaneval', 'xsum'):
      read = {gamma: by_point[task, gamma][f'published_{name}'] for gamma in range(8)}
      assert {gamma: value for gamma, value in read.items() if value is not None} == CHEN_FIGURE_1[f'{task}_{name}']
  row = by_point['humaneval', 7]
  assert row['predicted_ms'] == pytest.approx(128 * row['predicted_loop_ms'] / (8 * row['predicted_acceptance']))
  with pytest.raises(InputError, match='no rows of topology'):
    chen.planned(chen_figure1.get_config().plan, 'v4-8')


def test_slices_by_any_of_their_names(tmp_path):
  """v5e-16 is v5litepod-16, and the title says what the predictions are for."""
  config = chen_figure1.get_config().unlock()
  rows = [row | {'topology': 'v5litepod-16'} for row in results.read_rows(config.plan)]
  config.plan, config.topology = str(tmp_path / 'plan.jsonl'), 'v5e-16'
  results.write_text(config.plan, ''.join(f'{results.dumps(row)}\n' for row in rows))
  points = chen.paper_points(config)
  assert {row['topology'] for row in points} == {'v5litepod-16'} and all(row['predicted_ms'] > 0 for row in points)
  assert chen.slice_title(points) == 'Chinchilla 70B and 4B: predicted for v5litepod-16, published on v4-32'
  assert chen.slice_title(chen.paper_points(chen_figure1.get_config())) == 'Chinchilla 70B and 4B on v4-32'


def test_times_outlive_scores_that_mean_nothing(monkeypatch, capsys):
  flags.FLAGS.mark_as_parsed()

  def fail(*_):
    raise RunError('9 of 9 programs ended in timeout')

  runs = [types.SimpleNamespace(name=name) for name in ('plain', 'lookup', 'lookup 2')]
  monkeypatch.setattr(chen, 'sessions_of', lambda *_: {'plain': types.SimpleNamespace(
      config=types.SimpleNamespace(data=None))})
  monkeypatch.setattr(chen, 'load_prompts', lambda data: [])
  monkeypatch.setattr(chen, 'time_all', lambda *_, **__: runs)
  monkeypatch.setattr(chen.bench, 'row_of', lambda run, plain: {
      'drafter': 'none' if run is plain else 'lookup', 'ms_per_token': 2.0, 'speedup': 1.5})
  monkeypatch.setattr(chen, 'scores_of', fail)
  rows = chen.measured_rows(chen_table1.get_config('tiny'), 'humaneval nucleus', None)
  assert [(row['drafter'], row['measured_speedup']) for row in rows] == [
      ('none', 1.5), ('lookup', 1.5), ('lookup 2', 1.5)]
  assert 'humaneval nucleus: 9 of 9 programs ended in timeout' in capsys.readouterr().out
  values = iter(([.1, .2], [.1, .4], [.1, .2]))
  monkeypatch.setattr(chen, 'scores_of', lambda *_: ('ROUGE-2', np.array(next(values))))
  rows = chen.measured_rows(chen_table1.get_config('tiny'), 'humaneval nucleus', None)
  assert [row['measured_score'].mean for row in rows] == pytest.approx([.15, .25, .15])
  assert rows[0]['measured_difference'] is None
  assert [row['measured_difference'].mean for row in rows[1:]] == pytest.approx([.1, 0])


def test_a_missing_package_is_said_before_the_work(monkeypatch):
  monkeypatch.setitem(sys.modules, 'rouge_score', None)
  monkeypatch.setattr(chen, 'measured_rows', None)
  with pytest.raises(InputError, match='pip install rouge-score'):
    chen.table(chen_table1.get_config('tiny'), None, None)


def test_sweep_of_the_figure():
  points = sweep.points_of(chen_figure1.get_config())
  assert len(points) == 2 * 2 * 8
  settings = {(point.config.data.kind, point.config.sampling.temperature, point.config.sampling.top_p)
              for point in points}
  assert settings == {('humaneval', .8, .95), ('news', 1.0, .8)}


def test_figure_of_given_rows(tmp_path):
  """What is measured is drawn, and kept, apart from the paper's."""
  made = [{'base': 'configs/smollm2.py:lookup', 'overrides': {'engine.gamma': gamma, 'data.kind': 'news'},
           'drafter': 'lookup', 'task': 'news', 'gamma': gamma, 'ms_per_token': 10.0, 'ms_per_token_p10': 9.0,
           'ms_per_token_p90': 12.0, 'tokens_per_pass': 1 + gamma / 2, 'ms_per_round': 10 + gamma, 'speedup': 1.0}
          for gamma in range(3)]
  measured = [chen.measured_point(row) for row in made]
  assert all(kinds(row) == {'measured'} for row in measured)
  assert (measured[2]['measured_ms'], measured[2]['measured_ms_p90']) == (1280, 1536)
  assert measured[2]['measured_acceptance'] == pytest.approx(2 / 3) and measured[2]['measured_loop_ms'] == 12
  rows = measured + chen.paper_points(chen_figure1.get_config())
  assert all(kinds(row) == {'published', 'predicted'} or kinds(row) == {'predicted'} for row in rows[3:])
  chen.draw(rows, str(tmp_path / 'figure.png'))
  assert (tmp_path / 'figure.png').read_bytes().startswith(b'\x89PNG')


def test_drafts_of_one_kind_are_told_apart(monkeypatch):
  """Two lookups are two ways; another target is no way of the first one's table."""
  sources = {'a': 'random:tiny_target', 'b': 'random:tiny_target', 'c': 'random:tiny_draft'}

  def load(base):
    made = tiny.get_config('lookup').unlock()
    made.target.source = sources[base]
    return made

  made = lambda point, _: types.SimpleNamespace(
      config=point, params=types.SimpleNamespace(target=None), tokenizer=None, plain=lambda: None)
  monkeypatch.setattr(sweep, 'load_config', load)
  monkeypatch.setattr(chen.Session, 'from_config', made)
  config = chen_table1.get_config('tiny').unlock()
  config.drafts = ('a', 'b')
  assert list(chen.sessions_of(config, config.tasks['xsum greedy'])) == ['plain', 'lookup', 'lookup 2']
  config.drafts = ('a', 'c')
  with pytest.raises(InputError, match='c differs from the drafts before it in target'):
    chen.sessions_of(config, config.tasks['xsum greedy'])


@pytest.mark.slow
def test_summaries_of_the_toy(tmp_path):
  """Greedy, so every draft's texts and scores are plain decoding's; trained drafts that are not there are left out."""
  flags.FLAGS.mark_as_parsed()
  config = chen_table1.get_config('tiny').unlock()
  untrained = tmp_path / 'untrained.py'
  untrained.write_text("from configs import smollm2\n\n\ndef get_config():\n  config = smollm2.get_config('model')\n"
                       "  config.drafter.source = 'not/there'\n  return config\n")
  config.drafts = ('configs/tiny.py:lookup', str(untrained))
  rows = chen.measured_rows(config, 'xsum greedy', None)
  assert [row['drafter'] for row in rows] == ['none', 'lookup'] and {row['metric'] for row in rows} == {'ROUGE-2'}
  assert rows[0]['measured_difference'] is None and rows[1]['measured_difference'].mean == 0
  assert all('published' not in kinds(row) and 'predicted_slice_speedup' not in row for row in rows)
