"""Benchmarks every point of a grid over any config fields, and draws the result.

    python -m experiments.sweep --config=configs/sweep_gamma.py --out=sweep.jsonl --plot=sweep.png
    python -m experiments.sweep --config=configs/sweep_gamma.py --config.grid.engine.gamma="(0, 3)"

Rows are appended to --out as they finish; a sweep that is started again does only what is missing (a row is done when
base, overrides and the config they resolve to are the same). Fields of a sweep config:

    base      'FILE:variant' of what to benchmark, or several
    grid      field -> values, nested as in the base config; all combinations are run
    zip       field -> values, equally many each; the first of all, then the second of all, ...
    repeats   timed runs of each batch of prompts
    plain     whether a grid over engine.gamma gets 0 as well: plain decoding through the same engine
"""

from collections.abc import Callable, Collection, Iterator, Sequence
import dataclasses
import importlib.util
import itertools
import os
from typing import Any, TextIO

from absl import flags
from ml_collections import ConfigDict

from experiments import plot
from launch import bench, cli, results
from launch.errors import RunError
from launch.progress import track
from launch.table import Column, lookup, print_table
from models.errors import InputError

GAMMA = 'engine.gamma'
SECTIONS = ('base', 'grid', 'zip', 'repeats', 'plain')
COLUMNS = (
    *bench.columns(
        'drafter', 'gamma', 'ms_per_token', 'tokens_per_second', 'ms_per_round', 'tokens_per_pass', 'alpha',
        'draft_cost', 'verify_cost', 'predicted_speedup', 'speedup'),
    Column('slower_than_plain', 'note', lambda slower: 'slower than plain' if slower else ''))

