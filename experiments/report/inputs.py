"""Reads what the report shows: rows of any runs, verdicts of `experiments.exactness`, traces of `experiments.trace`."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from launch import results
from models.errors import InputError

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
  """The rows of one file, or of one list in it.

  Attributes:
    name: of the file without its ending, and of the list where it has several.
    rows: JSON objects.
  """

  name: str
  rows: list[dict[str, Any]]


def runs_of(path: str) -> list[Run]:
  """The rows of a file of JSON lines; of a .json file each list of objects, and what stands beside them as a row.

  Raises:
    InputError: if it cannot be read, or holds no rows.
  """
  name = pathlib.Path(path).stem.replace('_', ' ')
  content = _read(path) if path.endswith('.json') else results.read_rows(path)
  if _is_rows(content):
    content = {'': content}
  lists = {key: value for key, value in content.items() if _is_rows(value)} if isinstance(content, dict) else {}
  beside = {key: value for key, value in content.items() if key not in lists} if isinstance(content, dict) else {}
  found = {key: [flat(unrolled) for row in rows for unrolled in _unrolled(row)] for key, rows in lists.items() if rows}
  if beside:
    found = {'': [beside], **found} if '' not in found else found
  if not found:
    raise InputError(f'{path} has no rows to show: name a file of JSON lines, or the JSON of a command')
  return [Run(f'{name}: {key}' if key else name, rows) for key, rows in found.items()]


def _unrolled(row: dict[str, Any]) -> list[dict[str, Any]]:
  """A plan tells about several workloads: one row for each."""
  workloads = row.get('workloads')
  if not (_is_rows(workloads) and workloads):
    return [row]
  rest = {key: value for key, value in row.items() if key != 'workloads'}
  return [rest | workload for workload in workloads]


def flat(row: dict[str, Any]) -> dict[str, Any]:
  """The row with its overrides as fields, by their dotted names; those that the row says itself are left out."""
  overrides = row.get('overrides')
  if not isinstance(overrides, dict):
    return row
  rest = {key: value for key, value in row.items() if key != 'overrides'}
  return rest | {name: value for name, value in overrides.items() if name.rpartition('.')[2] not in rest}


def verdicts_of(path: str) -> list[dict[str, Any]]:
  """The verdicts of `experiments.exactness --json_out`.

  Raises:
    InputError: if it is no such file.
  """
  return _checked(path, 'verdicts of experiments.exactness', lambda row: {
      'rung': str, 'check': str, 'measured': str, 'limit': str, 'passed': bool, 'note': str}.items()
      <= {key: type(value) for key, value in row.items()}.items())


def traces_of(path: str) -> list[dict[str, Any]]:
  """The traces of `experiments.trace --json_out`.

  Raises:
    InputError: if it is no such file.
  """
  return _checked(path, 'traces of experiments.trace', lambda trace: _is_rows(trace.get('steps')) and all(
      isinstance(step.get('drafted'), int) and _are_tokens(step.get('tokens'), ('origin',))
      and _are_tokens(step.get('refused')) and _are_tokens(step.get('unused')) for step in trace['steps']))


def _are_tokens(tokens: Any, names: Sequence[str] = ()) -> bool:
  return _is_rows(tokens) and all(isinstance(token.get(name), str) for token in tokens for name in ('text', *names))


def _checked(path: str, what: str, is_one: Callable[[dict], bool]) -> list[dict[str, Any]]:
  content = _read(path)
  if not (_is_rows(content) and content and all(map(is_one, content))):
    raise InputError(f'{path} holds no {what}: name a file that --json_out of that command wrote')
  return content


def _is_rows(value: Any) -> bool:
  return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _read(path: str) -> Any:
  try:
    return json.loads(pathlib.Path(path).read_bytes())
  except OSError as error:
    raise InputError(f'cannot read {path}: {error.strerror}; name the JSON of a command') from error
  except (ValueError, RecursionError) as error:
    raise InputError(f'{path} is not JSON: name the JSON of a command') from error
