"""Sample files: JSON lines in HumanEval's own format."""

from collections.abc import Iterable
import dataclasses
import json
import pathlib
from typing import Any

from launch import results
from models.errors import InputError


@dataclasses.dataclass(frozen=True)
class Sample:
  """One completion of one problem: text that is appended to the problem's prompt."""

  task_id: str
  completion: str


def read_samples(path: str) -> list[Sample]:
  """JSON lines with the fields task_id and completion; others are passed over."""
  try:
    lines = pathlib.Path(path).expanduser().read_bytes().split(b'\n')
  except OSError as error:
    raise InputError(f'{path} cannot be read: {error.strerror}') from error
  return [_sample(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _sample(path: str, number: int, line: bytes) -> Sample:
  try:
    row = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise InputError(f'{path}, line {number} is not JSON') from error
  fields = [row.get(name) if isinstance(row, dict) else None for name in ('task_id', 'completion')]
  if not all(isinstance(field, str) for field in fields):
    raise InputError(f"{path}, line {number}: the fields 'task_id' and 'completion' must be texts")
  return Sample(*fields)


def write_lines(path: str, rows: Iterable[dict[str, Any]]) -> None:
  """Rows as JSON lines, in the place of what was there: all of them or none."""
  results.write_text(path, ''.join(json.dumps(row) + '\n' for row in rows))
