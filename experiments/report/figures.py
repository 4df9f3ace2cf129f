"""Which charts the rows of a run ask for: over γ or batch where these were swept, bars by setting elsewhere."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any

from markupsafe import Markup

from experiments.plot import TOKENS
from experiments.report import charts
from experiments.report.cells import cell, number
from experiments.report.charts import Bar, Series
from experiments.report.tables import labels, slower

Row = Mapping[str, Any]
SWEPT = {'gamma': 'γ (drafted tokens per step)', 'batch': 'batch'}
ENOUGH = 3  # values of a swept field that make a line
MANY = 24  # bars of one chart
SAME = ('task', 'target', 'dtype', 'temperature', 'top_k', 'top_p', 'batch', 'capacity')  # of a row and its plain twin
CROWD = 4  # lines of one chart, before it is split
SPEEDUP, TIME = 'speed-up over plain decoding', 'ms per token'


@dataclasses.dataclass(frozen=True)
class Figure:
  """A chart and what stands around it.

  Attributes:
    title: above.
    chart: the SVG.
    legend: (class of the mark, words).
  """

  title: str
  chart: Markup
  legend: list[tuple[str, str]]


def figures_of(rows: Sequence[Row]) -> list[Figure]:
  """The charts; none where no row has a time or a speed-up."""
  timed = [row for row in rows if any(number(row.get(key)) is not None for key in (
      'speedup', 'ms_per_token', 'predicted_ms_per_token', 'predicted_speedup'))]
  if not timed:
    return []
  swept = next((field for field in SWEPT if _is_swept(timed, field)), None)
  if swept is None:
    return list(_side_by_side(timed))
  return [figure for name, panel in _panels(timed, swept).items() for figure in _over(panel, swept, name)]


def _panels(rows: Sequence[Row], field: str) -> dict[str, list[Row]]:
  """All rows, or those of each slice or task where their lines would be too many for one chart."""
  if len(_lines(rows, field)) > CROWD:
    for key in ('topology', 'task'):
      names = dict.fromkeys(cell(row.get(key)).text for row in rows)
      if len(names) > 1:
        return {name: [row for row in rows if cell(row.get(key)).text == name] for name in names}
  return {'': list(rows)}


def _is_swept(rows: Sequence[Row], field: str) -> bool:
  return any(len({row[field] for row in line}) >= ENOUGH for line in _lines(rows, field).values())


def _lines(rows: Sequence[Row], field: str) -> dict[str, list[Row]]:
  """Rows of each setting by growing `field`; of several with the same value the newest."""
  rows = [row for row in rows if number(row.get(field)) is not None]
  plain = [row for row in rows if row.get('drafter') == 'none']
  drafted = [row for row in rows if row.get('drafter') != 'none'] or plain
  grouped: dict[str, dict[float, Row]] = {}
  for label, row in zip(labels(drafted, without=(field, 'compiled_gamma')), drafted, strict=True):
    line = grouped.setdefault(label, {})
    twin = next((other for other in reversed(plain) if _is_plain_of(other, row)), None)
    if field == 'gamma' and twin is not None:  # where nothing is drafted, all drafts are one
      line.setdefault(0.0, twin)
    line[float(row[field])] = row
  return {label: [points[x] for x in sorted(points)] for label, points in grouped.items()}


def _is_plain_of(plain: Row, row: Row) -> bool:
  return all(plain.get(key) == row.get(key) for key in SAME)


def _over(rows: Sequence[Row], field: str, name: str) -> Iterator[Figure]:
  """Those charts over `field` that the rows have figures for; `name` is what the rows share."""
  kinds = {
      ('Speed-up', SPEEDUP, 1.0): {
          'measured': _of('speedup'), 'predicted': _of('predicted_speedup'), 'published': _of('published_speedup')},
      (f'Time of {TOKENS} tokens, band: 10–90 %', 'ms', None): {'measured': _per_tokens('')},
      ('Time per token', TIME, None): {
          'measured': _of('measured_ms_per_token'), 'predicted': _of('predicted_ms_per_token'),
          'published': _of('published_ms_per_token')}}
  if field == 'gamma':
    kinds |= {('Acceptance', 'emitted / (γ + 1)', None): {'measured': _acceptance},
              ('Time of a step', 'ms', None): {'measured': _of('ms_per_round')}}
  lines = _lines(rows, field)
  for (title, y_title, baseline), values in kinds.items():
    if any(value(row) is not None for value in values.values() for line in lines.values() for row in line):
      yield _figure(f'{title}: {name}' if name else title, field, y_title, lines, values, baseline)


def _of(key: str) -> Callable[[Row], float | None]:
  return lambda row: number(row.get(key))


def _per_tokens(end: str) -> Callable[[Row], float | None]:
  def milliseconds(row: Row) -> float | None:
    value = number(row.get(f'ms_per_token{end}'))
    return None if value is None else TOKENS * value
  return milliseconds


def _acceptance(row: Row) -> float | None:
  tokens, gamma = number(row.get('tokens_per_pass')), number(row.get('gamma'))
  return None if tokens is None or 'backend' not in row or not gamma or gamma < 0 else tokens / (gamma + 1)


def _figure(title: str, field: str, y_title: str, lines: Mapping[str, Sequence[Row]],
            values: Mapping[str, Callable[[Row], float | None]], baseline: float | None) -> Figure:
  series, legend = [], []
  for place, (label, rows) in enumerate(lines.items()):
    for kind, value in values.items():
      points = [(float(row[field]), y) for row in rows if (y := value(row)) is not None]
      if points:
        series.append(Series(label, kind, points, place, _band(rows, field) if 'band' in title else ()))
        legend.append((f'{kind} colour-{place % charts.SERIES}', f'{label}, {kind}' if label else kind))
  log_x = field == 'batch' and all(x > 0 for one in series for x, _ in one.points)
  return Figure(title, charts.lines(title, SWEPT[field], y_title, series, baseline, log_x), legend)


def _band(rows: Sequence[Row], field: str) -> list[tuple[float, float, float]]:
  found = [(float(row[field]), _per_tokens('_p10')(row), _per_tokens('_p90')(row)) for row in rows]
  return [triple for triple in found if None not in triple]


def _side_by_side(rows: Sequence[Row]) -> Iterator[Figure]:
  """A chart for each task: speed-ups where there are any, times elsewhere."""
  by_speedup = any(number(row.get(key)) is not None for row in rows for key in ('speedup', 'predicted_speedup'))
  keys = ('speedup', 'predicted_speedup', 'published_speedup') if by_speedup else (
      'ms_per_token', 'predicted_ms_per_token', 'published_ms_per_token')
  for task in dict.fromkeys(str(row.get('task') or '') for row in rows):
    found = [row for row in rows if str(row.get('task') or '') == task]
    panel = found[:MANY]
    entries = [Bar(label or str(row.get('drafter') or row.get('name') or ''), *(number(row.get(key)) for key in keys),
                   slower=by_speedup and slower(row))
               for label, row in zip(labels(panel, without=('task',)), panel, strict=True)]
    entries = [bar for bar in entries if (bar.measured, bar.predicted, bar.published) != (None, None, None)]
    if not entries:
      continue
    title = ('Speed-up' if by_speedup else 'Time per token') + (f': {task}' if task else '')
    if len(found) > MANY:
      title += f' (the first {MANY} of {len(found)} settings; all are in the table)'
    legend = [(f'{kind} bar-mark', kind) for kind in ('measured', 'predicted', 'published')
              if any(getattr(bar, kind) is not None for bar in entries)]
    if any(bar.slower for bar in entries):
      legend.insert(1, ('slower bar-mark', 'measured, slower than plain ▼'))
    scale, baseline = (SPEEDUP, 1.0) if by_speedup else (TIME, None)
    yield Figure(title, charts.bars(title, scale, entries, baseline), legend)
