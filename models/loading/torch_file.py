"""PyTorch's .bin and .pt files without PyTorch, and without running what they contain.

Such a file is a zip archive: `data.pkl` describes tensors, `data/KEY` holds their bytes. A pickle may name any function
of the host and have it called. Here it may name the three things that a dictionary of tensors is made of, each replaced
by something immutable of ours; anything else is refused before it is looked up.
"""

from collections.abc import Iterator
import dataclasses
import io
import math
import os
from pathlib import Path
import pickle
from typing import NamedTuple
import zipfile
import zlib

import ml_dtypes
import numpy as np

from models.errors import InputError
from models.loading.safetensors import read_json

STORAGES = {
    'DoubleStorage': np.float64, 'FloatStorage': np.float32, 'HalfStorage': np.float16,
    'BFloat16Storage': ml_dtypes.bfloat16, 'LongStorage': np.int64, 'IntStorage': np.int32, 'ShortStorage': np.int16,
    'CharStorage': np.int8, 'ByteStorage': np.uint8, 'BoolStorage': np.bool_}
FLOATS = ('DoubleStorage', 'FloatStorage', 'HalfStorage', 'BFloat16Storage')
MAX_PICKLE = 64 << 20
MAX_DIMENSIONS = 8


class Storage(NamedTuple):
  """A run of numbers in the archive."""

  kind: str
  key: str
  count: int


class PickledTensor(NamedTuple):
  """A view of a storage, counted in numbers; it lies inside."""

  storage: Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TorchEntry:
  """Where a tensor lies."""

  file: Path
  folder: str
  tensor: PickledTensor


class _State(dict):
  """Stands for OrderedDict; the attributes that PyTorch hangs on a dictionary of tensors are dropped."""

  __slots__ = ()

  def __setstate__(self, state):
    pass


class _Rebuild:
  """Stands for the function that makes a tensor of a storage. Without slots, a pickle can change nothing in it."""

  __slots__ = ()

  def __call__(self, storage, offset, shape, strides, requires_grad=False, hooks=None, metadata=None):
    whole = lambda x: type(x) is int and x >= 0
    row = lambda x: type(x) is tuple and len(x) <= MAX_DIMENSIONS and all(whole(size) for size in x)
    if type(storage) is not Storage or not whole(offset) or not row(shape) or not row(strides):
      raise ValueError('a tensor is malformed')
    if len(shape) != len(strides):
      raise ValueError('a tensor has more or fewer strides than dimensions')
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if math.prod(shape) and last >= storage.count:
      raise ValueError('a tensor reaches past the end of its storage')
    if math.prod(shape) > storage.count:
      raise ValueError('a tensor is larger than its storage')
    return PickledTensor(storage, offset, shape, strides)


class _Unpickler(pickle.Unpickler):
  """Knows tensors, storages and dictionaries."""

  def find_class(self, module: str, name: str):
    if module == 'torch' and name in STORAGES:
      return name
    if (module, name) == ('torch._utils', '_rebuild_tensor_v2'):
      return _Rebuild()
    if (module, name) == ('collections', 'OrderedDict'):
      return _State
    raise InputError(f'it names {module + "." + name!r}, and only tensors, storages and dictionaries are read')

  def persistent_load(self, pid) -> Storage:
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != 'storage':
      raise ValueError('a storage is malformed')
    _, kind, key, _, count = pid
    if kind not in STORAGES or type(key) is not str or type(count) is not int or count < 0:
      raise ValueError('a storage is malformed')
    return Storage(kind, key, count)


def read_entries(path: Path) -> dict[str, TorchEntry]:
  """The tensors of one file by name, checked against the bytes in the archive; none is read.

  Raises:
    InputError: no such archive, something in it that is no tensor, or a tensor without its bytes.
  """
  try:
    with zipfile.ZipFile(path) as archive:
      stored = [info for info in archive.infolist() if info.compress_type == zipfile.ZIP_STORED]
      sizes = {info.filename: info.file_size for info in stored}
      folder = _folder(path, sizes)
      if f'{folder}byteorder' in sizes and archive.read(f'{folder}byteorder').strip() != b'little':
        raise InputError(f'{path} holds big-endian numbers: save it again on a little-endian machine')
      tensors = _unpickle(path, archive.read(f'{folder}data.pkl'))
  except OSError as error:
    raise InputError(f'{path} cannot be read: {error.strerror or error}') from None
  except zipfile.BadZipFile:
    raise InputError(f'{path} is no whole zip archive, as PyTorch has written since 1.6: save it again') from None
  for name, tensor in tensors.items():
    kind, key, count = tensor.storage
    if sizes.get(f'{folder}data/{key}') != count * np.dtype(STORAGES[kind]).itemsize:
      raise InputError(f'{path}: the bytes of tensor {name!r} are missing or of another number than it says')
  return {name: TorchEntry(path, folder, tensor) for name, tensor in tensors.items()}


