"""GGUF files: every block format, rotary layout, metadata, and what is refused."""

import dataclasses
from pathlib import Path
import struct

import gguf
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import ml_dtypes
import numpy as np
import pytest

from models.config import DecoderConfig, RopeScaling
from models.decoder import Decoder
from models.errors import InputError
from models.layers import rope_frequencies, rotate
from models.loading import export_gguf, load_decoder
from models.loading.gguf import GgufFile, decoder_config, half_split, interleave, llama3_from_factors
from models.loading.gguf_tokenizer import gguf_vocabulary
from tests.models.random_decoder import random_decoder

TOKENIZERS = Path(__file__).parents[1] / 'fixtures' / 'tokenizers'
QUANTISED = sorted(gguf.quants._type_traits, key=lambda kind: kind.name)


def write(path: Path, metadata: dict, tensors: dict, architecture: str = 'llama') -> Path:
  """`tensors`: name -> array, or (raw bytes per row, type)."""
  writer = gguf.GGUFWriter(path, architecture)
  for key, value in metadata.items():
    if isinstance(value, bool):
      writer.add_bool(key, value)
    elif isinstance(value, int):
      writer.add_uint32(key, value)
    elif isinstance(value, float):
      writer.add_float32(key, value)
    else:
      writer.add_string(key, value)
  for name, tensor in tensors.items():
    if isinstance(tensor, tuple):
      writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
    else:
      writer.add_tensor(name, tensor)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def llama_metadata(**changes) -> dict:
  fields = {
      'block_count': 1, 'context_length': 4096, 'embedding_length': 8, 'feed_forward_length': 12,
      'attention.head_count': 4, 'attention.head_count_kv': 2, 'attention.layer_norm_rms_epsilon': 1e-5,
      'attention.key_length': 4, 'vocab_size': 5}
  return {f'llama.{name}': value for name, value in (fields | changes).items() if value is not None}


def config_of(path: Path, tensors: dict | None = None, **changes) -> DecoderConfig:
  tensors = {'token_embd.weight': np.zeros((5, 8), np.float32)} | (tensors or {})
  with GgufFile(write(path / 'config.gguf', llama_metadata(**changes), tensors)) as file:
    return decoder_config(file)


def toy(**changes) -> Decoder:
  return random_decoder(DecoderConfig.tiny(vocab_size=480, **changes))


