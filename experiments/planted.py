"""How many tests fail when a known mistake is planted.

    python -m experiments.planted --rows=experiments/results/planted.jsonl

Each mistake of `experiments.mutations` and `experiments.tree_mutations` in turn takes the place of the right part
(`experiments.planting`), and `TESTS` run on it: a minute or two each, an hour and a half in all. Exit status 1 if one
goes unnoticed, or if a test fails with nothing planted.
"""

from collections.abc import Sequence
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any
from xml.etree import ElementTree

from absl import flags

from experiments import planting
from launch import cli, results
from launch.errors import RunError
from launch.progress import track
from launch.table import Column, print_table

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXACT = 'tests/test_enumeration.py::test_token_rule_is_exact'
EXACT_TREE = 'tests/test_tree_enumeration.py::test_multiround_is_exact'
TESTS = (  # quick ones that see the rules and the warp alone, by enumeration, and in the loop
    f'{EXACT}[sampled draft, 3 tokens, gamma 3]',
    f'{EXACT}[copied draft]',
    f'{EXACT}[drafts of 0 to gamma tokens]',
    f'{EXACT}[target that forbids tokens]',
    f'{EXACT}[filtered: temperature .5]',
    'tests/test_enumeration.py::test_coupled_text_is_the_plain_text_under_every_noise',
    'tests/test_warp.py::test_fault_25_acceptance_at_the_edges',
    'tests/test_warp.py::test_order_is_temperature_then_top_k_then_top_p',
    'tests/test_coupled.py::test_match_by_hand',
    'tests/test_coupled.py::test_text_is_that_of_plain_decoding[model, gamma 4-sampled]',
    'tests/test_chi_square.py::test_joint_law_of_tokens[model]',
    'tests/test_chi_square.py::test_joint_law_of_tokens[lookup]',
    'tests/test_chi_square.py::test_joint_law_under_filters[model]',
    'tests/test_block.py::test_block_rule_is_exact[sampled draft, 3 tokens, gamma 2]',
    'tests/test_block.py::test_block_rule_is_exact[drafts of 0 to gamma tokens]',
    f'{EXACT_TREE}[without replacement, 4 tokens, nodes per level 3 1]',
    f'{EXACT_TREE}[likeliest children]',
    f'{EXACT_TREE}[likeliest children, tested one by one]',
    f'{EXACT_TREE}[one drawn child, then a copy]',
    'tests/test_tree_loop.py::test_joint_law_of_tokens[tree, without]',
    'tests/test_tree_loop.py::test_joint_law_of_tokens[tree, top]')
COLUMNS = [Column('planted'), Column('failed', 'tests that fail'), Column('tests', 'of'), Column('verdict'),
           Column('seconds', format='.0f')]
NOTHING = ''


def counts(mutation: str, tests: Sequence[str] = TESTS) -> dict[str, int]:
  """How many of the tests fail with a mutation planted, and how many there are.

  Raises:
    RunError: pytest did not get so far as to count them.
  """
  with tempfile.TemporaryDirectory() as folder:
    report = pathlib.Path(folder) / 'report.xml'
    command = [sys.executable, '-m', 'pytest', '-m', '', '-p', 'experiments.planting', '-p', 'no:cacheprovider',
               '--tb=no', f'--junitxml={report}', *tests]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {planting.VARIABLE: mutation}, capture_output=True,
                          text=True, check=False)
    if not report.exists():
      raise RunError(f'pytest ended with status {done.returncode}: {(done.stderr or done.stdout).strip()[-200:]}')
    suite = ElementTree.parse(report).getroot().find('testsuite')
  return {'failed': int(suite.get('failures')) + int(suite.get('errors')), 'tests': int(suite.get('tests'))}


def row_of(mutation: str) -> dict[str, Any]:
  start = time.perf_counter()
  row = {'planted': mutation or 'nothing', **counts(mutation), 'seconds': time.perf_counter() - start}
  if mutation:
    return row | {'verdict': 'ok' if row['failed'] else 'UNNOTICED'}
  return row | {'verdict': 'FAILED' if row['failed'] else 'ok'}


def main() -> int:
  results.check_rows(ROWS.value)
  mutations, rows = [NOTHING, *planting.plants()], []
  for mutation in track(mutations, len(mutations), 'planted'):
    rows.append(row_of(mutation))
    results.append_row(ROWS.value, rows[-1] | {'test_files': TESTS} | results.environment())
  print_table(rows, COLUMNS, file=cli.output(), marked=lambda row: row['verdict'] != 'ok')
  cli.write_json(rows)
  return 0 if all(row['verdict'] == 'ok' for row in rows) else 1


if __name__ == '__main__':
  ROWS = flags.DEFINE_string('rows', 'results/planted.jsonl', 'Rows are appended here.')
  cli.run(main)
