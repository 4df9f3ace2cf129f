"""Table 1 and Figure 1 of Chen et al. (2023): measured on a small model, predicted for their slice, and published.

    python -m experiments.chen --config=configs/chen_table1.py --allow_code_execution --out=chen_table1.jsonl
    python -m experiments.chen --config=configs/chen_figure1.py --out=chen_figure1.jsonl --plot=chen_figure1.png

Which of the two the config says. What is measured is of another model on another machine than what is published:
they are to be compared in shape, so each has columns, and in the plot marks, of its own. Predictions are of
`launch.plan` (the rows of `plan`), and, for HumanEval and XSum alike, of one parameter alone: a step of 14.1 + 2.07 γ
ms and equation 1 of Leviathan et al. (2023), with the alpha that Table 1 implies. Fields of the table's rows, whose
measured ones have those of `launch.bench` besides:

    task, setting, drafter, gamma           setting: 'this machine' and its prompts (news stories stand in for XSum,
                                            which no package ships), or 'Chinchilla 70B and 4B'
    topology                                of the predictions
    metric                                  pass@1 or ROUGE-2
    measured_score, measured_difference     with 95 % bootstrap intervals over problems or stories; minus plain's
    measured_ms_per_token, measured_speedup
    predicted_slice_ms_per_token, predicted_slice_speedup     of `launch.plan`
    published_score, published_ms_per_token, published_speedup

Of the figure's, whose measured rows are those of `experiments.sweep` and have these fields besides:

    setting, task, gamma, topology
    measured_ms, measured_ms_p10, measured_ms_p90     for 128 tokens; of the sequences' own (batch 1)
    measured_acceptance, measured_loop_ms   emitted / (γ + 1); of one step
    predicted_ms, predicted_acceptance, predicted_loop_ms     of `launch.plan`
    predicted_ms_one_parameter              see above
    published_ms, published_acceptance, published_loop_ms     read off the plot, ±5 %
"""

from collections.abc import Mapping, Sequence
import os
from typing import Any

from absl import flags
from ml_collections import ConfigDict
import numpy as np

from experiments import humaneval, plot, rouge, score, sweep, xsum
from experiments.published import CHEN_FIGURE_1, CHEN_SETUP, CHEN_TABLE_1
from launch import bench, cli, results
from launch.errors import RunError
from launch.prompts import Prompt, load_prompts, stop_strings
from launch.session import Session
from launch.slices.table import slice_or_chip
from launch.table import Column, print_table
from launch.timed import PLAIN, Timed, time_all
from models.errors import InputError
from specdec import theory

HERE, CHINCHILLA = 'this machine', 'Chinchilla 70B and 4B'
PAPERS = 'v4-32'  # the slice of the paper: 16 TPU v4
TABLE_SECTIONS = ('drafts', 'tasks', 'samples', 'limit', 'max_new_tokens', 'plan', 'topology')
FIGURE_SECTIONS = (*sweep.SECTIONS, 'plan', 'topology')
# Of Table 1, from its times: a step of 4 drafted tokens took 22.4 ms (Figure 1).
IMPLIED_ALPHA = {'humaneval': 0.876, 'xsum': 0.737}
PLANNED = {'humaneval': 'humaneval', 'xsum': 'xsum nucleus'}  # names of workloads
TABLE_COLUMNS = (
    Column('task'), Column('setting'), Column('drafter'), Column('gamma', 'γ'), Column('metric'),
    Column('measured_score', 'measured score', str), Column('measured_difference', 'minus plain', str),
    Column('measured_ms_per_token', 'measured ms/token', '.2f'), Column('measured_speedup', 'speed-up', '.2f'),
    Column('predicted_slice_ms_per_token', 'predicted ms/token', '.2f'),
    Column('predicted_slice_speedup', 'speed-up', '.2f'),
    Column('published_score', 'published score', '.3f'),
    Column('published_ms_per_token', 'published ms/token', '.2f'), Column('published_speedup', 'speed-up', '.2f'))
FIGURE_COLUMNS = (
    Column('task'), Column('setting'), Column('drafter'), Column('gamma', 'γ'),
    *[Column(f'{kind}_{name}', f'{kind} {title}', form) for kind in ('measured', 'predicted', 'published')
      for name, title, form in (('ms', 'ms/128', '.0f'), ('acceptance', 'acc.', '.2f'), ('loop_ms', 'loop', '.1f'))],
    Column('predicted_ms_one_parameter', 'one parameter ms/128', '.0f'))


