"""From files to a `Decoder`: what must match, what is cast, where it is put, and what it costs."""

import json
from pathlib import Path
import subprocess
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from models.config import DecoderConfig, RopeScaling
from models.decoder import Decoder
from models.errors import InputError
from models.loading import export_hf, load_decoder
from tests.models.random_decoder import random_decoder

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / 'tests' / 'fixtures'


def make(directory: Path, **changes) -> Decoder:
  decoder = random_decoder(DecoderConfig.tiny(**changes))
  export_hf(decoder, directory)
  return decoder


def edit(directory: Path, **changes):
  """Replaces tensors (None removes one), keeping the rest of the file."""
  path = directory / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  for name, tensor in changes.items():
    tensors.pop(name, None)
    if tensor is not None:
      tensors[name] = tensor
  safetensors.numpy.save_file(tensors, path)


def refusal(path: Path, **changes) -> str:
  with pytest.raises(InputError) as caught:
    load_decoder(path, **changes)
  assert '\n' not in str(caught.value)
  return str(caught.value)


def same(left: Decoder, right: Decoder):
  for ours, theirs in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize('changes', [
    {}, dict(tied_embedding=True), dict(qkv_bias=True), dict(qk_norm=True), dict(windows=(3, 3)),
    dict(qkv_bias=True, windows=(None, 3)), dict(num_kv_heads=4, head_dim=16), dict(dtype='bfloat16'),
    dict(rope_scaling=RopeScaling('llama3', 8.0, 64)), dict(rope_scaling=RopeScaling('linear', 3.0)),
    dict(rope_scaling=RopeScaling('yarn', 8.0, 64, beta_fast=16.0, attention_factor=1.5, truncate=False))], ids=str)
def test_export_and_import_are_inverse(tmp_path, changes):
  """fault 51: config and every bit of the weights; fault 56: bfloat16 too."""
  decoder = make(tmp_path, **changes)
  again, config = load_decoder(tmp_path, dtype=decoder.config.dtype)
  assert config == decoder.config == again.config
  same(again, decoder)
  assert jax.tree.structure(again) == jax.tree.structure(decoder)


def test_what_hugging_face_cannot_express(tmp_path):
  for changes, named in ((dict(qkv_bias=True, qk_norm=True), 'both'), (dict(windows=(None, 3)), 'windows'),
                         (dict(qk_norm=True, windows=(2, 3)), 'one size'),
                         (dict(positions='relative', mlp='gelu'), 'rotary positions')):
    with pytest.raises(InputError, match=named):
      make(tmp_path, **changes)
  assert not any(tmp_path.iterdir())


def test_cast_once(tmp_path):
  """fault 56: f32, f16 and bf16 files arrive in the dtype that was asked for, rounded once."""
  make(tmp_path)
  values = np.linspace(-1.001, 1.001, 13 * 32).reshape(13, 32)
  for file_dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64):
    stored = values.astype(file_dtype)
    edit(tmp_path, **{'model.embed_tokens.weight': stored})
    for dtype in ('float32', 'bfloat16', 'float16'):
      decoder, config = load_decoder(tmp_path, dtype=dtype)
      assert config.dtype == dtype and {leaf.dtype.name for leaf in jax.tree.leaves(decoder)} == {dtype}
      np.testing.assert_array_equal(np.asarray(decoder.embed[...]), stored.astype(jnp.dtype(dtype)))


def test_dtype_must_be_a_float(tmp_path):
  make(tmp_path)
  for dtype in ('int8', 'float33'):
    assert f'dtype={dtype!r}' in refusal(tmp_path, dtype=dtype)


def test_config_changes(tmp_path):
  make(tmp_path)
  assert load_decoder(tmp_path, max_positions=64, attention_block=None)[1] == DecoderConfig.tiny(
      max_positions=64, attention_block=None)


def test_paths_that_lead_nowhere(tmp_path):
  assert 'does not exist' in refusal(tmp_path / 'none')
  assert 'does not exist' in refusal(tmp_path / 'none.gguf')
  (tmp_path / 'notes.txt').write_text('hello')
  assert 'neither a .gguf file nor a directory' in refusal(tmp_path / 'notes.txt')
  assert 'config.json cannot be read' in refusal(tmp_path)


