"""Directories of safetensors files, read lazily, one tensor at a time.

All headers and the index are checked against each other and against the file sizes before anything is built: a
file that is too short would otherwise read as zeros or as its neighbour.
"""

import dataclasses
import json
import math
import os
from pathlib import Path

import ml_dtypes
import numpy as np

from models.errors import InputError

ITEM_BYTES = {
    'BOOL': 1, 'U8': 1, 'I8': 1, 'F8_E5M2': 1, 'F8_E4M3': 1, 'F8_E8M0': 1, 'I16': 2, 'U16': 2, 'F16': 2, 'BF16': 2,
    'I32': 4, 'U32': 4, 'F32': 4, 'F64': 8, 'I64': 8, 'U64': 8, 'C64': 8}
FLOATS = {'F64': np.float64, 'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16}
OTHERS = {'I64': np.int64, 'I32': np.int32, 'BOOL': np.bool_}
NAMES = {np.dtype(kind).name: name for name, kind in (FLOATS | OTHERS).items()}
MAX_HEADER = 100_000_000


@dataclasses.dataclass(frozen=True)
class TensorEntry:
  """Where a tensor lies."""

  file: Path
  dtype: str
  shape: tuple[int, ...]
  start: int
  end: int


def read_json(path: Path) -> dict:
  """A JSON file that holds one object.

  Raises:
    InputError: if it does not.
  """
  try:
    return parse_object(path.read_bytes(), str(path))
  except OSError as error:
    raise InputError(f'{path} cannot be read: {error.strerror}') from None


def parse_object(raw: bytes, what: str) -> dict:
  """A JSON object in which no key comes twice."""

  def unique(pairs):
    fields = dict(pairs)
    if len(fields) < len(pairs):
      seen = set()
      twice = next(key for key, _ in pairs if key in seen or seen.add(key))
      raise InputError(f'{what} has {twice!r} twice')
    return fields

  try:
    fields = json.loads(raw.decode('utf-8'), object_pairs_hook=unique)
  except InputError:
    raise
  except (ValueError, RecursionError):
    raise InputError(f'{what} is not valid JSON') from None
  if not isinstance(fields, dict):
    raise InputError(f'{what} is not a JSON object')
  return fields


def read_header(path: Path) -> dict[str, TensorEntry]:
  """The tensor table of one file, with absolute offsets.

  Raises:
    InputError: if the file does not hold exactly what its header says.
  """
  try:
    with open(path, 'rb') as file:
      size = os.fstat(file.fileno()).st_size
      length = int.from_bytes(file.read(8), 'little')
      if size < 8 or length > min(size - 8, MAX_HEADER):
        raise InputError(f'{path} is not a whole safetensors file: header of {length} bytes in a file of {size}')
      raw = file.read(length)
  except OSError as error:
    raise InputError(f'{path} cannot be read: {error.strerror}') from None
  fields = parse_object(raw, f'the header of {path}')
  fields.pop('__metadata__', None)
  entries = {name: _entry(path, name, field, 8 + length) for name, field in fields.items()}
  _check_coverage(path, entries, 8 + length, size)
  return entries


def _entry(path: Path, name: str, field: object, data_start: int) -> TensorEntry:
  def whole(numbers, count=None):
    return isinstance(numbers, list) and len(numbers) == (len(numbers) if count is None else count) and all(
        type(number) is int and number >= 0 for number in numbers)

  field = field if isinstance(field, dict) else {}
  dtype, shape, offsets = field.get('dtype'), field.get('shape'), field.get('data_offsets')
  if not isinstance(dtype, str) or not whole(shape) or not whole(offsets, 2):
    raise InputError(f'{path}: the header entry of tensor {name!r} is malformed')
  if dtype not in ITEM_BYTES:
    raise InputError(f'{path}: tensor {name!r} has the unknown dtype {dtype!r}')
  start, end = offsets
  if end - start != math.prod(shape) * ITEM_BYTES[dtype]:
    raise InputError(f'{path}: tensor {name!r} has {end - start} bytes, which does not fit {dtype} {shape}')
  return TensorEntry(path, dtype, tuple(shape), data_start + start, data_start + end)


def _check_coverage(path: Path, entries: dict[str, TensorEntry], start: int, size: int):
  """Tensors must follow each other without overlap or hole, up to the end of the file."""
  end = start
  for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
    if entry.end > size:
      raise InputError(f'{path} is truncated: tensor {name!r} ends at byte {entry.end}, the file at {size}')
    if entry.start != end:
      raise InputError(f'{path}: tensor {name!r} begins at byte {entry.start} instead of {end}')
    end = entry.end
  if end != size:
    raise InputError(f'{path} has {size - end} bytes after its last tensor')


def _read_shards(directory: Path, index: Path) -> dict[str, TensorEntry]:
  weight_map = read_json(index).get('weight_map')
  if not isinstance(weight_map, dict) or not all(
      isinstance(file, str) and Path(file).name == file for file in weight_map.values()):
    raise InputError(f"{index} has no 'weight_map' of tensor names to file names")
  entries = {}
  for file in sorted(set(weight_map.values())):
    if not (directory / file).is_file():
      first = next(name for name, its_file in weight_map.items() if its_file == file)
      raise InputError(f'{directory / file} is missing: {index.name} says that it holds tensor {first!r}')
    for name, entry in read_header(directory / file).items():
      if name in entries:
        raise InputError(f'tensor {name!r} is in two files, {entries[name].file} and {entry.file}')
      entries[name] = entry
  for name, file in weight_map.items():
    if name not in entries or entries[name].file.name != file:
      raise InputError(f'{directory / file} does not hold tensor {name!r}, though {index.name} says so')
  return entries


class SafetensorsDirectory:
  """The weights of a Hugging Face directory, or of one file.

  Attributes:
    path: of the directory or file.
    shapes: tensor name -> shape.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = Path(path)
    single, index = self.path / 'model.safetensors', self.path / 'model.safetensors.index.json'
    if self.path.is_file() or single.is_file():
      self._entries = read_header(self.path if self.path.is_file() else single)
    elif index.is_file():
      self._entries = _read_shards(self.path, index)
    else:
      raise InputError(f'{self.path} has neither {single.name} nor {index.name}')
    self.shapes = {name: entry.shape for name, entry in self._entries.items()}

  def is_float(self, name: str) -> bool:
    return self._entries[name].dtype.startswith(('F', 'BF'))

  def problem(self, name: str) -> str | None:
    """Why the tensor cannot be read, or None."""
    dtype = self._entries[name].dtype
    return None if dtype in FLOATS else f'dtype {dtype} is not supported for weights'

  def read(self, name: str) -> np.ndarray:
    """The tensor, in the dtype of the file.

    Raises:
      InputError: a dtype that is neither that of a weight nor that of an index.
    """
    entry = self._entries[name]
    if entry.dtype not in FLOATS | OTHERS:
      raise InputError(f'{entry.file}: tensor {name!r} has the dtype {entry.dtype}, which is not supported')
    with open(entry.file, 'rb') as file:
      file.seek(entry.start)
      data = np.fromfile(file, (FLOATS | OTHERS)[entry.dtype], math.prod(entry.shape))
    return data.reshape(entry.shape)


def write_safetensors(path: str | os.PathLike, tensors: dict[str, np.ndarray]):
  """Writes one file, tensors in the order of the dictionary and in their own dtypes.

  Raises:
    InputError: if the file cannot be written.
  """
  header, end = {}, 0
  for name, tensor in tensors.items():
    offsets = [end, end + tensor.nbytes]
    header[name] = {'dtype': NAMES[tensor.dtype.name], 'shape': tensor.shape, 'data_offsets': offsets}
    end = offsets[1]
  raw = json.dumps(header, separators=(',', ':')).encode()
  raw += b' ' * (-len(raw) % 8)
  try:
    with open(path, 'wb') as file:
      file.write(len(raw).to_bytes(8, 'little') + raw)
      for tensor in tensors.values():
        file.write(np.ascontiguousarray(tensor).tobytes())
  except OSError as error:
    raise InputError(f'{path} cannot be written: {error.strerror}') from None