def one_parameter_ms(alpha: float, gamma: int) -> float:
  """Milliseconds for 128 tokens from alpha alone, with the published times of a step, linear in γ."""
  plain, longest = CHEN_FIGURE_1['loop_ms'][0], CHEN_FIGURE_1['loop_ms'][7]
  step = plain + gamma * (longest - plain) / 7
  return CHEN_FIGURE_1['tokens'] * step / float(theory.expected_tokens(alpha, gamma))


def slice_name(topology: str) -> str:
  """As plans name it: v5e-16 is v5litepod-16."""
  return slice_or_chip(topology).name


def planned(path: str, topology: str) -> dict[tuple[str, int], dict[str, float]]:
  """Workload and γ -> the row that `experiments.plan_sweep` predicted; γ = 0 is plain decoding.

  Raises:
    InputError: a file without rows of this slice.
  """
  name = slice_name(topology)
  rows = [row for row in results.read_rows(path) if row.get('topology') == name]
  if not rows:
    raise InputError(f'{path} has no rows of topology {name!r}: make them with experiments.plan_sweep')
  found = {(row['name'], row['gamma']): row for row in rows}
  for row in rows:
    plain = row['predicted_ms_plain']
    found[row['name'], 0] = {'predicted_ms_per_token': plain, 'tokens_per_pass': 1.0, 'predicted_speedup': 1.0}
  return found


# Table 1


def published_rows(config: ConfigDict) -> list[dict[str, Any]]:
  """Plain and speculative of each task of the paper: what is published, beside what is predicted."""
  plan, rows = planned(config.plan, config.topology), []
  for entry in CHEN_TABLE_1['rows']:
    facts = dict(zip(CHEN_TABLE_1['columns'], entry, strict=True))
    task = f'{facts["task"]} {facts["sampling"]}'
    workload = facts['task'] if facts['task'] == 'humaneval' else task
    for way, gamma, speedup in (('plain', 0, 1.0), ('speculative', CHEN_SETUP['gamma'], facts['speedup'])):
      predicted = plan.get((workload, gamma), {})
      rows.append({
          'task': task, 'setting': CHINCHILLA, 'topology': slice_name(config.topology),
          'drafter': 'none' if way == 'plain' else '4B', 'gamma': gamma,
          'metric': facts['metric'], 'predicted_slice_ms_per_token': predicted.get('predicted_ms_per_token'),
          'predicted_slice_speedup': predicted.get('predicted_speedup'), 'published_score': facts[f'{way}_score'],
          'published_ms_per_token': facts[f'{way}_ms_per_token'], 'published_speedup': speedup})
  return rows


def sessions_of(config: ConfigDict, task: Mapping[str, Any]) -> dict[str, Session]:
  """Plain decoding, and each draft whose files are there, by its name; all of one target.

  Raises:
    InputError: drafts of different targets or batches, or no draft.
  """
  sessions: dict[str, Session] = {}
  for base in config.drafts:
    point = sweep.load_config(base)
    source = point.drafter.get('source', 'untrained')
    if not source.startswith(('random:', 'untrained')) and not os.path.exists(source):
      cli.say(f'{base} is left out: there is no {source} yet')
      continue
    with point.unlocked():
      point.data.update(kind=task['kind'], limit=config.limit or None, offset=0)
      point.sampling.update(temperature=task['temperature'], top_p=task['top_p'], max_new_tokens=config.max_new_tokens)
      point.sampling.stop = stop_strings(point.data)
    first = next(iter(sessions.values()), None)
    if first and _shared(point) != _shared(first.config):
      raise InputError(f'{base} differs from the drafts before it in target or engine.batch, which one table has one '
                       'of: leave it out of drafts, or make them the same')
    name = sweep.numbered(point.drafter.name, sessions)
    sessions[name] = Session.from_config(point, first and (first.params.target, first.tokenizer))
  if not sessions:
    raise InputError('no draft of this config is there: train one, or add one that needs no training to drafts')
  return {PLAIN: next(iter(sessions.values())).plain()} | sessions


def _shared(config: ConfigDict) -> tuple[Any, ...]:
  """What all ways of decoding have in common."""
  return config.target.to_dict(), config.engine.batch


