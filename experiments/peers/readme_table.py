"""Writes the table of the peers into the README, from rows that `experiments.peers.timing` appended.

    python -m experiments.peers.readme_table --rows=experiments/results/peers_cpu.jsonl

What stands between the lines `<!-- peers -->` and `<!-- /peers -->` is replaced. Of a task those rows count that were
timed as the newest row of specdec was: by the same commit, on the same processor and as many prompts. Of a setting that
was timed more than once it is the newest, and of each drafter the best setting.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

from absl import flags

from launch import cli, results
from models.errors import InputError

BEGIN, END = '<!-- peers -->', '<!-- /peers -->'
KINDS = {'none': 'plain', 'lookup': 'best lookup', 'draft': 'best with the same draft model'}
RUN = ('commit', 'cpu_model', 'prompts')  # rows that differ in these are not compared
SOFTWARE = ('specdec', 'transformers', 'llama.cpp')


def table(rows: Sequence[dict[str, Any]]) -> str:
  """Markdown: ms per new token of each task and drafter, where specdec has both.

  Raises:
    InputError: no row of specdec.
  """
  rows = one_run(rows)
  newest = {tuple(row.get(name) for name in ('task', 'software', 'drafter', 'setting')): row for row in rows}
  best: dict[tuple[str, str, str], float] = {}
  for (task, software, drafter, _), row in newest.items():
    key = task, drafter, software
    best[key] = min(row['ms_per_token'], best.get(key, float('inf')))
  lines = []
  for task in dict.fromkeys(row['task'] for row in rows):
    for drafter, kind in KINDS.items():
      if (task, drafter, 'specdec') in best:
        cells = [best.get((task, drafter, software)) for software in SOFTWARE]
        shown = ' | '.join('-' if cell is None else f'{cell:.1f}' for cell in cells)
        lines.append(f'| {task} | {kind} | {shown} |')
  if not lines:
    raise InputError('no rows of specdec: make them with experiments.peers.timing --out')
  return '\n'.join([f'| task | | {" | ".join(SOFTWARE)} |', '|---' * (2 + len(SOFTWARE)) + '|', *lines])


def one_run(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Of each task the rows that were timed together with the newest of specdec; tasks without one have none."""
  run_of = lambda row: tuple(row.get(name) for name in RUN)
  newest = {row['task']: run_of(row) for row in rows if row['software'] == 'specdec'}
  return [row for row in rows if newest.get(row['task']) == run_of(row)]


def replaced(text: str, made: str) -> str:
  """The text with the table in its place.

  Raises:
    InputError: a text without one such place.
  """
  if (text.count(BEGIN), text.count(END)) != (1, 1) or text.index(BEGIN) > text.index(END):
    raise InputError(f'the README needs the lines {BEGIN} and {END}, once each, around the table')
  before, _, rest = text.partition(BEGIN)
  return f'{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}'


def main() -> None:
  path = pathlib.Path(README.value)
  try:
    text = path.read_text(encoding='utf-8')
  except OSError as error:
    raise InputError(f'--readme={path} cannot be read: {error.strerror}') from error
  made = table(results.read_rows(ROWS.value))
  results.write_text(str(path), replaced(text, made))
  cli.say(made)


if __name__ == '__main__':
  ROWS = flags.DEFINE_string('rows', 'experiments/results/peers_cpu.jsonl', 'Rows of experiments.peers.timing.')
  README = flags.DEFINE_string('readme', 'README.md', 'The file to write the table into.')
  cli.run(main, alone=True)
