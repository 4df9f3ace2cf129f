"""The tables of Leviathan et al. (2023) from the formulas, to the published digits."""

import json
import pathlib
import subprocess
import sys

import pytest

from experiments import leviathan
from launch import results

ROOT = pathlib.Path(__file__).parents[1]


def test_table_1_to_the_published_digits():
  """Both columns to two decimals; one cell lies at a half and was printed the other way."""
  for row in leviathan.table_1():
    for which in ('operations', 'speedup'):
      assert row[f'predicted_{which}'] == pytest.approx(row[f'published_{which}'], abs=0.0051), row


def test_table_4_to_the_published_digit():
  """Nine of twelve by rounding what the printed alpha and c give; the other three within the rounding of these."""
  rows = leviathan.table_4()
  agreeing = [round(row['predicted'], 1) == row['published_prediction'] for row in rows]
  assert sum(agreeing) == 9
  for row in rows:
    assert row['lowest'] < row['predicted'] < row['highest']
    assert row['lowest'] - 0.05 <= row['published_prediction'] <= row['highest'] + 0.05
    assert abs(row['predicted'] - row['published_prediction']) < 0.07


def test_figure_3_is_the_best_of_all_gammas():
  for row in leviathan.figure_3():
    alpha, c = row['alpha'], row['c']
    best = max((1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1)) for gamma in range(65))
    assert row['predicted_speedup'] == pytest.approx(best, rel=1e-12)
  gammas = {(row['c'], row['alpha']): row['gamma'] for row in leviathan.figure_3()}
  assert gammas[0.02, 0.8] == 11 and gammas[0.1, 0.6] == 3 and gammas[0.3, 0.5] == 1


def test_newest_rows(tmp_path):
  """A setting that was measured twice stands in the table once, with its newest row."""
  file = str(tmp_path / 'rows.jsonl')
  for gamma, temperature, speedup in ((3, 0.0, 1.1), (4, 0.0, 1.2), (3, 1.0, 1.3), (3, 0.0, 1.4)):
    results.append_row(file, {'task': 't', 'gamma': gamma, 'temperature': temperature, 'speedup': speedup})
  assert [row['speedup'] for row in leviathan.measured(file)] == [1.4, 1.2, 1.3]


def test_command(tmp_path):
  """Published, predicted and measured in columns of their own."""
  row = {'task': 'span corruption', 'drafter': 'model', 'gamma': 3, 'temperature': 0.0, 'batch': 1, 'alpha': 0.5,
         'draft_cost': 0.1, 'verify_cost': 1.1, 'predicted_theorem_3_8': 1.44, 'predicted_speedup': 1.3,
         'speedup': 1.25}
  (tmp_path / 'rows.jsonl').write_text(json.dumps(row) + '\n' + json.dumps(row | {'gamma': 0}) + '\n')
  command = [sys.executable, '-m', 'experiments.leviathan', f'--rows={tmp_path}/rows.jsonl',
             f'--figure={tmp_path}/figure.png', f'--json_out={tmp_path}/out.json']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
  for heading in ('predicted speed-up', 'published speed-up', 'published measurement', 'measured speed-up'):
    assert heading in done.stdout
  written = json.loads((tmp_path / 'out.json').read_text())
  assert [one['gamma'] for one in written['measured']] == [3] and len(written['table_4']) == 12
  assert (tmp_path / 'figure.png').read_bytes()[:4] == b'\x89PNG'


def test_rows_that_are_not_there():
  done = subprocess.run([sys.executable, '-m', 'experiments.leviathan', '--rows=none.jsonl'], cwd=ROOT,
                        capture_output=True, text=True, check=False)
  assert done.returncode == 2 and done.stderr.startswith('error: ') and done.stderr.count('\n') == 1