def scores_of(run: Timed, prompts: Sequence[Prompt], kind: str) -> tuple[str, np.ndarray]:
  """The metric and its value for each problem (of all its samples) or story."""
  if kind != 'humaneval':
    summaries = xsum.summaries_of(run)
    return 'ROUGE-2', rouge.rouge([prompt.reference for prompt in prompts], summaries, stemmer=True)['rouge2']
  scores = score.score_samples(humaneval.samples_of(run, prompts), allow_execution=True)
  scores.check({'timeout': 'start again on an idle machine', 'harness_error': 'see experiments.humaneval'})
  passed: dict[str, list[bool]] = {}
  for row in scores.results:
    passed.setdefault(row['task_id'], []).append(row['passed'])
  return 'pass@1', np.array([np.mean(samples) for samples in passed.values()])


def measured_rows(config: ConfigDict, name: str, units_dir: str | None) -> list[dict[str, Any]]:
  """One task, decoded in every way in turns: a row for each way, the plain one first.

  Scores that mean nothing are left out, and it is said: the times are none the worse.
  """
  task = config.tasks[name]
  sessions = sessions_of(config, task)
  repeats = config.samples if task.kind == 'humaneval' else 1
  prompts = [prompt for prompt in load_prompts(sessions[PLAIN].config.data) for _ in range(repeats)]
  runs = time_all(sessions, prompts, repeats=1, units_dir=units_dir and os.path.join(units_dir, name.replace(' ', '_')))
  rows = []
  for run in runs:
    row = bench.row_of(run, runs[0])
    rows.append({
        'task': name, 'setting': f'{HERE}, {task.kind} prompts', **row,
        'drafter': row['drafter'] if run is runs[0] else run.name,
        'measured_ms_per_token': row['ms_per_token'], 'measured_speedup': row['speedup']})
  try:
    scores = [scores_of(run, prompts, task.kind) for run in runs]
  except RunError as error:
    cli.say(f'{name}: {error}')
    return rows
  return [row | score_fields(*scored, None if row is rows[0] else scores[0][1])
          for row, scored in zip(rows, scores, strict=True)]


def score_fields(metric: str, values: np.ndarray, plain_values: np.ndarray | None) -> dict[str, Any]:
  """Those of a row; the plain one has no difference."""
  difference = None if plain_values is None else rouge.interval(values - plain_values)
  return {'metric': metric, 'measured_score': rouge.interval(values), 'measured_difference': difference}


def table(config: ConfigDict, out: str | None, units_dir: str | None) -> list[dict[str, Any]]:
  """All rows, each task's written as soon as it is done."""
  if any(task.kind != 'humaneval' for task in config.tasks.values()):
    rouge.rouge([], [], stemmer=True)  # a missing package, before the work
  published, rows = published_rows(config), []
  for name in config.tasks:
    for row in [*measured_rows(config, name, units_dir), *[row for row in published if row['task'] == name]]:
      rows.append(row)
      if out is not None:
        results.append_row(out, row)
  return rows


# Figure 1


def figure(config: ConfigDict, out: str | None) -> list[dict[str, Any]]:
  """The sweep's rows, then those of the paper's setup.

  Raises:
    InputError: see `experiments.sweep` and `planned`.
  """
  paper = paper_points(config)
  rows = [measured_point(row) for row in sweep.run_sweep(config, out)]
  return rows + paper


def measured_point(row: Mapping[str, Any]) -> dict[str, Any]:
  """A sweep's row with the panels' fields."""
  tokens, spread = CHEN_FIGURE_1['tokens'], {}
  for end in ('', '_p10', '_p90'):
    spread[f'measured_ms{end}'] = tokens * row[f'ms_per_token{end}']
  return {'setting': HERE, **row, **spread, 'measured_acceptance': row['tokens_per_pass'] / (row['gamma'] + 1),
          'measured_loop_ms': row['ms_per_round']}


def paper_points(config: ConfigDict) -> list[dict[str, Any]]:
  """Predicted and published points of both tasks, γ = 0..7."""
  plan, rows = planned(config.plan, config.topology), []
  for task, alpha in IMPLIED_ALPHA.items():
    for gamma in range(8):
      rows.append({'task': task, 'setting': CHINCHILLA, 'topology': slice_name(config.topology), 'drafter': '4B',
                   'gamma': gamma,
                   **_predicted(plan.get((PLANNED[task], gamma)), gamma),
                   'predicted_ms_one_parameter': one_parameter_ms(alpha, gamma),
                   'published_ms': CHEN_FIGURE_1[f'{task}_ms'].get(gamma),
                   'published_acceptance': CHEN_FIGURE_1[f'{task}_acceptance'].get(gamma),
                   'published_loop_ms': CHEN_FIGURE_1['loop_ms'].get(gamma)})
  return rows


