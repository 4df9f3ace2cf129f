"""Figures from rows: what is drawn, and that nothing but rows is needed."""

import pathlib
import subprocess
import sys

import pytest

from experiments import plot
from launch import results
from models.errors import InputError

pytestmark = pytest.mark.filterwarnings('error::UserWarning')  # of glyphs missing and of layouts that do not fit


def _row(gamma, speedup, **fields):
  return {'drafter': 'lookup', 'task': 'humaneval', 'gamma': gamma, 'batch': 1, 'ms_per_token': 10 / speedup,
          'ms_per_token_p10': 9 / speedup, 'ms_per_token_p90': 12 / speedup, 'tokens_per_pass': 1 + 0.5 * gamma,
          'speedup': speedup, 'predicted_speedup': speedup, **fields}


def _sweep_row(gamma, speedup, task, **fields):
  return _row(gamma, speedup, base='configs/smollm2.py:lookup', task=task,
              overrides={'engine.gamma': gamma, 'data.kind': task}, **fields)


SWEEP = [_sweep_row(gamma, 1 + 0.1 * gamma if task == 'news' else 1 - 0.05 * gamma, task)
         for task in ('humaneval', 'news') for gamma in range(5)]


def _axes(figure):
  figure.draw_without_rendering()
  return figure.axes


def test_curves_are_told_apart_by_what_varies():
  curves = plot.curves(SWEEP)
  assert list(curves) == ['humaneval', 'news']
  assert [row['gamma'] for row in curves['news']] == [0, 1, 2, 3, 4]
  assert list(plot.curves(SWEEP[:5])) == ['']
  mixed = [_sweep_row(1, 1.0, 'news') | {'base': f'configs/smollm2.py:{name}'} for name in ('self', 'lookup')]
  assert list(plot.curves(mixed)) == ['self', 'lookup']
  numbers = [_row(1, 1.0, batch=batch, temperature=0.0) for batch in (1, 8)]
  assert list(plot.curves(numbers)) == ['batch 1', 'batch 8']


def test_newest_row_of_a_gamma_counts():
  assert [row['speedup'] for row in plot.curves([_row(1, 1.0), _row(1, 2.0)])['']] == [2.0]


def test_gamma_figure():
  figure = plot.gamma_figure(SWEEP)
  time, acceptance, step = _axes(figure)
  line = time.get_lines()[0]
  assert list(line.get_xdata()) == [0, 1, 2, 3, 4]
  assert line.get_ydata()[0] == pytest.approx(1280)
  assert acceptance.get_lines()[0].get_ydata()[0] == 1.0
  assert step.get_lines()[0].get_ydata()[0] == pytest.approx(10)
  labels = [text.get_text() for text in figure.legends[0].get_texts()]
  assert labels == ['humaneval', 'news', 'slower than plain']
  plot.plt.close(figure)


def test_step_time_counts_the_batch_once():
  # A row of the batch gains a token in 10 ms, whatever the batch: 2 tokens per pass are steps of 20 ms.
  for batch in (1, 8):
    figure = plot.gamma_figure([_row(2, 1.0, batch=batch)])
    assert list(_axes(figure)[2].get_lines()[0].get_ydata()) == [pytest.approx(20)]
    plot.plt.close(figure)
  figure = plot.gamma_figure([_row(2, 1.0, ms_per_round=21.0)])
  assert list(_axes(figure)[2].get_lines()[0].get_ydata()) == [21.0]
  plot.plt.close(figure)


def test_rows_without_spread_are_drawn():
  bare = [{key: value for key, value in row.items() if not key.startswith('ms_per_token_p')} for row in SWEEP]
  figure = plot.gamma_figure(bare)
  assert not _axes(figure)[0].collections
  plot.plt.close(figure)


def test_speedup_figure():
  rows = [_row(0, 0.99, drafter='none'), _row(4, 1.5), _row(4, 0.6, drafter='self'),
          _row(4, 2.5, task='xsum', predicted_speedup=None)]
  figure = plot.speedup_figure(rows)
  humaneval, xsum = _axes(figure)
  assert [label.get_text() for label in humaneval.get_yticklabels()] == ['none, gamma 0', 'lookup, gamma 4',
                                                                          'self, gamma 4']
  assert [bar.get_width() for bar in humaneval.patches] == [0.99, 1.5, 0.6]
  colours = [bar.get_facecolor() for bar in humaneval.patches]
  assert colours[0] == colours[1] != colours[2]
  assert [text.get_text() for text in humaneval.texts] == ['0.99×', '1.50×', '0.60×']
  assert [text.get_text() for text in xsum.texts] == ['2.50×']
  plot.plt.close(figure)


def test_an_odd_number_of_tasks():
  figure = plot.speedup_figure([_row(4, 1.5, task=task) for task in 'abc'])
  axes = _axes(figure)
  assert [axis.get_title() for axis in axes if axis.get_visible()] == ['a', 'b', 'c']
  assert [bool(axis.get_xlabel()) for axis in axes] == [False, True, True, False]
  plot.plt.close(figure)


@pytest.mark.parametrize('kind', plot.KINDS)
def test_png_from_a_file_of_rows(kind, tmp_path):
  rows, out = str(tmp_path / 'rows.jsonl'), tmp_path / 'plot.png'
  for row in SWEEP:
    results.append_row(rows, row)
  plot.draw(results.read_rows(rows), str(out), kind)
  assert out.read_bytes().startswith(b'\x89PNG')


def test_wrong_input(tmp_path):
  with pytest.raises(InputError, match='no rows with a speedup'):
    plot.draw([{'gamma': 1, 'speedup': None}], str(tmp_path / 'a.png'))
  with pytest.raises(InputError, match="kind='x' is not known"):
    plot.draw(SWEEP, str(tmp_path / 'a.png'), 'x')
  with pytest.raises(InputError, match='cannot write'):
    plot.draw(SWEEP, str(tmp_path / 'no' / 'a.png'))
  assert not list(pathlib.Path(tmp_path).iterdir())


def test_check_before_the_work(tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('')
  plot.check(str(tmp_path / 'plot.png'))
  with pytest.raises(InputError, match='cannot write'):
    plot.check(str(tmp_path / 'file' / 'plot.png'))
  monkeypatch.setattr(plot, 'plt', None)
  plot.check(None)
  with pytest.raises(InputError, match='plots need matplotlib'):
    plot.check(str(tmp_path / 'plot.png'))


@pytest.mark.parametrize('module, flags', [
    ('experiments.reproduce', ['--rows=DIR/rows.jsonl', '--plot=DIR/plot.png']),
    ('experiments.sweep', ['--out=DIR/rows.jsonl', '--plot=DIR/plot.png']),
    ('experiments.plot', ['--rows=/nowhere', '--out=DIR/plot.png'])])
def test_commands_miss_matplotlib_before_the_work(module, flags, tmp_path):
  script = f"import sys, runpy; sys.modules['matplotlib'] = None; runpy.run_module('{module}', run_name='__main__')"
  flags = [flag.replace('DIR', str(tmp_path)) for flag in flags]
  done = subprocess.run([sys.executable, '-c', script, *flags], capture_output=True, text=True, timeout=60,
                        cwd=pathlib.Path(plot.__file__).parent.parent)
  assert done.returncode == 2
  assert done.stderr == 'error: plots need matplotlib: pip install matplotlib\n'
  assert not list(tmp_path.iterdir())
