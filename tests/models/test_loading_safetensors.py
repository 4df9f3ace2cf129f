"""Safetensors directories: what is read, and what is refused before anything is built."""

import json
from pathlib import Path
import re
import shutil

from hypothesis import given, settings
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from models.errors import InputError
from models.loading.safetensors import SafetensorsDirectory

FIXTURES = Path(__file__).parents[1] / 'fixtures' / 'models'
TENSORS = {
    'a': np.arange(12, dtype=np.float32).reshape(3, 4),
    'b': np.linspace(-3, 3, 10).astype(ml_dtypes.bfloat16),
    'c': np.ones((2, 2), np.float16)}


def write(directory: Path, tensors: dict, name: str = 'model.safetensors') -> Path:
  directory.mkdir(exist_ok=True)
  safetensors.numpy.save_file(tensors, directory / name)
  return directory / name


def write_raw(path: Path, header: dict | bytes, data: bytes = b''):
  raw = header if isinstance(header, bytes) else json.dumps(header).encode()
  path.write_bytes(len(raw).to_bytes(8, 'little') + raw + data)


@pytest.fixture
def sharded(tmp_path) -> Path:
  return Path(shutil.copytree(FIXTURES / 'llama3', tmp_path / 'sharded'))


def refusal(directory: Path) -> str:
  """The one line that refuses the directory."""
  with pytest.raises(InputError) as caught:
    SafetensorsDirectory(directory)
  assert '\n' not in str(caught.value)
  return str(caught.value)


def test_reads_what_the_library_writes(tmp_path):
  write(tmp_path, TENSORS)
  source = SafetensorsDirectory(tmp_path)
  assert source.shapes == {name: tensor.shape for name, tensor in TENSORS.items()}
  for name, tensor in TENSORS.items():
    np.testing.assert_array_equal(source.read(name), tensor)