@pytest.mark.parametrize('kind', QUANTISED, ids=lambda kind: kind.name)
def test_every_quantised_type(tmp_path, kind):
  """Reads exactly what the package dequantises, and close to the original where the package quantises."""
  rng = np.random.default_rng(0)
  block, size = GGML_QUANT_SIZES[kind]
  columns = 256 * block // np.gcd(256, block)
  original = rng.normal(size=(3, columns)).astype(np.float32)
  try:
    raw = gguf.quants.quantize(original, kind)
  except NotImplementedError:  # small bytes keep half-precision scales finite
    raw = rng.integers(0, 64, (3, columns // block * size), dtype=np.uint8)
    original = None
  path = write(tmp_path / 'x.gguf', {}, {'before': np.ones(3, np.float32), 'w': (raw, kind)})
  with GgufFile(path) as file:
    read = file.read('w')
    assert file.shapes['w'] == read.shape == (3, columns) and file.problem('w') is None
  np.testing.assert_array_equal(read, gguf.quants.dequantize(raw, kind))
  if original is not None and not kind.name.startswith('TQ'):
    assert np.abs(read - original).mean() < 0.2


def test_plain_types(tmp_path):
  """fault 56: F16 and BF16 come as stored."""
  values = np.linspace(-2, 2, 32).astype(np.float32).reshape(2, 16)
  half = values.astype(ml_dtypes.bfloat16)
  path = write(tmp_path / 'x.gguf', {}, {
      'f32': values, 'f16': values.astype(np.float16), 'f64': values.astype(np.float64),
      'bf16': (half.view(np.uint8), GGMLQuantizationType.BF16), 'ids': np.arange(4, dtype=np.int32)})
  with GgufFile(path) as file:
    for name, expected in (('f32', values), ('f16', values.astype(np.float16)), ('f64', values), ('bf16', half)):
      np.testing.assert_array_equal(file.read(name), expected)
    assert file.read('bf16').dtype == ml_dtypes.bfloat16
    assert file.problem('ids') is not None and not file.is_float('ids') and file.is_float('bf16')


def test_row_order():
  """fault 51: interleaved -> half-split, for one head of 8 rows and for two heads of 4."""
  rows = np.arange(8)[:, None]
  assert half_split(rows, 1)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
  assert half_split(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
  for heads in (1, 2, 4):
    np.testing.assert_array_equal(interleave(half_split(rows, heads), heads), rows)


def test_scores_agree_with_the_interleaved_layout():
  """fault 51: attention scores at positions (5, 2) against rotation of pairs (0, 1), (2, 3), ... as in the file."""
  rng = np.random.default_rng(0)
  frequency, _ = rope_frequencies(DecoderConfig.tiny())

  def rotate_pairs(x, position):
    turned = (x[0::2] + 1j * x[1::2]) * np.exp(1j * position * frequency)
    return np.stack([turned.real, turned.imag], axis=-1).ravel()

  def rotate_halves(x, position):
    angle = position * frequency
    return np.asarray(rotate(half_split(x, 1).astype(np.float32), np.cos(angle), np.sin(angle)))

  q, k = rng.normal(size=(2, 8))
  np.testing.assert_allclose(
      rotate_pairs(q, 5) @ rotate_pairs(k, 2), rotate_halves(q, 5) @ rotate_halves(k, 2), rtol=1e-5)


@pytest.mark.parametrize(('architecture', 'permuted'), [('llama', True), ('qwen2', False), ('qwen3', False)])
def test_k_is_permuted_by_its_own_heads(tmp_path, architecture, permuted):
  """fault 52: 4 heads, 2 kv heads, head size 4: q by 4, k by 2, v never; Qwen's rows stay as they are."""
  rows = {name: np.arange(count * 8, dtype=np.float32).reshape(count, 8)
          for name, count in (('attn_q', 16), ('attn_k', 8), ('attn_v', 8))}
  metadata = {key.replace('llama', architecture): value for key, value in llama_metadata().items()}
  path = write(tmp_path / 'x.gguf', metadata, {f'blk.0.{name}.weight': tensor for name, tensor in rows.items()},
               architecture)
  head = [0, 2, 1, 3] if permuted else [0, 1, 2, 3]
  with GgufFile(path) as file:
    for name, tensor in rows.items():
      order = np.concatenate([np.array(head) + 4 * i for i in range(len(tensor) // 4)])
      expected = tensor if name == 'attn_v' else tensor[order]
      np.testing.assert_array_equal(file.read(f'blk.0.{name}.weight'), expected)


@pytest.mark.parametrize('changes', [
    {}, dict(tied_embedding=True), dict(qkv_bias=True), dict(qk_norm=True), dict(num_kv_heads=4),
    dict(rope_scaling=RopeScaling('linear', 2.0)), dict(rope_scaling=RopeScaling('llama3', 8.0, 256)),
    dict(rope_scaling=RopeScaling('yarn', 4.0, 128))], ids=str)
def test_export_and_import_are_inverse(tmp_path, changes):
  """fault 51, 52: round trip through the layout of the file is exact, config included."""
  decoder = toy(**changes)
  export_gguf(decoder, tmp_path / 'x.gguf', TOKENIZERS / 'sentencepiece.gguf')
  again, config = load_decoder(tmp_path / 'x.gguf')
  same_scaling(config, decoder.config)
  assert dataclasses.replace(config, rope_scaling=None) == dataclasses.replace(decoder.config, rope_scaling=None)
  for read, written in zip(jax.tree.leaves(again), jax.tree.leaves(decoder), strict=True):
    np.testing.assert_array_equal(read, written)
  with GgufFile(tmp_path / 'x.gguf') as file, GgufFile(TOKENIZERS / 'sentencepiece.gguf') as source:
    assert gguf_vocabulary(file).names == gguf_vocabulary(source).names


def same_scaling(config: DecoderConfig, expected: DecoderConfig):
  """Whatever the fields, the frequencies are those."""
  ours, theirs = rope_frequencies(config), rope_frequencies(expected)
  np.testing.assert_allclose(ours[0], theirs[0], rtol=2e-5)
  assert ours[1] == pytest.approx(theirs[1])


def test_what_gguf_cannot_express(tmp_path):
  for changes, named in ((dict(windows=(4, 4)), 'windows'), (dict(positions='relative', mlp='gelu'), 'rotary'),
                         (dict(rope_scaling=RopeScaling('yarn', 4.0, 128, truncate=False)), 'yarn')):
    with pytest.raises(InputError, match=named):
      export_gguf(toy(**changes), tmp_path / 'x.gguf', TOKENIZERS / 'sentencepiece.gguf')


@pytest.mark.parametrize('scaling', [
    RopeScaling('llama3', 8.0, 8192), RopeScaling('llama3', 32.0, 8192), RopeScaling('llama3', 8.0, 1000),
    RopeScaling('llama3', 4.0, 4096, low_freq_factor=2.0, high_freq_factor=16.0)], ids=str)
@pytest.mark.parametrize('head_dim', [8, 64, 128])
def test_llama3_from_divisors(tmp_path, scaling, head_dim):
  """fault 53: the tensor of divisors is all that GGUF keeps of Llama 3's scaling; it is never ignored."""
  plain = DecoderConfig.tiny(rope_theta=500_000.0, head_dim=head_dim)
  scaled = dataclasses.replace(plain, rope_scaling=scaling)
  divisors = (rope_frequencies(plain)[0] / rope_frequencies(scaled)[0]).astype(np.float32)
  with GgufFile(write(tmp_path / 'x.gguf', {}, {'rope_freqs.weight': divisors})) as file:
    found = llama3_from_factors(file, plain)
  same_scaling(dataclasses.replace(plain, rope_scaling=found), scaled)


def test_other_divisors_are_refused(tmp_path):
  """fault 53"""
  for divisors in ([1, 2, 1, 2], [0.5, 1, 1, 1], [1, 1, np.nan, 1], [1, 1]):
    tensor = {'rope_freqs.weight': np.array(divisors, np.float32)}
    with GgufFile(write(tmp_path / 'x.gguf', {}, tensor)) as file, pytest.raises(InputError, match='rope_freqs'):
      llama3_from_factors(file, DecoderConfig.tiny())
  ones = {'rope_freqs.weight': np.ones(2, np.float32)}
  assert config_of(tmp_path, ones).rope_scaling is None
  with pytest.raises(InputError, match='both'):
    config_of(tmp_path, ones, **{'rope.scaling.type': 'linear', 'rope.scaling.factor': 2.0})


def test_rope_scaling_metadata(tmp_path):
  """fault 53: applied or refused."""
  def scaling(**fields):
    return config_of(tmp_path, **{f'rope.scaling.{name}': value for name, value in fields.items()}).rope_scaling

  assert scaling() is None and scaling(type='none') is None and scaling(type='none', factor=1.0) is None
  assert scaling(type='linear', factor=2.0) == RopeScaling('linear', 2.0)
  assert scaling(type='yarn', factor=4.0) == RopeScaling('yarn', 4.0, 4096)
  assert scaling(type='yarn', factor=4.0, original_context_length=64, attn_factor=1.0, finetuned=True) == RopeScaling(
      'yarn', 4.0, 64)
  for fields in (dict(type='longrope', factor=2.0), dict(factor=2.0), dict(type='linear'),
                 dict(type='yarn', factor=4.0, attn_factor=2.0), dict(type='yarn', factor=4.0, yarn_log_multiplier=.1)):
    with pytest.raises(InputError, match=r'rope\.scaling'):
      scaling(**fields)


def test_metadata_is_applied_or_refused(tmp_path):
  config = config_of(tmp_path, **{'rope.freq_base': 5e5, 'attention.sliding_window': 7, 'expert_count': 0})
  assert config == DecoderConfig(
      vocab_size=5, width=8, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4, ff_width=12, rope_theta=5e5,
      max_positions=4096, norm_eps=1e-5, tied_embedding=True, windows=(7,))
  untied = config_of(tmp_path, {'output.weight': np.zeros((5, 8), np.float32)}, **{'attention.key_length': None})
  assert not untied.tied_embedding and untied.head_dim == 2
  for key, value in (('expert_count', 8), ('attention.clamp_kqv', 1.0), ('rope.scale_linear', 2.0),
                     ('rope.dimension_count', 2), ('attention.value_length', 8), ('attention.causal', False),
                     ('residual_scale', 2.0), ('final_logit_softcapping', 30.0), ('attention.head_count', 'four'),
                     ('block_count', 2**31)):
    with pytest.raises(InputError, match=key):
      config_of(tmp_path, **{key: value})
  for key in ('block_count', 'context_length', 'attention.layer_norm_rms_epsilon'):
    with pytest.raises(InputError, match=f"no metadata 'llama.{key}'"):
      config_of(tmp_path, **{key: None})


def test_one_part_of_many(tmp_path):
  tensors = {'token_embd.weight': np.zeros((5, 8), np.float32)}
  path = write(tmp_path / 'x.gguf', llama_metadata() | {'split.count': 3}, tensors)
  with pytest.raises(InputError, match='one of 3 parts'):
    load_decoder(path)


def test_unknown_architecture(tmp_path):
  path = write(tmp_path / 'x.gguf', {}, {}, 'gemma')
  with pytest.raises(InputError, match="architecture 'gemma' is not supported"):
    load_decoder(path)


def test_foreign_files(tmp_path):
  path = tmp_path / 'x.gguf'
  for raw, named in ((b'', 'the magic number'), (b'PK\3\4 zip', 'does not begin with "GGUF"'),
                     (b'GGUF' + struct.pack('<IQQ', 1, 0, 0), 'version 1'),
                     (b'GGUF' + struct.pack('>IQQ', 3, 0, 0), 'big-endian'),
                     (b'GGUF' + struct.pack('<IQQ', 3, 10 ** 18, 10 ** 18), 'past the end')):
    path.write_bytes(raw)
    with pytest.raises(InputError, match=named):
      GgufFile(path)
  with pytest.raises(InputError, match='No such file'):
    GgufFile(tmp_path / 'none.gguf')


def entry(name: bytes, *dims: int, kind: int = 0, offset: int = 0) -> bytes:
  return struct.pack(f'<Q{len(name)}sI{len(dims)}QIQ', len(name), name, len(dims), *dims, kind, offset)


@pytest.mark.parametrize(('entries', 'named'), [
    ([entry(b'w', 2), entry(b'w', 2, offset=32)], "'w' comes twice"), ([entry(b'w', 2, kind=99)], 'unknown type 99'),
    ([entry(b'w', 2), entry(b'v', 2)], 'overlaps'), ([entry(b'w', 2, offset=8)], 'misaligned'),
    ([entry(b'w', 2, 2, 2, 2, 2)], '5 dimensions'), ([entry(b'w', 3, kind=8)], 'multiple of the Q8_0 block'),
    ([entry(b'w', 2 ** 40, 2 ** 40)], "'w' ends at byte"), ([entry(b'\xff', 2)], 'not UTF-8')])
def test_nonsense_in_the_tensor_table(tmp_path, entries, named):
  path = tmp_path / 'x.gguf'
  path.write_bytes(b'GGUF' + struct.pack('<IQQ', 3, len(entries), 0) + b''.join(entries) + bytes(200))
  with pytest.raises(InputError, match=named):
    GgufFile(path)


def test_arrays_nested_without_end(tmp_path):
  nested = struct.pack('<IQ', 9, 1) * 10_000
  raw = b'GGUF' + struct.pack('<IQQ', 3, 0, 1) + struct.pack('<Q1sI', 1, b'k', 9) + nested
  (tmp_path / 'x.gguf').write_bytes(raw)
  with pytest.raises(InputError, match='unknown type'):
    GgufFile(tmp_path / 'x.gguf')


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> bytes:
  path = tmp_path_factory.mktemp('whole') / 'x.gguf'
  export_gguf(toy(), path, TOKENIZERS / 'byte-level.gguf')
  return path.read_bytes()


def try_to_open(path: Path):
  with GgufFile(path) as file:
    decoder_config(file)
    gguf_vocabulary(file)


@settings(max_examples=150, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_every_truncation_is_refused(whole, tmp_path_factory, share):
  """fault 55"""
  path = tmp_path_factory.getbasetemp() / 'cut.gguf'
  path.write_bytes(whole[:int(share * (len(whole) - 64))])
  with pytest.raises(InputError) as caught:
    try_to_open(path)
  assert '\n' not in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_corruption_is_refused_or_harmless(whole, tmp_path_factory, changes):
  raw = bytearray(whole)
  for position, byte in changes:
    raw[position] = byte
  path = tmp_path_factory.getbasetemp() / 'corrupt.gguf'
  path.write_bytes(raw)
  try:
    try_to_open(path)
  except InputError as error:
    assert '\n' not in str(error)
