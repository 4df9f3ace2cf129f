"""The tables and the figure of Leviathan et al. (2023) that follow from their formulas, beside what is published.

    python -m experiments.leviathan
    python -m experiments.leviathan --rows=results/t5_pair/rows.jsonl --figure=figure3.png --json_out=leviathan.json

Nothing is decoded here. Published figures are those of `experiments/published.py`, predicted ones come from
`specdec/theory.py`; measured ones only from rows of `launch.bench` (--rows), in a table of their own, with what the
theorem says of the acceptance and costs that were measured with them.

Of --json_out:

    table_1    alpha, gamma; operations and speed-up (c = c_hat = 0), predicted and published
    table_4    setting, alpha and c as printed, which are rounded: predicted from them, lowest and highest that the
               rounding allows, published prediction, published measurement
    figure_3   the gamma in 0..64 with the largest improvement of Theorem 3.8, and the improvement, by c and alpha
    measured   of the rows: gamma, alpha, c, v; predicted by Theorem 3.8 and from the measured parts, and measured
"""

from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
import numpy as np

from experiments import plot, published
from experiments.report.provenance import SETTINGS
from launch import cli, results
from launch.table import Column, print_table
from specdec import theory

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
MAX_GAMMA = 64
ALPHA_HALF, COST_HALF = 0.005, 0.005  # alpha and c are printed with two digits
SETTING = sorted(SETTINGS | set(results.KEY_FIELDS))
FIGURE_ALPHAS = np.linspace(0.3, 0.97, 68)

TABLE_1 = (Column('alpha', 'α'), Column('gamma', 'γ'), Column('predicted_operations', 'predicted operations', '.2f'),
           Column('published_operations', 'published operations', '.2f'),
           Column('predicted_speedup', 'predicted speed-up', '.2f'),
           Column('published_speedup', 'published speed-up', '.2f'))
TABLE_4 = (Column('task'), Column('temperature', 'T'), Column('draft'), Column('gamma', 'γ'),
           Column('alpha', 'α', '.2f'), Column('c', format='.2f'), Column('predicted', format='.2f'),
           Column('lowest', 'rounding: from', '.2f'), Column('highest', 'to', '.2f'),
           Column('published_prediction', 'published prediction', '.1f'),
           Column('published_measurement', 'published measurement', '.1f'))
MEASURED = (Column('task'), Column('drafter'), Column('gamma', 'γ'), Column('temperature', 'T', '.1f'), Column('batch'),
            Column('alpha', 'measured α', '.3f'), Column('draft_cost', 'measured c', '.3f'),
            Column('verify_cost', 'measured v', '.2f'),
            Column('predicted_theorem_3_8', 'predicted, theorem 3.8', '.2f'),
            Column('predicted_speedup', 'predicted from parts', '.2f'), Column('speedup', 'measured speed-up', '.2f'))


def table_1() -> list[dict[str, Any]]:
  return [{'alpha': alpha, 'gamma': gamma, 'published_operations': operations, 'published_speedup': speedup,
           'predicted_operations': float(theory.operations_factor(alpha, gamma, 0.0)),
           'predicted_speedup': float(theory.speedup_leviathan(alpha, gamma, 0.0))}
          for alpha, gamma, operations, speedup in published.LEVIATHAN_TABLE_1['rows']]


def table_4() -> list[dict[str, Any]]:
  rows = []
  for task, temperature, draft, gamma, alpha, measurement, c, prediction in (
      published.LEVIATHAN_TABLES_2_AND_4['rows']):
    speedup = lambda alpha, c, gamma=gamma: float(theory.speedup_leviathan(alpha, gamma, c))
    rows.append({
        'task': task, 'temperature': temperature, 'draft': draft, 'gamma': gamma, 'alpha': alpha, 'c': c,
        'predicted': speedup(alpha, c), 'lowest': speedup(alpha - ALPHA_HALF, c + COST_HALF),
        'highest': speedup(alpha + ALPHA_HALF, c - COST_HALF), 'published_prediction': prediction,
        'published_measurement': measurement})
  return rows


def figure_3() -> list[dict[str, Any]]:
  rows = []
  for c in COSTS:
    for alpha in ALPHAS:
      gamma = int(theory.optimal_gamma(alpha, c, MAX_GAMMA))
      rows.append({'c': c, 'alpha': alpha, 'gamma': gamma,
                   'predicted_speedup': float(theory.speedup_leviathan(alpha, gamma, c))})
  return rows


def figure_3_by_cost(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """One row for each c: optimal γ and improvement at each α."""
  return [{'c': c} | {str(row['alpha']): f'{row["gamma"]} ({row["predicted_speedup"]:.2f})'
                      for row in rows if row['c'] == c} for c in COSTS]


def measured(path: str | None) -> list[dict[str, Any]]:
  """Of the rows of `launch.bench` that draft, what a reader compares; of a setting that was measured twice the newest.

  Raises:
    InputError: if the file cannot be read.
  """
  if path is None:
    return []
  keys = [column.key for column in MEASURED]
  newest = {results.digest({name: row.get(name) for name in SETTING}): row for row in results.read_rows(path)}
  return [{key: row.get(key) for key in keys} for row in newest.values() if row.get('gamma')]


def draw(path: str) -> None:
  """Figure 3: the optimal γ over α, one line for each c."""
  figure, axis = plot.plt.subplots(figsize=(6.5, 4.2), layout='constrained')
  for colour, c in zip(plot.COLOURS, COSTS, strict=True):
    gammas = theory.optimal_gamma(FIGURE_ALPHAS, c, 2 * MAX_GAMMA)
    axis.step(FIGURE_ALPHAS, gammas, where='mid', color=colour, linewidth=1.6, label=f'c = {c}')
  axis.set(xlabel='α', ylabel='optimal γ', yscale='log', title='Predicted by theorem 3.8')
  axis.set_yticks((1, 2, 4, 8, 16, 32, 64), ('1', '2', '4', '8', '16', '32', '64'))
  axis.title.set_fontsize(10)
  axis.legend(frameon=False, fontsize=9)
  axis.spines[['top', 'right']].set_visible(False)
  axis.grid(alpha=0.25, linewidth=0.6)
  plot.save(figure, path)


def main() -> int:
  plot.check(FIGURE.value)
  rows = {'table_1': table_1(), 'table_4': table_4(), 'figure_3': figure_3(), 'measured': measured(ROWS.value)}
  print_table(rows['table_1'], TABLE_1, f'{published.LEVIATHAN_TABLE_1["source"]}', file=cli.output())
  print_table(rows['table_4'], TABLE_4, f'\n{published.LEVIATHAN_TABLES_2_AND_4["source"]}', file=cli.output())
  by_cost = [Column('c'), *(Column(str(alpha), f'α = {alpha}') for alpha in ALPHAS)]
  print_table(figure_3_by_cost(rows['figure_3']), by_cost, '\nFigure 3: optimal γ (its improvement), predicted',
              file=cli.output())
  if rows['measured']:
    print_table(rows['measured'], MEASURED, f'\nMeasured: {ROWS.value}', file=cli.output())
  if FIGURE.value is not None:
    draw(FIGURE.value)
  cli.write_json(rows)
  return 0


if __name__ == '__main__':
  ROWS = flags.DEFINE_string('rows', None, 'Rows of launch.bench, as experiments.t5_pair writes them.')
  FIGURE = flags.DEFINE_string('figure', None, 'Draw Figure 3 into this PNG.')
  cli.run(main, alone=True)