def test_bfloat16_arrives_as_bfloat16(tmp_path):
  """fault 56: every bit pattern survives, and the dtype is bfloat16, not two bytes of void."""
  patterns = np.arange(2 ** 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
  write(tmp_path, {'all': patterns})
  read = SafetensorsDirectory(tmp_path).read('all')
  assert read.dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(read.view(np.uint16), patterns.view(np.uint16))


def test_integer_buffers_are_told_from_weights(tmp_path):
  """fault 56: int and bool buffers are never read as weights."""
  write(tmp_path, {'mask': np.ones(3, bool), 'ids': np.arange(3), 'w': np.zeros(3, np.float32)})
  source = SafetensorsDirectory(tmp_path)
  assert [source.is_float(name) for name in ('mask', 'ids', 'w')] == [False, False, True]
  assert source.problem('w') is None and 'I64' in source.problem('ids')


def test_truncated_shard(sharded):
  """fault 55: the last 100 bytes of a shard are cut."""
  shard = sharded / 'model-00002-of-00002.safetensors'
  shard.write_bytes(shard.read_bytes()[:-100])
  message = refusal(sharded)
  assert shard.name in message and 'truncated' in message and re.search(r"tensor 'model\.\S+'", message)


def test_missing_shard(sharded):
  """fault 55: the index lists a shard that is not there."""
  (sharded / 'model-00002-of-00002.safetensors').unlink()
  message = refusal(sharded)
  assert 'model-00002-of-00002.safetensors is missing' in message and "tensor 'lm_head.weight'" in message


def test_header_longer_than_file(tmp_path):
  """fault 55: the header claims more bytes than the file has."""
  path = write(tmp_path, TENSORS)
  raw = path.read_bytes()
  path.write_bytes((len(raw) + 1).to_bytes(8, 'little') + raw[8:])
  assert f'header of {len(raw) + 1} bytes in a file of {len(raw)}' in refusal(tmp_path)


def test_key_in_two_shards(sharded):
  """fault 55: two shards define one key."""
  index = json.loads((sharded / 'model.safetensors.index.json').read_text())
  key = next(iter(index['weight_map']))
  (sharded / 'model-00003.safetensors').write_bytes((sharded / index['weight_map'][key]).read_bytes())
  index['weight_map']['other'] = 'model-00003.safetensors'
  (sharded / 'model.safetensors.index.json').write_text(json.dumps(index))
  message = refusal(sharded)
  assert 'is in two files' in message and 'model-00003.safetensors' in message


def test_index_names_an_unknown_key(sharded):
  """fault 55: the index names a key that no shard has."""
  index = json.loads((sharded / 'model.safetensors.index.json').read_text())
  index['weight_map']['model.ghost'] = 'model-00001-of-00002.safetensors'
  (sharded / 'model.safetensors.index.json').write_text(json.dumps(index))
  assert "does not hold tensor 'model.ghost'" in refusal(sharded)


def test_index_outside_of_the_directory(sharded):
  index = json.loads((sharded / 'model.safetensors.index.json').read_text())
  index['weight_map']['x'] = '../model.safetensors'
  (sharded / 'model.safetensors.index.json').write_text(json.dumps(index))
  assert 'weight_map' in refusal(sharded)


@pytest.mark.parametrize(('header', 'data', 'expected'), [
    ({'w': {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 4]}}, 4, "'w' has 4 bytes, which does not fit F32 [2]"),
    ({'w': {'dtype': 'Q9', 'shape': [1], 'data_offsets': [0, 4]}}, 4, "'w' has the unknown dtype 'Q9'"),
    ({'w': {'dtype': 'F32', 'shape': [-1], 'data_offsets': [0, 4]}}, 4, "tensor 'w' is malformed"),
    ({'w': {'dtype': 'F32', 'shape': [True], 'data_offsets': [0, 4]}}, 4, "tensor 'w' is malformed"),
    ({'w': 3}, 4, "tensor 'w' is malformed"),
    ({'w': {'dtype': 'F32', 'shape': [1], 'data_offsets': [4, 8]}}, 8, "'w' begins at byte"),
    ({'v': {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]},
      'w': {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]}}, 4, 'begins at byte'),
    ({'w': {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]}}, 9, '5 bytes after its last tensor'),
    (b'{"w": {}, "w": {}}', 0, "has 'w' twice"),
    (b'[' * 100_000, 0, 'is not valid JSON'),
    (b'[]', 0, 'is not a JSON object'),
    (b'\xff', 0, 'is not valid JSON')])
def test_nonsense_in_the_header(tmp_path, header, data, expected):
  write_raw(tmp_path / 'model.safetensors', header, bytes(data))
  assert expected in refusal(tmp_path)


def test_foreign_and_missing_files(tmp_path):
  assert 'has neither' in refusal(tmp_path)
  (tmp_path / 'model.safetensors').write_bytes(b'not a model at all')
  assert 'is not a whole safetensors file' in refusal(tmp_path)
  (tmp_path / 'model.safetensors').write_bytes(b'')
  assert 'is not a whole safetensors file' in refusal(tmp_path)


WHOLE = (FIXTURES / 'qwen2' / 'model.safetensors').read_bytes()


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, len(WHOLE) - 1))
def test_every_truncation_is_refused(tmp_path_factory, cut):
  """fault 55"""
  directory = tmp_path_factory.getbasetemp() / 'cut'
  directory.mkdir(exist_ok=True)
  (directory / 'model.safetensors').write_bytes(WHOLE[:cut])
  refusal(directory)


@settings(max_examples=200, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=4))
def test_corruption_is_refused_or_harmless(tmp_path_factory, changes):
  raw = bytearray(WHOLE)
  for position, byte in changes:
    raw[position] = byte
  directory = tmp_path_factory.getbasetemp() / 'corrupt'
  directory.mkdir(exist_ok=True)
  (directory / 'model.safetensors').write_bytes(raw)
  try:
    source = SafetensorsDirectory(directory)
  except InputError as error:
    assert '\n' not in str(error)
  else:
    for name in source.shapes:
      if source.problem(name) is None:
        assert source.read(name).shape == source.shapes[name]
