"""Encoder-decoders from Hugging Face directories, against transformers (experiments/peers/record_t5.py)."""

import json
from pathlib import Path
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.convert import convert
from models.config import EncDecConfig
from models.distance_bias import bucket_ranges
from models.encdec import EncDec
from models.errors import InputError
from models.loading import load_decoder
from models.loading.safetensors import SafetensorsDirectory, write_safetensors
from models.source import Source
from models.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[1] / 'fixtures' / 't5'
KINDS = ('v1_0', 'v1_1', 'flan')


@jax.jit
def passes(model: EncDec, source: Source, tokens_BT) -> tuple[jax.Array, jax.Array]:
  """The encoder's vectors, and the logits by way of the caches."""
  batch, width = tokens_BT.shape
  cache = model.init_cache(batch, width, source)
  position_BT = jnp.broadcast_to(jnp.arange(width), (batch, width))
  output = model(tokens_BT, position_BT, cache.causal_mask(width), cache)
  return model.encode(source), output.logits_BRV


def computed(model: EncDec, record: dict) -> tuple[np.ndarray, np.ndarray]:
  source = Source(jnp.asarray(record['source']), jnp.asarray(record['lengths']))
  with jax.default_matmul_precision('highest'):
    return jax.device_get(passes(model, source, jnp.asarray(record['target'])))


def recorded(kind: str) -> dict:
  with np.load(FIXTURES / kind / 'recorded.npz') as file:
    return dict(file)


def error(found: np.ndarray, expected: np.ndarray) -> float:
  return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize('kind', KINDS)
def test_vectors_and_logits(kind):
  """Sources of 7, 150 and 1 tokens in one batch, texts of 140: both sides past the longest distance."""
  model, config = load_decoder(FIXTURES / kind)
  record = recorded(kind)
  encoded_BSD, logits_BTV = computed(model, record)
  seen_BS = np.arange(encoded_BSD.shape[1]) < record['lengths'][:, None]
  assert error(encoded_BSD[seen_BS], record['encoded'][seen_BS]) < 1e-5
  assert error(logits_BTV, record['logits']) < 1e-5
  assert isinstance(config, EncDecConfig) and config.head_dim * config.num_heads != config.width


def test_kinds_differ_in_what_their_configs_say():
  configs = {kind: load_decoder(FIXTURES / kind)[1] for kind in KINDS}
  assert [(config.mlp, config.tied_embedding, config.scaled_output) for config in configs.values()] == [
      ('relu', True, True), ('geglu', False, False), ('geglu', False, False)]
  assert configs['v1_1'].num_layers == 3 and configs['v1_1'].num_encoder_layers == 2
  assert (configs['flan'].num_buckets, configs['flan'].max_distance) == (16, 40)


@pytest.mark.parametrize(('kind', 'changes'), [
    ('v1_0', {'scaled_output': False}), ('v1_1', {'scaled_output': True}), ('flan', {'max_distance': 30}),
    ('flan', {'norm_eps': 1e-2})], ids=str)
def test_recorded_logits_notice(kind, changes):
  """Each field that could be read and not applied moves the logits far beyond the tolerance."""
  model, _ = load_decoder(FIXTURES / kind, **changes)
  assert error(computed(model, recorded(kind))[1], recorded(kind)['logits']) > 1e-4


@pytest.mark.parametrize('name', ['both_32_128', 'both_16_40', 'both_8_20', 'both_64_250', 'past_32_128', 'past_16_40',
                                  'past_8_20', 'past_64_250'])
def test_buckets(name):
  """Every distance from -300 to 300, also where a logarithm is a whole number."""
  side, count, most = name.split('_')
  low_X, high_X = bucket_ranges(int(count), int(most), side == 'both')
  distance_S = np.arange(-300, 301)
  inside_SX = (distance_S[:, None] >= low_X) & (distance_S[:, None] < high_X)
  assert (inside_SX.sum(axis=1) == 1).all()
  with np.load(FIXTURES / 'buckets.npz') as file:
    np.testing.assert_array_equal(np.argmax(inside_SX, axis=1), file[name])


def test_our_checkpoint_holds_the_same(tmp_path):
  convert(FIXTURES / 'v1_1', tmp_path / 'ours', 'float32')
  (again, config), (first, before) = load_decoder(tmp_path / 'ours'), load_decoder(FIXTURES / 'v1_1')
  assert config == before
  for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(first), strict=True):
    np.testing.assert_array_equal(one, other)


