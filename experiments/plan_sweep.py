"""Plans a config on several slices and for several γ, and draws the predicted time per token.

    python -m experiments.plan_sweep --config=configs/sweep_plan.py --out=plan.jsonl --plot=plan.png

Passes are padded to engine.rows query rows, so one compiled loop tells the time of every γ below that many; each larger
γ is compiled alone. Rows are appended to --out loop by loop, and loops that are there, all rows of them and of the same
base config and assumptions, are not compiled again.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from experiments import plot
from experiments.sweep import load_config
from launch import cli, results
from launch.compile_ahead import need_compiler
from launch.estimate import TREES, Step, workloads_of
from launch.plan import WORKLOAD_COLUMNS, plan
from launch.progress import track
from launch.slices.table import slice_of
from launch.table import Column, print_table
from models.errors import InputError

KEY_FIELDS = ('topology', 'name', 'gamma', 'config_hash')
SECTIONS = ('base', 'topologies', 'gammas', 'assume')
COLUMNS = (Column('topology'), *WORKLOAD_COLUMNS, Column('best', 'note', lambda best: 'best γ' if best else ''))


def loops(gammas: Sequence[int], rows: int) -> dict[int, list[int]]:
  """γ to compile -> the γ that this tells about."""
  shared = [gamma for gamma in gammas if gamma < rows]
  return ({max(shared): shared} if shared else {}) | {gamma: [gamma] for gamma in gammas if gamma >= rows}


def keys_of(config: ConfigDict, topology: str, gammas: Sequence[int], assume: Sequence[str]) -> list[str]:
  """The keys of the rows that one compiled loop gives."""
  config_hash = hash_of(config, assume)
  return [row_key({'topology': topology, 'name': workload.name, 'gamma': gamma, 'config_hash': config_hash})
          for workload in workloads_of(config) for gamma in gammas]


def row_key(row: Mapping[str, Any]) -> str:
  """What makes a row the same prediction."""
  return results.digest({name: row.get(name) for name in KEY_FIELDS})


def hash_of(config: ConfigDict, assume: Sequence[str]) -> str:
  """Of all that a prediction depends on besides slice and γ."""
  return results.digest({'config': config, 'assume': assume})


def rows_of(config: ConfigDict, facts: Mapping[str, Any], gammas: Sequence[int],
            assume: Sequence[str]) -> Iterator[dict[str, Any]]:
  """A row for each workload and γ, from the passes of one compiled loop."""
  step = Step(*(facts[f'predicted_ms_{name}'] for name in ('plain', 'draft_first', 'draft', 'verify')))
  for workload in workloads_of(config):
    for gamma in gammas:
      yield {'topology': facts['topology'], 'compiled_gamma': facts['gamma'], **workload.row(step, gamma),
             'predicted_ms_plain': facts['predicted_ms_plain'], 'assumptions': facts['assumptions'],
             'config_hash': hash_of(config, assume)}


def run_sweep(config: ConfigDict, out: str | None = None) -> list[dict[str, Any]]:
  """The rows that the config asks for, in order; only what `out` lacks is compiled.

  Raises:
    InputError: a config that does not fit one of the slices, unknown slices, or other wrong input.
  """
  rows = {row_key(row): row for row in results.rows_so_far(out)}
  base = load_config(config.base)
  if not config.gammas or min(config.gammas) < 1:
    raise InputError(f'gammas={config.gammas}: give numbers of drafted tokens, from 1 on')
  if base.drafter.name in TREES:
    raise InputError(f'drafter.name={base.drafter.name!r} drafts a tree, which has its shape: sweep γ of a chain')
  wanted = [(slice_of(name), gamma, told) for name in config.topologies
            for gamma, told in loops(config.gammas, base.engine.rows).items()]
  keys = {(made.name, gamma): keys_of(base, made.name, told, config.assume) for made, gamma, told in wanted}
  missing = [point for point in wanted if not rows.keys() >= set(keys[point[0].name, point[1]])]
  for made, gamma, told in track(missing, len(missing), 'plans'):
    point = base.copy_and_resolve_references()
    point.engine.gamma = gamma
    facts = plan(point, made, config.assume, wanted=('speculative', 'plain'))
    if not facts['fits']:
      raise InputError(facts['problem'])
    for row in rows_of(base, facts, told, config.assume):
      rows[row_key(row)] = row
      if out is not None:
        results.append_row(out, row)
  found = [rows[key] for loop in keys.values() for key in loop]
  return marked(sorted(found, key=lambda row: (row['topology'], row['name'], row['gamma'])))


def marked(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """The rows, the best γ of each slice and workload marked."""
  best: dict[tuple[str, str], float] = {}
  for row in rows:
    key = row['topology'], row['name']
    best[key] = min(best.get(key, float('inf')), row['predicted_ms_per_token'])
  return [row | {'best': row['predicted_ms_per_token'] == best[row['topology'], row['name']]} for row in rows]


def draw(rows: Sequence[Mapping[str, Any]], path: str) -> None:
  """A panel for each workload: predicted ms per token over γ, a line for each slice; published figures as crosses."""
  names = sorted({row['name'] for row in rows})
  figure, panels = plot.plt.subplots(1, len(names), figsize=(4 * len(names), 3.4), sharey=True, squeeze=False)
  for panel, name in zip(panels[0], names, strict=True):
    for colour, topology in zip(plot.COLOURS, sorted({row['topology'] for row in rows}), strict=False):
      points = [row for row in rows if (row['name'], row['topology']) == (name, topology)]
      panel.plot([row['gamma'] for row in points], [row['predicted_ms_per_token'] for row in points], marker='o',
                 markersize=3, color=colour, label=f'{topology}, predicted')
    published = {(row['gamma'], row['published_ms_per_token']) for row in rows
                 if row['name'] == name and row['published_ms_per_token'] is not None}
    panel.scatter(*zip(*published, strict=True), marker='x', color='black', label='published') if published else None
    panel.set(title=name, xlabel='γ')
  panels[0][0].set(ylabel='ms per token', ylim=(0, None))
  panels[0][-1].legend(fontsize=7)
  figure.tight_layout()
  plot.save(figure, path)


def main() -> None:
  config = cli.config_of(CONFIG, SECTIONS)
  results.check_rows(OUT.value)
  plot.check(PLOT.value)
  need_compiler()
  rows = run_sweep(config, OUT.value)
  print_table(rows, COLUMNS, file=cli.output())
  if PLOT.value:
    draw(rows, PLOT.value)
  cli.write_json({'rows': rows})


if __name__ == '__main__':
  CONFIG = cli.define_config('configs/sweep_plan.py')
  OUT = flags.DEFINE_string('out', None, 'JSON lines: rows are appended, and loops that are there are not compiled.')
  PLOT = flags.DEFINE_string('plot', None, 'PNG to draw at the end.')
  cli.run(main, alone=True)
