"""GGUF files: metadata and tensors, read lazily, one tensor at a time.

The header is parsed here and checked as a whole before anything is built; the block formats are those of the `gguf`
package. Rows of q and k are handed out in half-split rotary order, whatever the file holds.
"""

from collections.abc import Iterator
import dataclasses
import functools
import math
import os
from pathlib import Path
import re
import struct
from typing import Any, BinaryIO

import gguf
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
import ml_dtypes
import numpy as np

from models.config import DecoderConfig, RopeScaling
from models.errors import InputError
from models.layers import rope_frequencies

ARCHITECTURES = ('llama', 'qwen2', 'qwen3')
SCALARS = {0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?', 10: 'Q', 11: 'q', 12: 'd'}
STRING, ARRAY = 8, 9
MAX_NESTING = 4
PLAIN = {'F64': np.float64, 'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True)
class TensorEntry:
  """Where a tensor lies. `shape` is row-major: the reverse of the order in the file."""

  shape: tuple[int, ...]
  kind: GGMLQuantizationType
  offset: int
  num_bytes: int


class HeaderReader:
  """Reads the header of a GGUF file; every length is checked against the file before it is believed."""

  def __init__(self, file: BinaryIO, path: Path):
    self.file, self.path = file, path
    self.size = os.fstat(file.fileno()).st_size
    self.position = 0
    self.kinds: dict[str, int] = {}

  def fail(self, what: str) -> InputError:
    return InputError(f'{self.path} is not a whole GGUF file: {what}')

  def take(self, count: int, what: str) -> bytes:
    if count > self.size - self.position:
      raise self.fail(f'{what} runs past the end of the file ({self.size} bytes)')
    self.position += count
    return self.file.read(count)

  def number(self, code: str, what: str):
    return struct.unpack('<' + code, self.take(struct.calcsize('<' + code), what))[0]

  def string(self, what: str) -> str:
    raw = self.take(self.number('Q', what), what)
    try:
      return raw.decode('utf-8')
    except UnicodeDecodeError:
      raise self.fail(f'{what} is not UTF-8') from None

  def value(self, kind: int, what: str, depth: int = 0) -> Any:
    """A metadata value: a number, a string, a numpy array, or a list of strings or arrays."""
    if kind == STRING:
      return self.string(what)
    if kind in SCALARS:
      number = self.number(SCALARS[kind], what)
      return float(str(np.float32(number))) if SCALARS[kind] == 'f' else number  # 1e-05, not 9.999999747e-06
    if kind != ARRAY or depth == MAX_NESTING:
      raise self.fail(f'{what} has the unknown type {kind}')
    item_kind, count = self.number('I', what), self.number('Q', what)
    if item_kind in SCALARS:
      dtype = np.dtype('<' + SCALARS[item_kind])
      return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
    if count * 8 > self.size - self.position:  # a string or an array takes 8 bytes at least
      raise self.fail(f'{what} runs past the end of the file ({self.size} bytes)')
    return [self.value(item_kind, what, depth + 1) for _ in range(count)]

  def metadata(self, count: int) -> dict[str, Any]:
    metadata = {}
    for index in range(count):
      key = self.string(f'the name of metadata entry {index}')
      what = f'metadata {key!r}'
      if key in metadata:
        raise self.fail(f'{what} comes twice')
      self.kinds[key] = self.number('I', what)
      metadata[key] = self.value(self.kinds[key], what)
    return metadata

  def tensors(self, count: int) -> dict[str, TensorEntry]:
    """The tensor table, with offsets relative to the data section."""
    entries = {}
    for index in range(count):
      name = self.string(f'the name of tensor {index}')
      if name in entries:
        raise self.fail(f'tensor {name!r} comes twice')
      entries[name] = self._tensor(f'the entry of tensor {name!r}')
    return entries

  def _tensor(self, what: str) -> TensorEntry:
    rank = self.number('I', what)
    if not 1 <= rank <= 4:
      raise self.fail(f'{what} has {rank} dimensions')
    shape = tuple(self.number('Q', what) for _ in range(rank))[::-1]
    if 0 in shape:
      raise self.fail(f'{what} has a dimension of 0')
    code, offset = self.number('I', what), self.number('Q', what)
    try:
      kind = GGMLQuantizationType(code)
    except ValueError:
      raise InputError(f'{self.path}: {what} has the unknown type {code}; a newer `gguf` package may know it') from None
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_size:
      raise self.fail(f'{what}: rows of {shape[-1]} are no multiple of the {kind.name} block, {block_size}')
    return TensorEntry(shape, kind, offset, math.prod(shape) // block_size * block_bytes)


class GgufFile:
  """An open GGUF file.

  Attributes:
    path: of the file.
    metadata: key -> number, string, numpy array or list of strings.
    kinds: key -> GGUF type of the value.
    shapes: tensor name -> row-major shape.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = Path(path)
    try:
      self._file = self.path.open('rb')
    except OSError as error:
      raise InputError(f'{self.path} cannot be opened: {error.strerror}') from None
    try:
      self._parse()
    except BaseException:
      self._file.close()
      raise

  def _parse(self):
    reader = HeaderReader(self._file, self.path)
    if reader.take(4, 'the magic number') != b'GGUF':
      raise InputError(f'{self.path} is not a GGUF file: it does not begin with "GGUF"')
    version = reader.number('I', 'the version')
    if version not in (2, 3):
      hint = ' (big-endian files are not supported)' if version in (2 << 24, 3 << 24) else ''
      raise InputError(f'{self.path} has GGUF version {version}; versions 2 and 3 are supported{hint}')
    num_tensors, num_metadata = reader.number('Q', 'the tensor count'), reader.number('Q', 'the metadata count')
    self.metadata, self.kinds = reader.metadata(num_metadata), reader.kinds
    self._entries = reader.tensors(num_tensors)
    self._place(reader)
    self.shapes = {name: entry.shape for name, entry in self._entries.items()}

  def _place(self, reader: HeaderReader):
    """Makes offsets absolute and checks that tensors lie inside the file and apart."""
    alignment = self.get('general.alignment', int, 32)
    if alignment < 8 or alignment % 8:
      raise reader.fail(f'general.alignment is {alignment}')
    start = -(-reader.position // alignment) * alignment
    end, before = start, None
    for name, entry in sorted(self._entries.items(), key=lambda item: item[1].offset):
      entry = dataclasses.replace(entry, offset=start + entry.offset)
      if entry.offset % alignment or entry.offset < end:
        raise reader.fail(f'the data of tensor {name!r} is misaligned or overlaps that of {before!r}')
      end, before = entry.offset + entry.num_bytes, name
      if end > reader.size:
        raise reader.fail(f'the data of tensor {name!r} ends at byte {end}, the file at {reader.size}')
      self._entries[name] = entry

  def __enter__(self) -> 'GgufFile':
    return self

  def __exit__(self, *unused):
    self._file.close()

  def get(self, key: str, kind: type, default: Any = None) -> Any:
    """Metadata `key` as `kind` (int, float, str, bool or list), or the default if it is absent.

    Raises:
      InputError: if the value is of another kind, or absent without a default.
    """
    value = self.metadata.get(key)
    if value is None:
      if default is None:
        raise InputError(f'{self.path} has no metadata {key!r}')
      return default
    if kind is list and isinstance(value, np.ndarray):
      return value.tolist()
    if kind is float and type(value) is int:
      return float(value)
    if type(value) is not kind:
      raise InputError(f'{self.path}: metadata {key!r} should be of type {kind.__name__}, not {type(value).__name__}')
    return value

  @property
  def architecture(self) -> str:
    return self.get('general.architecture', str)

  def is_float(self, name: str) -> bool:
    return self._entries[name].kind.name not in ('I8', 'I16', 'I32', 'I64')

  def problem(self, name: str) -> str | None:
    """Why the tensor cannot be read, or None."""
    kind = self._entries[name].kind
    return None if kind.name in PLAIN or can_dequantise(kind) else f'its type {kind.name} cannot be dequantised'

  def read(self, name: str) -> np.ndarray:
    """The tensor: F16 and BF16 as stored, quantised types as float32."""
    entry = self._entries[name]
    self._file.seek(entry.offset)
    data = np.fromfile(self._file, np.uint8, entry.num_bytes)
    if entry.kind.name in PLAIN:
      tensor = data.view(PLAIN[entry.kind.name]).reshape(entry.shape)
    else:
      tensor = gguf.quants.dequantize(data.reshape(*entry.shape[:-1], -1), entry.kind)
    heads = self._interleaved_heads(name)
    if heads is None:
      return tensor
    if heads < 1 or len(tensor) % (2 * heads):
      raise InputError(f'{self.path}: tensor {name!r} of shape {entry.shape} does not fit {heads} heads')
    return half_split(tensor, heads)

  def _interleaved_heads(self, name: str) -> int | None:
    """Over how many heads the rows are interleaved: N for q, K for k, and only in the llama architecture."""
    which = re.search(r'\.attn_([qk])\.(weight|bias)$', name)
    if which is None or self.architecture != 'llama':
      return None
    num_heads = self.get('llama.attention.head_count', int)
    return num_heads if which[1] == 'q' else self.get('llama.attention.head_count_kv', int, num_heads) or num_heads


@functools.cache
def can_dequantise(kind: GGMLQuantizationType) -> bool:
  """Whether the `gguf` package can."""
  try:
    gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
  except NotImplementedError:
    return False
  return True


def half_split(rows: np.ndarray, heads: int) -> np.ndarray:
  """Reorders the rows of each head from interleaved (0 1, 2 3, ...) to half-split rotary pairs (0 H/2, ...)."""
  return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
  """The inverse of `half_split`."""
  return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


UNDERSTOOD = re.compile(r'''
    (block_count|context_length|embedding_length|feed_forward_length|vocab_size
    |attention\.(head_count|head_count_kv|key_length|value_length|layer_norm_rms_epsilon|sliding_window|causal)
    |rope\.(dimension_count|freq_base|scaling\.\w+))$''', re.VERBOSE)
CONSEQUENTIAL = re.compile(r'rope\.|attention\.|expert|.*scale|.*softcap')  # not understood -> refused


def decoder_config(file: GgufFile) -> DecoderConfig:
  """The metadata as a `DecoderConfig`; what would change the result and is not understood is refused.

  Raises:
    InputError: naming the key.
  """
  arch = file.architecture
  if arch not in ARCHITECTURES:
    raise InputError(f'{file.path}: architecture {arch!r} is not supported: use one of {", ".join(ARCHITECTURES)}')
  _refuse_unknown(file, arch)
  num_layers, num_heads = file.get(f'{arch}.block_count', int), file.get(f'{arch}.attention.head_count', int)
  width = file.get(f'{arch}.embedding_length', int)
  window = file.get(f'{arch}.attention.sliding_window', int, 0)
  if 'token_embd.weight' not in file.shapes:
    raise InputError(f"{file.path} has no tensor 'token_embd.weight'")
  for key, wrong in (('attention.head_count', num_heads < 1), ('block_count', num_layers > len(file.shapes))):
    if wrong:
      raise InputError(f"{file.path}: metadata '{arch}.{key}' is {file.get(f'{arch}.{key}', int)}")
  config = DecoderConfig(
      vocab_size=_vocab_size(file), width=width, num_layers=num_layers, num_heads=num_heads,
      num_kv_heads=file.get(f'{arch}.attention.head_count_kv', int, num_heads) or num_heads,
      head_dim=file.get(f'{arch}.attention.key_length', int, width // num_heads),
      ff_width=file.get(f'{arch}.feed_forward_length', int),
      rope_theta=file.get(f'{arch}.rope.freq_base', float, 10_000.0),
      max_positions=file.get(f'{arch}.context_length', int),
      norm_eps=file.get(f'{arch}.attention.layer_norm_rms_epsilon', float),
      tied_embedding='output.weight' not in file.shapes,
      qkv_bias=arch == 'qwen2', qk_norm=arch == 'qwen3',
      windows=(window,) * num_layers if window else ())
  _check_heads(file, arch, config)
  return dataclasses.replace(config, rope_scaling=_rope_scaling(file, arch, config))


def _refuse_unknown(file: GgufFile, arch: str):
  for key, value in file.metadata.items():
    name = key.removeprefix(arch + '.')
    if name == key or UNDERSTOOD.match(name) or not CONSEQUENTIAL.match(name):
      continue
    if not isinstance(value, str | list | np.ndarray) and not value:  # 0 experts, factor 0: switched off
      continue
    raise InputError(f'{file.path}: metadata {key!r} is not supported')
  if file.get('split.count', int, 1) > 1:
    raise InputError(f'{file.path} is one of {file.metadata["split.count"]} parts: merge them with llama-gguf-split')
  if not file.get(f'{arch}.attention.causal', bool, True):
    raise InputError(f"{file.path}: metadata '{arch}.attention.causal' is false: not a language model")


def _vocab_size(file: GgufFile) -> int:
  """Rows the embedding must have."""
  tokens = file.get('tokenizer.ggml.tokens', list, [])
  size = file.get(f'{file.architecture}.vocab_size', int, len(tokens))
  return size or file.shapes['token_embd.weight'][0]


def _check_heads(file: GgufFile, arch: str, config: DecoderConfig):
  for key in ('attention.value_length', 'rope.dimension_count'):
    value = file.get(f'{arch}.{key}', int, config.head_dim)
    if value != config.head_dim:
      raise InputError(f"{file.path}: '{arch}.{key}' is {value}; only the head size, {config.head_dim}, is supported")


def _rope_scaling(file: GgufFile, arch: str, config: DecoderConfig) -> RopeScaling | None:
  prefix = f'{arch}.rope.scaling.'
  kind = file.get(prefix + 'type', str, 'none')
  if 'rope_freqs.weight' in file.shapes:
    if kind != 'none':
      raise InputError(f"{file.path} has both '{prefix}type' and a tensor 'rope_freqs.weight'")
    return llama3_from_factors(file, config)
  _refuse_unknown_scaling(file, prefix)
  if kind == 'none':
    if file.get(prefix + 'factor', float, 1.0) not in (0.0, 1.0):
      raise InputError(f"{file.path} has '{prefix}factor' but no '{prefix}type'")
    return None
  if kind == 'linear':
    factor = file.get(prefix + 'factor', float)
    return RopeScaling('linear', factor) if factor else None  # 0 is llama.cpp's way to write 'off'
  if kind != 'yarn':
    raise InputError(f"{file.path}: '{prefix}type' is {kind!r}: only 'none', 'linear' and 'yarn' are supported")
  return RopeScaling(
      'yarn', file.get(prefix + 'factor', float),
      original_max_positions=file.get(prefix + 'original_context_length', int, config.max_positions),
      beta_fast=file.get(prefix + 'yarn_beta_fast', float, 32.0),
      beta_slow=file.get(prefix + 'yarn_beta_slow', float, 1.0))


def _refuse_unknown_scaling(file: GgufFile, prefix: str):
  understood = {'type', 'factor', 'original_context_length', 'finetuned', 'yarn_beta_fast', 'yarn_beta_slow'}
  harmless = {'attn_factor': (1.0,), 'yarn_attn_factor': (1.0,), 'yarn_ext_factor': (1.0, -1.0)}
  for key, value in file.metadata.items():
    name = key.removeprefix(prefix)
    if name != key and name not in understood and value not in harmless.get(name, ()) and value:
      raise InputError(f'{file.path}: metadata {key!r} is {value!r}, which is not supported')


def llama3_from_factors(file: GgufFile, config: DecoderConfig) -> RopeScaling | None:
  """Llama 3's scaling from the divisors of its frequencies, which is all that GGUF keeps of it.

  In the blended band the kept share of a frequency is a straight line in the rotations r over the trained context C:
  (1/divisor - 1/factor) / (1 - 1/factor) = (C r - low) / (high - low). One point gives C for Llama's borders, 1 and 4;
  two points give any borders. Whatever reproduces all frequencies is right.

  Raises:
    InputError: if the divisors do not come from such a scaling.
  """
  divisor = file.read('rope_freqs.weight').astype(np.float64)
  frequency, _ = rope_frequencies(config)
  refusal = InputError(f"{file.path}: tensor 'rope_freqs.weight' is no llama3 rope scaling, and no other is supported")
  if divisor.shape != frequency.shape or not np.isfinite(divisor).all() or (divisor < 1).any():
    raise refusal
  if (divisor == 1).all():
    return None
  for scaling in _llama3_candidates(frequency / (2 * np.pi), divisor):
    scaled, _ = rope_frequencies(dataclasses.replace(config, rope_scaling=scaling))
    if np.allclose(scaled, frequency / divisor, rtol=1e-5, atol=0):
      return scaling
  raise refusal


def _llama3_candidates(rotations: np.ndarray, divisor: np.ndarray) -> Iterator[RopeScaling]:
  factor = float(divisor.max())
  kept = (1 / divisor - 1 / factor) / (1 - 1 / factor)
  band = np.flatnonzero((kept > 1e-4) & (kept < 1 - 1e-4))
  whole = np.flatnonzero(kept >= 1 - 1e-4)
  if len(band):
    yield RopeScaling('llama3', factor, round((3 * kept[band[0]] + 1) / rotations[band[0]]))
  elif len(whole):  # no point in the band: any C with no frequency between its borders will do
    least = math.ceil(4 / rotations[whole[-1]])
    yield RopeScaling('llama3', factor, 2 ** math.ceil(math.log2(least)))
    yield RopeScaling('llama3', factor, least)
  if len(band) > 1:
    slope, offset = np.polyfit(rotations[band], kept[band], 1)
    low = -offset * 8192 / slope
    yield RopeScaling('llama3', factor, 8192, low_freq_factor=low, high_freq_factor=low + 8192 / slope)
