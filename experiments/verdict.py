"""What a check of exactness found."""

from collections.abc import Sequence
import dataclasses
from typing import TextIO

from launch.table import Column, print_table


@dataclasses.dataclass(frozen=True)
class Verdict:
  """One line of the report.

  Attributes:
    check: what was looked at.
    measured: what the value is.
    value: the figure.
    limit: what it must keep to.
    passed: whether it does.
    note: anything else worth knowing.
  """

  check: str
  measured: str
  value: float
  limit: str
  passed: bool
  note: str = ''

  @property
  def row(self) -> dict:
    return dataclasses.asdict(self) | {'verdict': 'ok' if self.passed else 'FAILED'}


def at_most(check: str, measured: str, value: float, limit: float, note: str = '') -> Verdict:
  return Verdict(check, measured, value, f'<= {limit:g}', bool(value <= limit), note)


def at_least(check: str, measured: str, value: float, limit: float, note: str = '') -> Verdict:
  return Verdict(check, measured, value, f'>= {limit:g}', bool(value >= limit), note)


COLUMNS = [Column('check'), Column('measured'), Column('value', format='.3g'), Column('limit'), Column('verdict'),
           Column('note')]


def print_verdicts(title: str, verdicts: Sequence[Verdict], file: TextIO | None = None) -> None:
  """Prints one rung of the ladder; failures in red on a terminal."""
  print_table([verdict.row for verdict in verdicts], COLUMNS, title=title, file=file,
              marked=lambda row: not row['passed'])