def _predicted(row: Mapping[str, Any] | None, gamma: int) -> dict[str, float]:
  if row is None:
    return {}
  per_token, tokens = row['predicted_ms_per_token'], row['tokens_per_pass']
  return {'predicted_ms': CHEN_FIGURE_1['tokens'] * per_token, 'predicted_acceptance': tokens / (gamma + 1),
          'predicted_loop_ms': per_token * tokens}


def slice_title(rows: Sequence[Mapping[str, Any]]) -> str:
  """The paper's setup; predictions may be for another slice than the one that was published."""
  planned_for, = {row['topology'] for row in rows if row['setting'] == CHINCHILLA}
  return f'{CHINCHILLA} on {PAPERS}' if planned_for == PAPERS else (
      f'{CHINCHILLA}: predicted for {planned_for}, published on {PAPERS}')


def draw(rows: Sequence[Mapping[str, Any]], path: str) -> None:
  """Two lines of three panels: measured here; below, predicted and published for the paper's setup."""
  canvas, axes = plot.plt.subplots(2, 3, figsize=(13, 8.4), layout='constrained')
  measured = [row for row in rows if row['setting'] == HERE]
  plot.gamma_panels(axes[0], measured)
  for axis in axes[0]:
    axis.set_title(f'{axis.get_title()}\nmeasured, {HERE}', fontsize=10)
  if any(axes[0][0].get_legend_handles_labels()[1]):
    axes[0][0].legend(fontsize=8, frameon=False)
  for panel, name in zip(axes[1], ('ms', 'acceptance', 'loop_ms'), strict=True):
    for colour, task in zip(plot.COLOURS, IMPLIED_ALPHA, strict=False):
      points = [row for row in rows if row['setting'] == CHINCHILLA and row['task'] == task]
      _marks(panel, points, f'predicted_{name}', 'D--', colour, f'{task}, predicted (launch.plan)')
      _marks(panel, points, f'published_{name}', 'x', 'black' if name == 'loop_ms' else colour, f'{task}, published')
      if name == 'ms':
        _marks(panel, points, 'predicted_ms_one_parameter', ':', colour, f'{task}, predicted (one parameter)')
    panel.set(title=slice_title(rows), xlabel='γ (drafted tokens per step)', ylim=(0, None))
    panel.title.set_fontsize(10)
    panel.set_ylabel(axes[0][('ms', 'acceptance', 'loop_ms').index(name)].get_ylabel())
  axes[1][0].legend(fontsize=8, frameon=False)
  plot.save(canvas, path)


def _marks(panel: 'plot.plt.Axes', rows: Sequence[Mapping[str, Any]], key: str, style: str, colour: str,
           label: str) -> None:
  points = [(row['gamma'], row[key]) for row in rows if row.get(key) is not None]
  if points:
    panel.plot(*zip(*points, strict=True), style, color=colour, markersize=6, markerfacecolor='none', label=label)


def main() -> None:
  cli.refuse_job()
  is_table = 'tasks' in (CONFIG.value or ())
  config = cli.config_of(CONFIG, TABLE_SECTIONS if is_table else FIGURE_SECTIONS)
  results.check_rows(OUT.value)
  plot.check(PLOT.value)
  if is_table:
    score.require_consent(ALLOW.value)
    if PLOT.value:
      raise InputError('--plot draws Figure 1: leave it out, or pass --config=configs/chen_figure1.py')
    score.prepare()
    rows = table(config, OUT.value, UNITS_DIR.value)
    print_table(rows, TABLE_COLUMNS, CHEN_TABLE_1['source'], file=cli.output())
  else:
    rows = figure(config, OUT.value)
    print_table(rows, FIGURE_COLUMNS, CHEN_FIGURE_1['source'], file=cli.output())
    if PLOT.value:
      draw(rows, PLOT.value)
  cli.write_json({'rows': rows})


if __name__ == '__main__':
  CONFIG = cli.define_config('configs/chen_figure1.py')
  OUT = flags.DEFINE_string('out', None, 'JSON lines: measured rows are appended; a figure runs only what is missing.')
  PLOT = flags.DEFINE_string('plot', None, 'PNG to draw of the figure.')
  ALLOW = flags.DEFINE_bool('allow_code_execution', False, 'Run what the model wrote, in a sandbox (the table).')
  UNITS_DIR = flags.DEFINE_string('units_dir', None, 'Keep what the table decodes here, and go on from it.')
  cli.run(main)
