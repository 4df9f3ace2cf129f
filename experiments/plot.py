"""Draws result rows. Reads JSON lines only; measures nothing.

    python -m experiments.plot --rows=rows.jsonl --out=speedup.png
    python -m experiments.plot --rows=sweep.jsonl --out=sweep.png --kind=gamma
"""

from collections.abc import Mapping, Sequence
import json
import math
from typing import Any

from absl import flags

from launch import cli, results
from launch.table import lookup
from models.errors import InputError

try:
  import matplotlib
  matplotlib.use('Agg')
  import matplotlib.pyplot as plt
  from matplotlib.ticker import MaxNLocator
except ImportError:  # said in one line by `check`
  plt = None

Row = Mapping[str, Any]

TOKENS = 128  # of the time panel, as in Chen et al. (2023), Figure 1
COLOURS = ('#1b6ca8', '#d1793b', '#3f8f5b', '#8457a6', '#7a6a5c', '#b8a038')
SLOWER = '#c0392b'
KINDS = ('auto', 'speedup', 'gamma')
NAMES = ('rule', 'temperature', 'top_p', 'batch', 'task')  # tell rows of one drafter apart


def check(path: str | None) -> None:
  """Raises InputError where `draw` could not write to `path`, None being no plot; for before the work."""
  if path is not None:
    _require_matplotlib()
    results.check_writable(path)


def _require_matplotlib() -> None:
  if plt is None:
    raise InputError('plots need matplotlib: pip install matplotlib')


def draw(rows: Sequence[Row], path: str, kind: str = 'auto') -> None:
  """Writes one figure.

  Args:
    rows: of `launch.bench`, or of a sweep.
    path: of the PNG.
    kind: 'speedup' (measured next to predicted, by drafter and task), 'gamma' (three panels over gamma), or 'auto':
      gamma where some setting was run with three or more gammas.
  """
  _require_matplotlib()
  if kind not in KINDS:
    raise InputError(f'kind={kind!r} is not known: use one of {", ".join(KINDS)}')
  rows = [row for row in rows if _number(row, 'speedup') is not None]
  if not rows:
    raise InputError('no rows with a speedup to draw: run launch.bench or experiments.sweep first')
  if kind == 'auto':
    kind = 'gamma' if max(len(points) for points in curves(rows).values()) >= 3 else 'speedup'
  save(gamma_figure(rows) if kind == 'gamma' else speedup_figure(rows), path)


def save(figure: 'matplotlib.figure.Figure', path: str) -> None:
  """Writes the figure as a PNG, and closes it."""
  try:
    figure.savefig(path, format='png', dpi=150)
  except OSError as error:
    raise InputError(f'cannot write {path}: {error.strerror}; name another file') from error
  finally:
    plt.close(figure)


def _number(row: Row, key: str) -> float | None:
  value = lookup(row, key)
  return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def is_slower(row: Row) -> bool:
  """Whether speculation lost time. A row without drafts is the baseline itself: its distance from 1 is noise."""
  return bool(row.get('gamma')) and (_number(row, 'speedup') or 1.0) < 1


def setting(row: Row) -> dict[str, Any]:
  """All that was chosen for a row but gamma."""
  if 'base' in row:
    return {'base': row['base'], **{name: value for name, value in row['overrides'].items() if name != 'engine.gamma'}}
  return {name: lookup(row, name) for name in ('drafter', *NAMES)}


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
  """Each setting by what tells it apart from the others."""
  names = list(dict.fromkeys(name for chosen in settings for name in chosen))
  varying = [name for name in names if len({json.dumps(chosen.get(name)) for chosen in settings}) > 1]
  return [', '.join(_named(name, chosen.get(name)) for name in varying) for chosen in settings]


def _named(name: str, value: Any) -> str:
  if isinstance(value, str):
    return value.rpartition(':')[2] if name == 'base' else value
  return f"{name.rpartition('.')[2].replace('_', ' ')} {'-' if value is None else value}"


def curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
  """Rows of each setting by growing gamma; of several with the same gamma the newest."""
  labels = _labels([setting(row) for row in rows])
  grouped: dict[str, dict[int, Row]] = {}
  for label, row in zip(labels, rows, strict=True):
    grouped.setdefault(label, {})[int(row.get('gamma') or 0)] = row
  return {label: [points[gamma] for gamma in sorted(points)] for label, points in grouped.items()}


def speedup_figure(rows: Sequence[Row]) -> 'plt.Figure':
  """Bars of measured speed-up by drafter, one panel per task, the prediction beside each."""
  tasks = list(dict.fromkeys(str(row.get('task') or '') for row in rows))
  panels = [[row for row in rows if str(row.get('task') or '') == task] for task in tasks]
  columns = min(2, len(tasks))
  lines = -(-len(tasks) // columns)
  height = 1.1 + lines * (0.7 + 0.5 * max(len(panel) for panel in panels))
  figure, axes = plt.subplots(lines, columns, figsize=(1.5 + 4.2 * columns, height), squeeze=False, sharex=True,
                              layout='constrained')
  for axis, task, panel in zip(axes.flat, tasks, panels, strict=False):
    _speedup_panel(axis, task, panel)
  for axis in axes.flat[len(tasks):]:
    axis.set_visible(False)
  for axis in axes.flat[max(0, len(tasks) - columns):len(tasks)]:  # the lowest of each column
    axis.set_xlabel('speed-up over plain decoding')
    axis.tick_params(labelbottom=True)
  limit = max(value for row in rows for key in ('speedup', 'predicted_speedup') if (value := _number(row, key)))
  axes[0][0].set_xlim(0, 1.2 * max(limit, 1.0))
  handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[0]), plt.Rectangle((0, 0), 1, 1, color=SLOWER),
             plt.Line2D([], [], marker='D', color='black', markerfacecolor='white', linestyle='')]
  figure.legend(handles, ['measured', 'measured, slower than plain', 'predicted from measured parts'],
                loc='outside lower center', ncols=3, frameon=False, fontsize=9)
  return figure


def _speedup_panel(axis: 'plt.Axes', task: str, rows: Sequence[Row]) -> None:
  names = _labels([{'drafter': row.get('drafter'), 'gamma': row.get('gamma'), **setting(row), 'task': None}
                   for row in rows])
  for place, row in enumerate(rows):
    measured, predicted = _number(row, 'speedup'), _number(row, 'predicted_speedup')
    axis.barh(place, measured, height=0.6, color=SLOWER if is_slower(row) else COLOURS[0])
    end = max(measured, predicted or 0.0)
    clear = 1.0 if 0.7 < end < 1.0 else end  # of the line at 1
    axis.annotate(f'{measured:.2f}×', (clear, place), xytext=(8, 0),
                  textcoords='offset points', va='center', fontsize=9)
    if predicted is not None:
      axis.plot(predicted, place, 'D', color='black', markerfacecolor='white', markersize=6, zorder=3)
  axis.axvline(1.0, color='black', linewidth=0.8, linestyle='--')
  axis.set_yticks(range(len(rows)), names)
  axis.set_ylim(len(rows) - 0.4, -0.6)
  axis.set_title(task, fontsize=10)
  _tidy(axis)


def _tidy(axis: 'plt.Axes') -> None:
  axis.spines[['top', 'right']].set_visible(False)
  axis.grid(alpha=0.25, linewidth=0.6)
  axis.set_axisbelow(True)


def gamma_figure(rows: Sequence[Row]) -> 'plt.Figure':
  """Three panels over gamma: time per 128 tokens, acceptance, time of a step (as Chen et al., 2023, Figure 1)."""
  figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout='constrained')
  figure.get_layout_engine().set(wspace=0.05)
  gamma_panels(axes, rows)
  handles, labels = axes[0].get_legend_handles_labels()
  if any(labels):
    figure.legend(handles, labels, loc='outside lower center', ncols=min(4, len(labels)), frameon=False, fontsize=9)
  return figure


