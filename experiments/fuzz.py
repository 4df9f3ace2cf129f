"""Puts changed files, configs and prompts to the programs, for a given time: each must be answered rightly or refused.

    python -m experiments.fuzz --minutes=10
    python -m experiments.fuzz --minutes=1 --targets=gguf,safetensors --seed=7 --json_out=fuzz.json

A fault is an exception other than `InputError`, an input that takes longer than 20 s of processor time, or an answer
that does not hold (`experiments/fuzz_checks.py`). It is printed with the smallest input that shows it, and the status
is 1. The tests put the same kinds of inputs to the same checks, fewer of them. Of --json_out:

    target, inputs, seconds    how many inputs were tried, and for how long
    faults                     of that target: the exception and the smallest input
"""

from collections.abc import Iterator
import time
from typing import Any

from absl import flags

from launch import cli
from launch.table import Column, print_table
from models.errors import InputError

ROUND = 100  # inputs between two looks at the clock
LONGEST = 400  # characters of an input that are printed
COLUMNS = (Column('target'), Column('inputs'), Column('seconds', format='.0f'),
           Column('faults', format=lambda faults: str(len(faults))))


def rounds(name: str, seconds: float, seed: int) -> Iterator[tuple[int, str | None]]:
  """How many inputs a round tried, and the fault that it found; until the time is over, or a fault was found."""
  from hypothesis import HealthCheck, Phase, given, settings
  from hypothesis import seed as seeded

  from experiments import fuzz_checks

  end, tried = time.monotonic() + seconds, 0

  def attempt(value: Any) -> None:
    nonlocal tried
    tried += 1
    fuzz_checks.check(name, value)

  chosen = settings(
      max_examples=ROUND, database=None, deadline=None, suppress_health_check=list(HealthCheck),
      phases=[Phase.generate, Phase.shrink], print_blob=False, report_multiple_bugs=False)
  while time.monotonic() < end:
    tried = 0
    try:
      seeded(seed)(chosen(given(fuzz_checks.TARGETS[name].inputs)(attempt)))()
    except Exception as error:
      yield tried, _described(error)
      return
    yield tried, None
    seed += 1


def _described(error: BaseException) -> str:
  """The exception and what hypothesis says of its input."""
  notes = ' '.join(getattr(error, '__notes__', []))
  return ' '.join(f'{type(error).__name__}: {error} {notes}'.split())[:LONGEST]


def fuzz(name: str, seconds: float, seed: int) -> dict[str, Any]:
  """The row of one target."""
  begun, inputs, faults = time.monotonic(), 0, []
  for tried, fault in rounds(name, seconds, seed):
    inputs += tried
    faults += [fault] if fault else []
  return {'target': name, 'inputs': inputs, 'seconds': time.monotonic() - begun, 'faults': faults}


def main() -> int:
  try:
    from experiments.fuzz_checks import TARGETS
  except ImportError as error:
    raise InputError(f'fuzzing needs the package {error.name}: pip install hypothesis safetensors') from error
  names = NAMES.value or list(TARGETS)
  for name in names:
    if name not in TARGETS:
      raise InputError(f'--targets={name} is unknown: use some of {",".join(TARGETS)}')
  rows = []
  for name in names:
    rows.append(fuzz(name, 60 * MINUTES.value / len(names), SEED.value))
    for fault in rows[-1]['faults']:
      cli.say(f'{name}: {fault}')
  print_table(rows, COLUMNS, file=cli.output())
  cli.write_json(rows)
  return 1 if any(row['faults'] for row in rows) else 0


if __name__ == '__main__':
  MINUTES = flags.DEFINE_float('minutes', 1.0, 'For how long, all targets together.', lower_bound=0.0)
  NAMES = flags.DEFINE_list('targets', [], 'Which; all by default.')
  SEED = flags.DEFINE_integer('seed', 0, 'Of the inputs.')
  cli.run(main)