Benchmark = Callable[[ConfigDict, int], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Point:
  """One benchmark of a sweep: a base, what is changed in it, and the config that this comes to."""

  base: str
  overrides: dict[str, Any]
  config: ConfigDict

  @property
  def identity(self) -> dict[str, Any]:
    """The fields of a row that `results.row_key` goes by."""
    return {'base': self.base, 'overrides': results.plain(self.overrides), 'config_hash': results.digest(self.config)}

  def __str__(self) -> str:
    return ', '.join([self.base, *(f'{name}={value}' for name, value in self.overrides.items())])


def numbered(drafter: str, names: Collection[str]) -> str:
  """A name for one more draft beside `names`: 'lookup', 'lookup 2', ..."""
  same = sum(name.split()[0] == drafter for name in names)
  return f'{drafter} {same + 1}' if same else drafter


def load_config(base: str) -> ConfigDict:
  """The config of 'FILE:variant'."""
  path, _, variant = base.partition(':')
  if not os.path.isfile(path):
    raise InputError(f'base={base!r}: there is no file {path}')
  spec = importlib.util.spec_from_file_location('sweep_base', path)
  if spec is None:
    raise InputError(f'base={base!r}: {path} is not a Python file')
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    return module.get_config(*([variant] if variant else []))
  except Exception as error:  # whatever a config file may raise
    raise InputError(f'base={base!r} cannot be loaded: {error}') from error


def fields_of(section: ConfigDict, prefix: str = '') -> Iterator[tuple[str, tuple]]:
  """Dotted field names and the values to try, from nested sections."""
  for name, value in section.items():
    if isinstance(value, ConfigDict):
      yield from fields_of(value, f'{prefix}{name}.')
    elif isinstance(value, list | tuple) and value:
      yield prefix + name, tuple(value)
    else:
      raise InputError(f'{prefix}{name}={value!r}: a sweep needs a list of values here, such as ({value!r},)')


def all_overrides(config: ConfigDict) -> list[dict[str, Any]]:
  """What each point changes: all combinations of the grid with the steps of the zip."""
  grid, steps = dict(fields_of(config.grid)), dict(fields_of(config.zip))
  if len({len(values) for values in steps.values()}) > 1:
    lengths = ', '.join(f'{name}: {len(values)}' for name, values in steps.items())
    raise InputError(f'all fields of zip need equally many values ({lengths})')
  twice = sorted(set(grid) & set(steps))
  if twice:
    raise InputError(f'{twice[0]} is in grid and in zip: leave one out')
  if config.plain and GAMMA in grid and 0 not in grid[GAMMA]:
    grid[GAMMA] = (0, *grid[GAMMA])
  combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
  zipped = [dict(zip(steps, values, strict=True)) for values in zip(*steps.values(), strict=True)] or [{}]
  return [step | combination for step in zipped for combination in combinations]


def resolve(base: str, overrides: dict[str, Any]) -> ConfigDict:
  """The base config with the overrides in it; a field that it lacks, or a value of another type, is an InputError."""
  config = load_config(base)
  for name, value in overrides.items():
    try:
      config.update_from_flattened_dict({name: value})
    except (KeyError, AttributeError) as error:
      raise InputError(f'{base} has no field {name}') from error
    except TypeError as error:
      raise InputError(f'{name}={value!r} is of another type than in {base}') from error
  return config


def points_of(config: ConfigDict) -> list[Point]:
  """All points, resolved and checked before the first is run."""
  bases = [config.base] if isinstance(config.base, str) else list(config.base)
  return [Point(base, overrides, resolve(base, overrides)) for base in bases for overrides in all_overrides(config)]


def run_sweep(config: ConfigDict, out: str | None = None,
              benchmark: Benchmark = bench.benchmark) -> list[dict[str, Any]]:
  """Runs what is not in `out` yet, and returns the rows of all points, in their order."""
  points = points_of(config)
  done = {results.row_key(row): row for row in results.rows_so_far(out)}
  rows = {}
  missing = [point for point in points if results.row_key(point.identity) not in done]
  if len(missing) < len(points):
    cli.say(f'{len(points) - len(missing)} of {len(points)} rows are in {out} already')
  for point in track(missing, len(missing), 'sweep'):
    row = _row(point, config.repeats, benchmark)
    if out is not None:
      results.append_row(out, row)
    rows[results.row_key(row)] = results.plain(row)
    bench.warn([row] if row['gamma'] else [])
  return [(done | rows)[results.row_key(point.identity)] for point in points]


def _row(point: Point, repeats: int, benchmark: Benchmark) -> dict[str, Any]:
  try:
    row = benchmark(point.config, repeats)
  except (InputError, RunError) as error:
    raise type(error)(f'{point}: {error}') from error
  return {**point.identity, 'task': lookup(point.config.to_dict(), 'data.kind'), **row,
          'slower_than_plain': plot.is_slower(row)}


def show(rows: Sequence[dict[str, Any]], file: TextIO | None = None) -> None:
  """Prints the table; fields that a column shows already need no column of their own."""
  names = dict.fromkeys(name for row in rows for name in row['overrides'] if name != GAMMA)
  varying = [Column(f'overrides.{name}', name.rpartition('.')[2]) for name in names
             if len({str(row['overrides'].get(name)) for row in rows}) > 1]
  print_table(rows, [*varying, *COLUMNS], marked=plot.is_slower, file=file)


def main() -> int:
  cli.refuse_job()
  config = cli.config_of(CONFIG, SECTIONS)
  results.check_rows(OUT.value)
  plot.check(PLOT.value)
  rows = run_sweep(config, OUT.value)
  show(rows, cli.output())
  if PLOT.value:
    plot.draw(rows, PLOT.value)
  cli.write_json({'rows': rows})
  return 0


if __name__ == '__main__':
  CONFIG = cli.define_config('configs/sweep_gamma.py')
  OUT = flags.DEFINE_string('out', None, 'JSON lines: rows are appended, and those that are there are not run again.')
  PLOT = flags.DEFINE_string('plot', None, 'PNG to draw at the end.')
  cli.run(main)