def gamma_panels(axes: 'Sequence[plt.Axes]', rows: Sequence[Row]) -> None:
  """The panels of `gamma_figure`, without its legend."""
  time, acceptance, loop = axes
  for colour, (label, points) in zip(_colours(), curves(rows).items(), strict=False):
    _time_panel(time, points, colour, label)
    _line(acceptance, points, [_acceptance(row) for row in points], colour)
    _line(loop, points, [_step_ms(row) for row in points], colour)
  title = 'Time (band: 10–90 %, dotted: 90 %)' if time.collections else 'Time'
  time.set(ylabel=f'ms per {TOKENS} tokens', title=title)
  acceptance.set(ylabel='emitted / (γ + 1)', title='Acceptance', ylim=(0, 1.05))
  loop.set(ylabel='ms per step', title='Step time')
  loop.set_ylim(bottom=0)
  time.set_ylim(bottom=0)
  for axis in axes:
    axis.set_xlabel('γ (drafted tokens per step)')
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.title.set_fontsize(10)
    _tidy(axis)
  if any(map(is_slower, rows)):
    time.plot([], [], 'o', color=SLOWER, markerfacecolor='none', markersize=10, label='slower than plain')


def _colours() -> list[str]:
  return list(COLOURS) + [f'C{number}' for number in range(100)]


def _line(axis: 'plt.Axes', points: Sequence[Row], values: Sequence[float | None], colour: str, **style: Any) -> None:
  kept = [(row['gamma'], value) for row, value in zip(points, values, strict=True) if value is not None]
  axis.plot(*zip(*kept, strict=True), 'o-', color=colour, markersize=4, linewidth=1.6, **style) if kept else None


def _time_panel(axis: 'plt.Axes', points: Sequence[Row], colour: str, label: str) -> None:
  medians, low, high = (
      [None if (value := _number(row, f'ms_per_token{end}')) is None else TOKENS * value for row in points]
      for end in ('', '_p10', '_p90'))
  _line(axis, points, medians, colour, label=label)
  banded = [(row['gamma'], *pair) for row, *pair in zip(points, low, high, strict=True) if None not in pair]
  if banded:
    gammas, lows, highs = zip(*banded, strict=True)
    axis.fill_between(gammas, lows, highs, color=colour, alpha=0.15, linewidth=0)
    axis.plot(gammas, highs, ':', color=colour, linewidth=1.2)
  for row, milliseconds in zip(points, medians, strict=True):
    if is_slower(row) and milliseconds:
      axis.plot(row['gamma'], milliseconds, 'o', color=SLOWER, markerfacecolor='none', markersize=10)


def _acceptance(row: Row) -> float | None:
  tokens = _number(row, 'tokens_per_pass')
  return None if tokens is None else tokens / (row['gamma'] + 1)


def _step_ms(row: Row) -> float | None:
  """Time of one step: of a token of a row, times the tokens it emits, unless the row says."""
  measured, milliseconds, tokens = (_number(row, key) for key in ('ms_per_round', 'ms_per_token', 'tokens_per_pass'))
  return measured if measured is not None or None in (milliseconds, tokens) else milliseconds * tokens


def main() -> int:
  for flag, value in (('rows', ROWS.value), ('out', OUT.value)):
    if not value:
      raise InputError(f'pass --{flag}=FILE')
  check(OUT.value)
  draw(results.read_rows(ROWS.value), OUT.value, KIND.value)
  cli.say(f'wrote {OUT.value}')
  return 0


if __name__ == '__main__':
  ROWS = flags.DEFINE_string('rows', None, 'JSON lines to read.')
  OUT = flags.DEFINE_string('out', None, 'PNG to write.')
  KIND = flags.DEFINE_enum('kind', 'auto', KINDS, 'Which figure.')
  cli.run(main, alone=True)
