"""Rows as an aligned table: some colour on a terminal, plain text elsewhere."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import os
import sys
from typing import Any, TextIO

MISSING = '-'
BOLD, RED, RESET = '\x1b[1m', '\x1b[31m', '\x1b[0m'


@dataclasses.dataclass(frozen=True)
class Column:
  """One column.

  Attributes:
    key: of the rows; a dot reaches into nested dicts.
    title: heading; the key where empty.
    format: a format spec such as '.2f', or a function of the value.
  """

  key: str
  title: str = ''
  format: str | Callable[[Any], str] = ''

  @property
  def heading(self) -> str:
    return self.title or self.key

  def value(self, row: Mapping[str, Any]) -> Any:
    value = lookup(row, self.key)
    return None if isinstance(value, float) and math.isnan(value) else value

  def cell(self, row: Mapping[str, Any]) -> str:
    value = self.value(row)
    if value is None:
      return MISSING
    return self.format(value) if callable(self.format) else format(value, self.format)


def lookup(row: Mapping[str, Any], key: str) -> Any:
  """The value at a dotted key, or None. A key that holds dots itself is found as it is."""
  if key in row:
    return row[key]
  head, _, rest = key.partition('.')
  inner = row.get(head)
  return lookup(inner, rest) if rest and isinstance(inner, Mapping) else None


def lines(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[str]:
  """Heading, rule, and one line per row; numbers are aligned right, columns without any value left out."""
  columns = [column for column in columns if any(column.value(row) is not None for row in rows)]
  if not columns:
    return ['(no rows)']
  cells = [[column.cell(row) for column in columns] for row in rows]
  widths = [max(len(column.heading), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]
  right = [all(_is_number(column.value(row)) for row in rows) for column in columns]

  def align(texts: Sequence[str]) -> str:
    padded = [text.rjust(width) if to_right else text.ljust(width)
              for text, width, to_right in zip(texts, widths, right, strict=True)]
    return '  '.join(padded).rstrip()

  heading = align([column.heading for column in columns])
  return [heading, '  '.join('-' * width for width in widths), *map(align, cells)]


def _is_number(value: Any) -> bool:
  return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], title: str = '',
                marked: Callable[[Mapping[str, Any]], bool] = lambda row: False, file: TextIO | None = None) -> None:
  """Prints `rows`.

  Args:
    rows: any mappings.
    columns: what to show; missing values and NaN print as '-'.
    title: a line above.
    marked: rows to print in red on a terminal (say so in a column as well: elsewhere there is no red).
    file: standard output when None.
  """
  file = file or sys.stdout
  heading, *body = lines(rows, columns)
  if is_terminal(file):
    heading = f'{BOLD}{heading}{RESET}'
    body[1:] = [f'{RED}{line}{RESET}' if marked(row) else line for row, line in zip(rows, body[1:], strict=False)]
  print(*([title] if title else []), heading, *body, sep='\n', file=file, flush=True)


def is_terminal(file: TextIO) -> bool:
  """Whether colour and redrawn lines are welcome (https://no-color.org)."""
  return file.isatty() and 'NO_COLOR' not in os.environ and os.environ.get('TERM') != 'dumb'