def test_all_problems_in_one_line(tmp_path):
  """Missing, of a wrong shape, unreadable and unexpected tensors are counted, and the first few named."""
  make(tmp_path)
  edit(tmp_path, **{
      'model.norm.weight': None, 'model.layers.0.mlp.up_proj.weight': np.zeros((3, 3), np.float32),
      'model.layers.1.self_attn.q_proj.weight': np.zeros((32, 32), np.int8),
      'model.extra': np.zeros(2, np.float32), 'model.layers.0.rotary_emb.inv_freq': np.zeros(4, np.float32),
      'model.layers.0.masked_bias': np.array(-1e4, np.float32), 'model.layers.0.self_attn.bias': np.ones(2, bool)})
  message = refusal(tmp_path)
  assert '(4 tensors)' in message and 'and 1 more' in message
  assert "'model.layers.0.mlp.up_proj.weight' has shape (3, 3), not (64, 32)" in message
  assert "'model.layers.1.self_attn.q_proj.weight': dtype I8 is not supported" in message


def test_tied_embeddings(tmp_path):
  """fault 54: with and without lm_head, tied and untied."""
  tied = make(tmp_path, tied_embedding=True)
  assert load_decoder(tmp_path)[0].head is None
  embedding = np.asarray(tied.embed[...])
  edit(tmp_path, **{'lm_head.weight': embedding})
  same(load_decoder(tmp_path)[0], tied)
  edit(tmp_path, **{'lm_head.weight': embedding + np.eye(13, 32, dtype=np.float32)})
  assert "'lm_head.weight' differs from 'model.embed_tokens.weight'" in refusal(tmp_path)
  make(tmp_path)
  edit(tmp_path, **{'lm_head.weight': None})
  assert "'lm_head.weight' is missing" in refusal(tmp_path)


def test_fewer_rows_than_the_config_says(tmp_path):
  """fault 29: an error, no zero fill; what a wider file holds is not cut off either."""
  make(tmp_path)
  for rows in (12, 14):
    edit(tmp_path, **{'model.embed_tokens.weight': np.zeros((rows, 32), np.float32)})
    assert f"'model.embed_tokens.weight' has shape ({rows}, 32), not (13, 32)" in refusal(tmp_path)


def test_nothing_is_built_before_all_is_checked(tmp_path, monkeypatch):
  """fault 55"""
  make(tmp_path)
  path = tmp_path / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:-4])
  monkeypatch.setattr('models.abstract.Decoder', None)
  assert 'truncated' in refusal(tmp_path)


def test_each_device_gets_its_slice(tmp_path):
  decoder = make(tmp_path, vocab_size=16)
  mesh = jax.make_mesh((1, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])
  sharded, config = load_decoder(tmp_path, mesh=mesh)
  same(sharded, decoder)
  assert config == decoder.config
  for ours, theirs in ((sharded.layers[0].mlp.down, (32, 32)), (sharded.embed, (8, 32)), (sharded.final_norm, (32,)),
                       (sharded.layers[1].attn.qkv, (1, 4, 8, 32)), (sharded.layers[1].attn.out, (32, 16))):
    assert [shard.data.shape for shard in ours[...].addressable_shards] == [theirs] * 2


MEASURE = """
import re, sys
import jax
from models.loading import load_decoder
tiny, big = sys.argv[1:]
# not ru_maxrss: it begins with the size of the process that started this one
peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024
load_decoder(tiny)
before = peak()
model, _ = load_decoder(big)
print(peak() - before, *(leaf.nbytes for leaf in jax.tree.leaves(model)))
"""


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='reads Linux process accounts')
def test_peak_memory(tmp_path):
  """The host never holds a second copy, which is 106 MB: the model, two parameters at most, and 48 MB for all else."""
  make(tmp_path / 'tiny')
  make(tmp_path / 'big', vocab_size=8192, width=512, num_layers=6, num_heads=8, head_dim=64, ff_width=1536)
  out = subprocess.run(
      [sys.executable, '-c', MEASURE, tmp_path / 'tiny', tmp_path / 'big'], cwd=ROOT, check=True, text=True,
      capture_output=True, timeout=300).stdout
  extra, *sizes = map(int, out.split())
  assert sum(sizes) > 100e6
  assert extra < sum(sizes) + 2 * max(sizes) + 48e6, (extra, sum(sizes), max(sizes))


def test_config_json_of_the_export_is_plain(tmp_path):
  make(tmp_path)
  fields = json.loads((tmp_path / 'config.json').read_text())
  assert fields['model_type'] == 'llama' and fields['rope_scaling'] is None
