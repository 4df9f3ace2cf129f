"""The texts of a training config's `data` section, one document after the other.

Fields: `kind`, `path`, `name`, `split`, `field`, `limit` (documents; 0 for all), `held_out`. Kinds:

    stdlib      Python's standard library without its tests, a document per file: every machine has it
    text        files that match the glob pattern `path`, a document per file
    jsonl       a file of JSON lines, `path`; the text is in `field`
    datasets    `name` (and `path`, its configuration, if it has any) through the package datasets; its `split`, `field`

Of all documents a share `held_out` is never trained on: which ones, a hash of the text decides, so that it is the same
for every model and every run, and copies of one text stay together.
"""

from collections.abc import Callable, Iterator
import glob
import hashlib
import importlib.util
import itertools
import json
from pathlib import Path
import sysconfig
from typing import Any

from ml_collections import ConfigDict

from models.errors import InputError

# Not on every machine, or tables rather than programs.
LEFT_OUT = ('site-packages', 'dist-packages', 'test', 'tests', 'idle_test', 'lib2to3', 'distutils', 'config-',
            'encodings', 'pydoc_data')


def texts(data: ConfigDict, held_out: bool) -> Iterator[str]:
  """The documents to train on, or those that are held out.

  Raises:
    InputError: one line about the field at fault; when the first text is asked for.
  """
  if data.kind not in KINDS:
    raise InputError(f'data.kind={data.kind!r} is unknown: use one of {", ".join(KINDS)}')
  if not 0 <= data.held_out < 1:
    raise InputError(f'data.held_out={data.held_out} must lie in [0, 1)')
  if data.limit < 0:
    raise InputError(f'data.limit={data.limit} must be 0 or more; 0 is all')
  found = False
  for text in itertools.islice(KINDS[data.kind](data), data.limit or None):
    if text.strip() and is_held_out(text, data.held_out) == held_out:
      found = True
      yield text
  if not found:
    which = 'held-out text: raise data.held_out' if held_out else 'text: look at data.path and data.held_out'
    raise InputError(f'data.kind={data.kind!r} gives no {which}')


def is_held_out(text: str, share: float) -> bool:
  """By the text alone, so that more documents move none from one part to the other."""
  digest = hashlib.sha256(text.encode('utf-8', 'surrogatepass')).digest()
  return int.from_bytes(digest[:8], 'big') < share * 2 ** 64


def _stdlib(data: ConfigDict) -> Iterator[str]:
  root = Path(sysconfig.get_path('stdlib'))
  for path in sorted(root.rglob('*.py')):
    if not any(part.startswith(LEFT_OUT) for part in path.relative_to(root).parts):
      yield _read(path)


def _text(data: ConfigDict) -> Iterator[str]:
  paths = sorted(glob.glob(str(Path(data.path).expanduser()), recursive=True))
  if not paths:
    raise InputError(f'no file matches data.path={data.path!r}: give a path or a glob pattern')
  return (_read(Path(path)) for path in paths if Path(path).is_file())


def _read(path: Path) -> str:
  try:
    return path.read_text('utf-8', 'replace')
  except OSError as error:
    raise InputError(f'{path} cannot be read: {error.strerror}') from error


def _jsonl(data: ConfigDict) -> Iterator[str]:
  try:
    with open(Path(data.path).expanduser(), encoding='utf-8') as file:
      for number, line in enumerate(file, start=1):
        if line.strip():
          yield _field(data, line, number)
  except (OSError, UnicodeDecodeError) as error:
    raise InputError(f'data.path={data.path!r} cannot be read: {getattr(error, "strerror", error)}') from error


def _field(data: ConfigDict, line: str, number: int) -> str:
  try:
    text = json.loads(line)[data.field]
  except (ValueError, TypeError, KeyError):
    text = None
  if not isinstance(text, str):
    raise InputError(f'line {number} of {data.path} has no text in the field data.field={data.field!r}')
  return text


def _datasets(data: ConfigDict) -> Iterator[str]:
  if importlib.util.find_spec('datasets') is None:
    raise InputError("data.kind='datasets' needs the package: pip install datasets; data.kind='stdlib' needs nothing")
  import datasets
  try:
    loaded = datasets.load_dataset(data.name, data.path or None, split=data.split, streaming=True)
  except Exception as error:  # of many kinds: no network, no such name, no such split
    raise InputError(f'data.name={data.name!r} cannot be loaded: {str(error).splitlines()[0]}') from error
  for row in loaded:
    if not isinstance(row.get(data.field), str):
      raise InputError(f'{data.name} has no text in the field data.field={data.field!r}: it has {", ".join(row)}')
    yield row[data.field]


KINDS: dict[str, Callable[[Any], Iterator[str]]] = {
    'stdlib': _stdlib, 'text': _text, 'jsonl': _jsonl, 'datasets': _datasets}