def copied(tmp_path: Path, kind: str, **fields) -> Path:
  """A directory with some fields of its config changed; None takes one away."""
  shutil.copytree(FIXTURES / kind, tmp_path / kind)
  path = tmp_path / kind / 'config.json'
  config = json.loads(path.read_text()) | fields
  path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
  return tmp_path / kind


def edited(tmp_path: Path, kind: str, change) -> Path:
  """A directory with its tensors changed."""
  directory = copied(tmp_path, kind)
  source = SafetensorsDirectory(directory)
  tensors = {name: source.read(name) for name in source.shapes}
  change(tensors)
  for path in directory.glob('*.safetensors*'):
    path.unlink()
  write_safetensors(directory / 'model.safetensors', tensors)
  return directory


@pytest.mark.parametrize(('kind', 'change', 'message'), [
    ('v1_0', lambda t: t.pop('decoder.block.1.layer.1.EncDecAttention.k.weight'), 'k.weight.* is missing'),
    ('v1_1', lambda t: t.pop('lm_head.weight'), 'lm_head.weight.* is missing'),
    ('v1_1', lambda t: t.update(extra=np.zeros(3, np.float32)), "'extra' is not part of the model"),
    ('v1_0', lambda t: t.update({'lm_head.weight': t['shared.weight'] + 1}), "differs from 'shared.weight'"),
    ('flan', lambda t: t.update({'encoder.embed_tokens.weight': t['shared.weight'] * 2}), 'encoder.embed_tokens'),
    ('flan', lambda t: t.update({'shared.weight': t['shared.weight'][:9]}), 'shared.weight.* has shape'),
    ('v1_0', lambda t: t.update({'encoder.block.0.layer.1.DenseReluDense.wi_0.weight': t['shared.weight']}), 'wi_0')])
def test_tensors_that_are_refused(tmp_path, kind, change, message):
  with pytest.raises(InputError, match=message) as caught:
    load_decoder(edited(tmp_path, kind, change))
  assert '\n' not in str(caught.value)


def test_copies_that_may_be_there(tmp_path):
  """Old checkpoints hold the embedding up to four times, and a table of distances that is never read."""
  def add(tensors):
    for name in ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight', 'lm_head.weight'):
      tensors[name] = tensors['shared.weight']
    tensors['decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'] = np.ones((32, 3), np.float32)
  model, _ = load_decoder(edited(tmp_path, 'v1_0', add))
  assert error(computed(model, recorded('v1_0'))[1], recorded('v1_0')['logits']) < 1e-5


@pytest.mark.parametrize(('fields', 'message'), [
    ({'feed_forward_proj': 'gated-silu'}, 'feed_forward_proj'), ({'d_kv': None}, "no field 'd_kv'"),
    ({'num_heads': 0}, 'num_heads'), ({'quantization_config': {'bits': 8}}, 'quantization_config'),
    ({'model_type': 'bart'}, 'llama, mistral, qwen2, qwen3, t5')])
def test_configs_that_are_refused(tmp_path, fields, message):
  with pytest.raises(InputError, match=message):
    load_decoder(copied(tmp_path, 'v1_0', **fields))


@pytest.mark.parametrize('without', ['tokenizer.json', 'spiece.model'])
def test_tokenizer(tmp_path, without):
  """From either file; a text ends in </s>, and gaps to fill in are tokens where they are asked for."""
  shutil.copytree(FIXTURES / 'tokenizer', tmp_path / 'it')
  (tmp_path / 'it' / without).unlink()
  tokenizer = Tokenizer.from_hf(tmp_path / 'it')
  record = json.loads((FIXTURES / 'tokenizer' / 'recorded.json').read_text())
  for text, ids in zip(record['texts'], record['ids'], strict=True):
    assert tokenizer.encode(text, add_special=True, parse_special=True) == ids
  assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.num_tokens) == (0, 1, 400)
  assert tokenizer.vocab[399] == '<extra_id_0>' and tokenizer.vocab[300] == '<extra_id_99>'
  assert tokenizer.decode(tokenizer.encode('for x in range(10):', add_special=True)) == 'for x in range(10):'
