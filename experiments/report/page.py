"""The page: one HTML file that loads nothing, in which nothing that a model or a file says is markup."""

import base64
from collections.abc import Mapping, Sequence
import hashlib
import importlib.resources
import statistics
from typing import Any

import jinja2
from markupsafe import Markup

from experiments.report import tables
from experiments.report.cells import cell, figure, number, visible
from experiments.report.figures import figures_of
from experiments.report.inputs import Run
from experiments.report.provenance import WHERE

Row = Mapping[str, Any]
ORIGINS = {'plain': 'plain: nothing was drafted', 'accepted': 'drafted and accepted',
           'corrected': 'corrected: drawn after a refusal', 'bonus': 'bonus: after a whole draft',
           'prompt': 'prompt'}
ROW_LIMIT = 2000  # a browser shows no more with comfort


def render(title: str, runs: Sequence[Run], verdicts: Sequence[Row] = (), traces: Sequence[Row] = ()) -> str:
  """The whole page.

  Args:
    title: of the page.
    runs: each becomes a section of charts and tables.
    verdicts: of `experiments.exactness`.
    traces: of `experiments.trace`.
  """
  style, script = _part('page.css'), _part('page.js')
  environment = jinja2.Environment(
      loader=jinja2.FunctionLoader(_part), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
      lstrip_blocks=True)
  environment.filters |= {'visible': visible, 'figure': figure, 'cell': cell}
  return environment.get_template('page.html.jinja').render(
      title=title, style=Markup(style), script=Markup(script), style_hash=_hash(style), script_hash=_hash(script),
      findings=_findings(runs, verdicts), sections=[_section(run) for run in runs], rungs=_rungs(verdicts),
      traces=[_trace(trace) for trace in traces], origins=ORIGINS) + '\n'


def _part(name: str) -> str:
  return importlib.resources.files(__package__).joinpath(name).read_text(encoding='utf-8')


def _hash(text: str) -> str:
  """As a content security policy names the one style sheet or script that may run."""
  return 'sha256-' + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _section(run: Run) -> dict[str, Any]:
  rows = run.rows[:ROW_LIMIT]
  main, full = tables.main_table(rows), tables.full_table(rows)
  return {'name': run.name, 'figures': figures_of(rows), 'main': main, 'full': full if full != main else None,
          'left_out': len(run.rows) - len(rows), 'places': _places(run.rows)}


def _places(rows: Sequence[Row]) -> list[str]:
  """Where the rows were measured, each place once."""
  named = lambda row, key: f'{key.replace("_", " ")} {cell(row[key]).text}'
  said = [', '.join(named(row, key) for key in sorted(WHERE) if row.get(key) is not None) for row in rows]
  return [place for place in dict.fromkeys(said) if place]


def _findings(runs: Sequence[Run], verdicts: Sequence[Row]) -> list[str]:
  """What a hurried reader should take away; of measured figures only."""
  found = []
  for run in runs:
    drafted = [row for row in run.rows if row.get('gamma') and number(row.get('speedup'))]
    if not drafted:
      continue
    names = dict(zip(map(id, drafted), tables.labels(drafted), strict=True))
    best = max(drafted, key=lambda row: number(row['speedup']))
    losing = sum(map(tables.slower, drafted))
    name = names[id(best)] or cell(best.get('drafter')).text
    found.append(f'{run.name}: at best {figure(number(best["speedup"]))}× plain decoding, measured ({name}); '
                 f'{losing} of {len(drafted)} settings {"is" if losing == 1 else "are"} slower than plain.')
    errors = [abs(number(row['predicted_speedup']) / number(row['speedup']) - 1) for row in drafted
              if number(row.get('predicted_speedup'))]
    if errors:
      found.append(f'{run.name}: predictions from the measured parts miss the measured speed-up by '
                   f'{100 * statistics.median(errors):.1f} % in the median, {100 * max(errors):.1f} % at most.')
  if verdicts:
    held = sum(verdict['passed'] for verdict in verdicts)
    found.append(f'Exactness: {held} of {len(verdicts)} verdicts hold.')
  return found


def _rungs(verdicts: Sequence[Row]) -> list[dict[str, Any]]:
  """The verdicts of each rung of the ladder; what failed first."""
  rungs: dict[str, list[Row]] = {}
  for verdict in verdicts:
    rungs.setdefault(verdict['rung'], []).append(verdict)
  return [{'name': name, 'held': sum(row['passed'] for row in rows),
           'rows': sorted(rows, key=lambda row: row['passed'])} for name, rows in rungs.items()]


def _trace(trace: Row) -> dict[str, Any]:
  """The tokens in reading order: what was refused stands, struck out, before what came instead."""
  shown = [(key, cell(trace.get(key)).text) for key in (
      'target', 'drafter', 'rule', 'gamma', 'temperature', 'top_k', 'top_p', 'reason', 'passes', 'emitted', 'drafted',
      'accepted') if trace.get(key) is not None]
  return {'id': cell(trace.get('id')).text, 'prompt': visible(str(trace.get('prompt', ''))),
          'lossless': trace.get('lossless') is not False,
          'settings': [(tables.title_of(key), text) for key, text in shown],
          'steps': [_step(step, place) for place, step in enumerate(trace['steps'], start=1)]}


def _step(step: Row, place: int) -> list[dict[str, Any]]:
  kept = sum(token['origin'] == 'accepted' for token in step['tokens'])
  about = f'pass {place}: {step["drafted"]} drafted, {kept} kept'
  emitted = [_token(token, token['origin'], about) for token in step['tokens']]
  refused = [_token(token, 'refused', about) for token in step['refused']]
  if refused and step['unused']:
    behind = ' '.join(f'“{visible(token["text"])}”' for token in step['unused'])
    refused[-1]['lines'].append(f'also drafted, to no end: {behind}')
  ends = bool(emitted) and step['tokens'][-1]['origin'] != 'accepted'
  return [*emitted[:-1], *refused, emitted[-1]] if ends else [*emitted, *refused]


def _token(token: Row, origin: str, about: str) -> dict[str, Any]:
  """What a token shows, and what it says when it is pointed at."""
  text = visible(token['text'])
  before, line_break, indent = text.rpartition('\n') if origin != 'refused' else ('', '', text)
  shown = (before + line_break if line_break else text).replace('\n', '⏎') or '∅'
  lines = [about, *(f'{who}: probability {figure(value)}' + (f', rank {rank}' if rank is not None else '')
                    for who in ('target', 'draft') if (value := number(token.get(f'{who}_prob'))) is not None
                    for rank in (token.get(f'{who}_rank'),))]
  return {'shown': shown, 'breaks': bool(line_break), 'indent': indent if line_break else '', 'lines': lines,
          'origin': origin if origin in (*ORIGINS, 'refused') else 'plain',
          'says': ORIGINS.get(origin, 'drafted and refused')}
