"""Results as JSON lines: one row, one line. A killed run loses at most the row it was writing."""

import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any, BinaryIO

import jax
import ml_collections
import numpy as np

from models.errors import InputError

STDOUT = '-'
KEY_FIELDS = ('base', 'overrides', 'config_hash')


def plain(value: Any) -> Any:
  """`value` as JSON types: arrays become lists, scalars numbers, NaN and infinities None."""
  if value is None or isinstance(value, bool | int | str):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if isinstance(value, np.generic | np.ndarray | jax.Array):
    return plain(_to_python(np.asarray(value)))
  if isinstance(value, ml_collections.ConfigDict):
    return plain(value.to_dict())
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
  if isinstance(value, dict):
    return {str(key): plain(entry) for key, entry in value.items()}
  if isinstance(value, list | tuple | set | frozenset):
    return [plain(entry) for entry in value]
  if isinstance(value, pathlib.PurePath):
    return str(value)
  raise TypeError(f'a {type(value).__name__} cannot be written as JSON')


def _to_python(array: np.ndarray) -> Any:
  # bfloat16 and the float8 types are no numpy floats: their tolist() would not give Python numbers.
  return (array if array.dtype.kind in 'biufU' else array.astype(np.float64)).tolist()


def dumps(value: Any, indent: int | None = None) -> str:
  """Strict JSON of `plain(value)`."""
  return json.dumps(plain(value), indent=indent, allow_nan=False)


def _write_error(path: str, error: OSError) -> InputError:
  reason = 'its directory is a file' if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
  return InputError(f'cannot write {path}: {reason}; name another file')


def check_writable(path: str | None) -> None:
  """Raises InputError unless `path` can be written; call it before the work whose result goes there.

  None (nothing to write) and '-' (standard output) pass. The directory is made if it is missing; the file is neither
  changed nor left behind.
  """
  if path in (None, STDOUT):
    return
  existed = os.path.lexists(path)
  try:
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    open(path, 'ab').close()
  except OSError as error:
    raise _write_error(path, error) from error
  if not existed:
    os.remove(path)


def check_rows(path: str | None) -> None:
  """As `check_writable`, for a file that rows are appended to.

  Raises:
    InputError: also for standard output, where rows and text for a person would mix.
  """
  if path == STDOUT:
    raise InputError('rows are appended to a file, not to -: name one, or pass --json_out=- to get them all at the end')
  check_writable(path)


def _is_row(line: bytes) -> bool:
  try:
    return isinstance(json.loads(line), dict)
  except (ValueError, RecursionError):  # broken JSON, a character torn in two, or brackets without end
    return False


def _whole_bytes(content: bytes) -> int:
  """Length of `content` without a torn last line."""
  last = content.rfind(b'\n') + 1
  # No proper beginning of a row is a row itself, so a last line that parses lacks nothing but its line break.
  return len(content) if _is_row(content[last:]) else last


def append_row(path: str, row: dict[str, Any]) -> None:
  """Appends `row` as one line, after repairing a line that an earlier, killed run left torn."""
  line = dumps(row).encode() + b'\n'
  try:
    if _is_device(path):
      pathlib.Path(path).write_bytes(line)
      return
    with open(path, 'ab+') as file:
      _repair(file)
      file.write(line)
      file.flush()
      os.fsync(file.fileno())
  except OSError as error:
    raise _write_error(path, error) from error


def _is_device(path: str) -> bool:
  """A pipe or a device: written to, but neither repaired nor replaced."""
  return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _repair(file: BinaryIO) -> None:
  file.seek(0)
  content = file.read()
  if content and not content.endswith(b'\n'):
    file.truncate(_whole_bytes(content))
    if _whole_bytes(content) == len(content):
      file.write(b'\n')


def read_rows(path: str) -> list[dict[str, Any]]:
  """The rows of a file; a torn last line is passed over, anything else that is no row is an InputError."""
  try:
    content = pathlib.Path(path).read_bytes()
  except OSError as error:
    raise InputError(f'cannot read {path}: {error.strerror}; name a file of JSON lines') from error
  rows = []
  for number, line in enumerate(content[:_whole_bytes(content)].splitlines(), start=1):
    if not line.strip():
      continue
    if not _is_row(line):
      raise InputError(f'line {number} of {path} is not a JSON object: remove it')
    rows.append(json.loads(line))
  return rows


def rows_so_far(path: str | None) -> list[dict[str, Any]]:
  """The rows of a file that rows are appended to: none where it does not exist yet."""
  return read_rows(path) if path is not None and os.path.isfile(path) else []


def row_key(row: dict[str, Any]) -> str:
  """What makes a row the same work: its base config, the overrides, and the hash of the config they resolve to."""
  return digest({name: row.get(name) for name in KEY_FIELDS})


def digest(value: Any) -> str:
  """A short hash of `value` that does not depend on the order of keys."""
  text = json.dumps(plain(value), sort_keys=True, allow_nan=False)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_json(path: str, payload: Any) -> None:
  """Writes `payload` as `write_text` does."""
  write_text(path, dumps(payload, indent=2) + '\n')


def write_text(path: str, text: str) -> None:
  """Writes `text` whole or not at all; '-' is standard output."""
  if path == STDOUT:
    sys.stdout.write(text)
    sys.stdout.flush()
    return
  try:
    if _is_device(path):
      pathlib.Path(path).write_text(text)
    else:
      _replace(os.path.realpath(path), text)
  except OSError as error:
    raise _write_error(path, error) from error


def _replace(path: str, text: str) -> None:
  temporary = f'{path}.{os.getpid()}.tmp'
  try:
    with open(temporary, 'w') as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    pathlib.Path(temporary).unlink(missing_ok=True)


def cpu_model() -> str:
  """The processor's name."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    lines = []
  names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
  return names[0] if names else platform.processor() or platform.machine()


@functools.cache
def commit() -> str | None:
  """The commit this code was checked out at, with '+' when the tree differs from it; None outside a checkout."""
  root = pathlib.Path(__file__).resolve().parent.parent
  if not (root / '.git').exists():
    return None
  try:
    head = _git(root, 'rev-parse', '--short=12', 'HEAD')
    return head + ('+' if _git(root, 'status', '--porcelain', '--untracked-files=no') else '')
  except (OSError, subprocess.CalledProcessError):
    return None


def _git(root: pathlib.Path, *arguments: str) -> str:
  return subprocess.run(['git', '-C', root, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def environment() -> dict[str, Any]:
  """The facts about machine and software that a row needs to be read later."""
  return {
      'jax_version': jax.__version__,
      'backend': jax.default_backend(),
      'device_kind': jax.devices()[0].device_kind,
      'num_devices': jax.device_count(),
      'cpu_model': cpu_model(),
      'cpu_cores': os.cpu_count(),
      'commit': commit(),
  }
