"""Rows as tables whose columns are grouped by where their figures come from (`provenance`)."""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import json
from typing import Any

from experiments.plot import is_slower
from experiments.report.cells import Cell, cell, visible
from experiments.report.provenance import LONG, SETTINGS, UNSHOWN, WHERE, Group, group_of
from launch.bench import COLUMNS

Row = Mapping[str, Any]
# What a reader compares first, in this order; the rest is in the table of all fields.
MAIN = ('speedup', 'own_speedup', 'ours_over_it', 'ms_per_token', 'ms_per_token_p90', 'tokens_per_second',
        'tokens_per_pass', 'alpha', 'draft_cost', 'verify_cost', 'step_cost', 'predicted_speedup',
        'predicted_ms_per_token', 'predicted_ms_plain', 'published_speedup', 'published_ms_per_token',
        'published_ms_plain')
FEW = 14  # columns that need no second table
SLOWER = 'slower than plain'
TITLES = {'gamma': 'γ', 'alpha': 'α', 'temperature': 'T', 'top_p': 'top-p', 'top_k': 'top-k', 'speedup': 'speed-up',
          'ms_per_token': 'ms/token', 'ms_per_token_p10': 'ms/token, 10 %', 'ms_per_token_p90': 'ms/token, 90 %',
          'ms_plain': 'ms/token, plain', 'tokens_per_second': 'tokens/s', 'tokens_per_pass': 'tokens/pass',
          'draft_cost': 'c', 'verify_cost': 'v', 'step_cost': 'step / parts', 'theorem_3_8': 'theorem 3.8',
          'own_speedup': 'speed-up over its own plain', 'ours_over_it': 'its time / ours'}


@dataclasses.dataclass(frozen=True)
class Column:
  """A field of those rows in which it is of one group."""

  key: str
  title: str
  group: Group

  def of(self, row: Row) -> Any:
    return row.get(self.key) if group_of(self.key, row) is self.group else None


@dataclasses.dataclass(frozen=True)
class Table:
  """What the page shows of some rows.

  Attributes:
    columns: grouped, settings first.
    lines: the cells of each row, and whether it is slower than plain decoding.
    shared: what all rows have in common, as (title, text).
  """

  columns: list[Column]
  lines: list[tuple[list[Cell], bool]]
  shared: list[tuple[str, str]]

  @property
  def heads(self) -> list[tuple[str, str, int]]:
    """Each group: its name, its words, and how many columns it spans."""
    return [(group.name.lower(), group.value, len(list(columns)))
            for group, columns in itertools.groupby(self.columns, key=lambda column: column.group)]


def main_table(rows: Sequence[Row]) -> Table:
  """The settings that vary and what a reader compares first; all fields where there are few or no such figures."""
  table = full_table(rows)
  keys = [column.key for column in table.columns if column.key in MAIN]
  if not keys or len(table.columns) <= FEW:
    return table
  settings = lambda column: column.group is Group.SETTING and column.key not in LONG
  return _table(rows, [column for column in _columns(rows) if settings(column) or column.key in MAIN])


def full_table(rows: Sequence[Row]) -> Table:
  return _table(rows, _columns(rows))


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
  constant = [column for column in columns if len(rows) > 1 and column.group is Group.SETTING
              and len({_same(column.of(row)) for row in rows}) == 1]
  varying = [column for column in columns if column not in constant]
  lines = [([cell(column.of(row), column.key) for column in varying], slower(row)) for row in rows]
  shared = [(column.title, cell(column.of(rows[0]), column.key).text) for column in constant]
  return Table(varying, lines, shared)


def _columns(rows: Sequence[Row]) -> list[Column]:
  """Of all fields that any row has a value for, but where it ran."""
  found = dict.fromkeys((key, group_of(key, row)) for row in rows for key, value in row.items()
                        if value not in (None, '', [], {}) and key not in WHERE | UNSHOWN)
  first = lambda column: column.key in MAIN and column.group is not Group.SETTING
  rank = lambda column: MAIN.index(column.key) if first(column) else len(MAIN)
  columns = [Column(key, title_of(key), group) for key, group in found]
  order = list(Group)
  return sorted(columns, key=lambda column: (order.index(column.group), rank(column)))


def slower(row: Row) -> bool:
  """Whether speculation lost time."""
  return bool(cell(row.get('speedup')).number) and bool(row.get('gamma')) and is_slower(row)


def title_of(key: str) -> str:
  """Without the word that the head of the group says."""
  head, _, rest = key.partition('_')
  bare = rest if rest and head in ('predicted', 'published', 'measured') else key
  known = TITLES.get(bare) or (COLUMNS[bare].heading if bare in COLUMNS else '')
  return known or visible(bare.rpartition('.')[2].replace('_', ' '))


def labels(rows: Sequence[Row], without: Sequence[str] = ()) -> list[str]:
  """Each row by the settings that tell it apart from the others: γ, and what those before it do not tell already."""
  keys = dict.fromkeys(key for row in rows for key in row)
  told: list[tuple[str, ...]] = [() for _ in rows]
  chosen = []
  for key in keys:
    if (key in SETTINGS - UNSHOWN - LONG or '.' in key) and key not in without:
      finer = [(*before, _same(row.get(key))) for before, row in zip(told, rows, strict=True)]
      if len(set(finer)) > len(set(told)) or (key == 'gamma' and len({_same(row.get(key)) for row in rows}) > 1):
        told = finer
        chosen.append(key)
  return [', '.join(_named(key, row[key]) for key in chosen if row.get(key) not in (None, '', [], {})) for row in rows]


def _named(key: str, value: Any) -> str:
  text = cell(value, key).text
  return text.removeprefix('configs/').replace('.py:', ':') if isinstance(value, str) else f'{title_of(key)} {text}'


def _same(value: Any) -> str:
  return json.dumps(value, sort_keys=True)