def _folder(path: Path, sizes: dict[str, int]) -> str:
  """Everything lies in one folder of the archive, which is called after the file that was first written."""
  pickles = [name for name in sizes if name.endswith('data.pkl') and name.count('/') <= 1]
  if len(pickles) != 1 or sizes[pickles[0]] > MAX_PICKLE:
    raise InputError(f'{path} is no file of tensors: it has no data.pkl, or one too large')
  return pickles[0].removesuffix('data.pkl')


def _unpickle(path: Path, raw: bytes) -> dict[str, PickledTensor]:
  try:
    tensors = _Unpickler(io.BytesIO(raw)).load()
  except InputError as error:
    raise InputError(f'{path} is refused: {error}') from None
  except Exception as error:  # a broken pickle can raise anything
    raise InputError(f'{path} is refused: {str(error).splitlines()[0] if str(error) else "a broken pickle"}') from None
  if not isinstance(tensors, dict):
    raise InputError(f'{path} holds no dictionary of tensors')
  for name, tensor in tensors.items():
    if type(name) is not str or type(tensor) is not PickledTensor:
      raise InputError(f'{path}: entry {name!r} is no tensor: save a plain dictionary of tensors')
  return dict(tensors)


def _files(path: Path) -> Iterator[Path]:
  """Those of a directory, or the file itself."""
  single, index = path / 'pytorch_model.bin', path / 'pytorch_model.bin.index.json'
  if path.is_file() or single.is_file():
    yield path if path.is_file() else single
    return
  if not index.is_file():
    raise InputError(f'{path} has neither {single.name} nor {index.name}')
  weight_map = read_json(index).get('weight_map')
  if not isinstance(weight_map, dict) or not all(
      isinstance(file, str) and Path(file).name == file for file in weight_map.values()):
    raise InputError(f"{index} has no 'weight_map' of tensor names to file names")
  yield from (path / file for file in sorted(set(weight_map.values())))


class TorchFile:
  """One file of tensors, or a directory with pytorch_model.bin, whole or in parts (a `name_maps.TensorFile`).

  Attributes:
    path: of the file or directory.
    shapes: tensor name -> shape.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = Path(path)
    self._entries: dict[str, TorchEntry] = {}
    for file in _files(self.path):
      for name, entry in read_entries(file).items():
        if name in self._entries:
          raise InputError(f'tensor {name!r} is in two files, {self._entries[name].file} and {file}')
        self._entries[name] = entry
    self.shapes = {name: entry.tensor.shape for name, entry in self._entries.items()}

  def is_float(self, name: str) -> bool:
    return self._entries[name].tensor.storage.kind in FLOATS

  def problem(self, name: str) -> str | None:
    """Why the tensor cannot be read, or None."""
    return None

  def read(self, name: str) -> np.ndarray:
    """The tensor, in the dtype of the file.

    Raises:
      InputError: the bytes do not match the check sum of the archive.
    """
    entry = self._entries[name]
    storage, offset, shape, strides = entry.tensor
    try:
      with zipfile.ZipFile(entry.file) as archive:
        raw = archive.read(f'{entry.folder}data/{storage.key}')
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
      raise InputError(f'{entry.file}: tensor {name!r} cannot be read: {error}') from None
    numbers = np.frombuffer(raw, STORAGES[storage.kind])
    bytes_per_step = tuple(step * numbers.itemsize for step in strides)
    view = np.lib.stride_tricks.as_strided(numbers[offset:], shape, bytes_per_step, writeable=False)
    return np.ascontiguousarray(view).reshape(shape)
