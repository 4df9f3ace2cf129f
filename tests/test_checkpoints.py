"""Our checkpoints: any mesh to any mesh, layers in their places, and nothing unfinished taken for finished."""

import dataclasses
import json
from pathlib import Path
import signal
import subprocess
import sys
import warnings

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
import numpy as np
import pytest

from models.config import DecoderConfig, RopeScaling
from models.decoder import Decoder
from models.errors import InputError
from models.loading import load_decoder, orbax
from models.random_weights import random_decoder as random_decoder_of
from models.sharding import shardings
from specdec.training.checkpoints import Checkpoints
from tests.models.random_decoder import random_decoder
from tests.toys import forward

# Orbax saves in threads whose event loops may be closed before their last callback.
pytestmark = pytest.mark.filterwarnings('ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning')
ROOT = Path(__file__).parents[1]
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
DEEP = DecoderConfig.tiny(vocab_size=16, width=32, num_layers=12, num_heads=8, num_kv_heads=4, head_dim=4)


def mesh_of(data: int, model: int) -> Mesh:
  devices = jax.devices()[:data * model]
  return jax.make_mesh((data, model), ('data', 'model'), axis_types=(AxisType.Auto,) * 2, devices=devices)


def on(mesh: Mesh, decoder: Decoder) -> Decoder:
  """The decoder, laid out on the mesh."""
  graph, state = nnx.split(decoder)
  return nnx.merge(graph, jax.device_put(state, shardings(state, mesh)))


def assert_same(left: Decoder, right: Decoder):
  for ours, theirs in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def refusal(call, *arguments, **named) -> str:
  with pytest.raises(InputError) as caught:
    call(*arguments, **named)
  assert '\n' not in str(caught.value)
  return str(caught.value)


@pytest.fixture(scope='module')
def deep() -> Decoder:
  return random_decoder(DEEP)


@pytest.fixture(scope='module')
def saved(deep, tmp_path_factory) -> Path:
  """Twelve layers, from a mesh of eight devices."""
  path = tmp_path_factory.mktemp('deep') / 'checkpoint'
  orbax.save_decoder(path, on(mesh_of(2, 4), deep))
  return path


@pytest.mark.parametrize('shape', [None, (4, 2), (2, 4), (1, 4), (1, 1)], ids=str)
def test_any_mesh_reads_it(deep, saved, shape):
  """fault 50: shards go where they belong; nobody asks how they lay when they were saved."""
  mesh = shape and mesh_of(*shape)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    again, config = load_decoder(saved, mesh=mesh)
  assert_same(again, deep)
  assert config == again.config == DEEP
  if mesh is None:
    assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(again))
  else:
    state = nnx.state(again)
    for leaf, place in zip(jax.tree.leaves(state), jax.tree.leaves(shardings(state, mesh)), strict=True):
      assert leaf.sharding.is_equivalent_to(place, leaf.ndim)


def test_more_than_ten_layers_stay_in_order(deep, saved):
  """Each of the twelve layers is the one that was saved; sorted as strings layer 10 would be the third."""
  again, _ = load_decoder(saved)
  for layer in range(12):
    np.testing.assert_array_equal(again.layers[layer].attn.out[...], deep.layers[layer].attn.out[...])
  names = list(orbax.structure(saved))
  layers = [name.split('.')[1] for name in names if name.endswith('.attn.qkv')]
  assert layers == [str(layer) for layer in range(12)]


LIST = """
import sys, warnings
import jax
warnings.simplefilter('error')
assert len(jax.devices()) == 1
from models.loading import load_decoder, orbax
shapes = orbax.structure(sys.argv[1])
print(len(shapes), shapes['layers.11.attn.qkv'].shape, shapes['embed'].dtype)
decoder, _ = load_decoder(sys.argv[1])
print(float(decoder.layers[10].mlp.down[...].sum()))
"""


def test_one_device_lists_and_reads_it(deep, saved):
  """fault 50: a process with one device, after eight."""
  done = subprocess.run([sys.executable, '-c', LIST, saved], cwd=ROOT, capture_output=True, text=True,
                        env={'JAX_PLATFORMS': 'cpu', 'PATH': '', 'HOME': str(saved.parent)})
  assert done.returncode == 0 and not done.stderr, done.stderr
  listed, total = done.stdout.splitlines()
  assert listed == f'{2 + 12 * 6 + 1} (4, 4, 4, 32) float32'
  assert float(total) == pytest.approx(float(deep.layers[10].mlp.down[...].sum()), rel=1e-5)


@pytest.mark.parametrize('changes', [
    dict(dtype='bfloat16'), dict(tied_embedding=True, qkv_bias=True), dict(qk_norm=True, windows=(None, 3)),
    dict(positions='relative', mlp='gelu', dtype='bfloat16'),
    dict(rope_scaling=RopeScaling('yarn', 8.0, 64, attention_factor=1.5))], ids=str)
def test_every_bit_comes_back(tmp_path, changes):
  """fault 56: bfloat16 stays bfloat16; what Hugging Face cannot express is kept too."""
  decoder = random_decoder(DecoderConfig.tiny(**changes))
  orbax.save_decoder(tmp_path / 'it', decoder)
  again, config = load_decoder(tmp_path / 'it', dtype=decoder.config.dtype)
  assert config == decoder.config
  assert_same(again, decoder)


def test_cast_once(tmp_path):
  decoder = random_decoder(DecoderConfig.tiny())
  orbax.save_decoder(tmp_path / 'it', decoder)
  again, config = load_decoder(tmp_path / 'it', dtype='bfloat16', attention_block=None, max_positions=64)
  assert config == dataclasses.replace(decoder.config, dtype='bfloat16', attention_block=None, max_positions=64)
  assert_same(again, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), decoder))


def edit(directory: Path, **changes):
  path = directory / 'model.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_another_architecture(tmp_path):
  path = tmp_path / 'it'
  orbax.save_decoder(path, random_decoder(DecoderConfig.tiny()))
  edit(path, ff_width=128)
  message = refusal(load_decoder, path)
  assert "'layers.0.mlp.down' has shape (32, 64), not (32, 128)" in message and '(4 parameters)' in message
  edit(path, ff_width=64, num_layers=3)
  assert "'layers.2.attn_norm' is missing" in refusal(load_decoder, path)
  edit(path, num_layers=1)
  assert 'is not part of the model' in refusal(load_decoder, path)
  edit(path, num_layers=2, legs=4)
  assert 'legs' in refusal(load_decoder, path)
  (path / 'model.json').write_text('{}')
  assert 'is not the config of a model' in refusal(load_decoder, path)


def test_where_nothing_may_be_written(tmp_path):
  path = tmp_path / 'it'
  decoder = random_decoder(DecoderConfig.tiny())
  orbax.save_decoder(path, decoder)
  assert 'holds a checkpoint already' in refusal(orbax.save_decoder, path, decoder)
  (tmp_path / 'notes.txt').write_text('mine')
  assert 'holds other files, such as' in refusal(orbax.save_decoder, tmp_path, decoder)
  assert 'cannot be written' in refusal(orbax.save_decoder, tmp_path / 'notes.txt', decoder)


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # of reads that nobody waits for
def test_damaged_weights(tmp_path, capfd):
  path = tmp_path / 'it'
  orbax.save_decoder(path, random_decoder(DecoderConfig.tiny()))
  for data in path.glob('weights/state/ocdbt.process_*/d/*'):
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2:] = b'?' * (len(raw) - len(raw) // 2)
    data.write_bytes(raw)
  assert 'weights is damaged: not all of it' in refusal(load_decoder, path)
  (path / 'weights' / 'state' / 'manifest.ocdbt').unlink()
  assert 'weights is damaged: it does not say' in refusal(load_decoder, path)
  assert not capfd.readouterr().err


KILLED = """
import sys
import jax
from models.config import DecoderConfig
from models.loading import orbax
from specdec.training.checkpoints import Checkpoints
from tests.models.random_decoder import random_decoder
orbax.IN_FLIGHT = 1  # a batch per parameter
seen = 0
batches = orbax._batches
def slow(parameters):
  for batch in batches(parameters):
    yield batch
    global seen
    seen += 1
    if seen == 3:
      print('three are written', flush=True)
      sys.stdin.read()
orbax._batches = slow
Checkpoints(sys.argv[1], keep=1).save_state(200, random_decoder(DecoderConfig.tiny(), seed=1), {})
"""


def kill_in_the_middle_of_step_200(directory: Path):
  process = subprocess.Popen([sys.executable, '-c', KILLED, directory], cwd=ROOT, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
  assert process.stdout.readline() == 'three are written\n'
  process.kill()
  assert process.wait() == -signal.SIGKILL
  process.stdin.close()
  process.stdout.close()


def test_a_save_that_was_killed(tmp_path, capfd):
  """fault 57: the finished step is used, and said; it outlives `keep`; the killed step can be saved again."""
  first, second = (random_decoder(DecoderConfig.tiny(), seed) for seed in (0, 2))
  checkpoints = Checkpoints(tmp_path, keep=1)
  assert checkpoints.latest() is None
  checkpoints.save_state(100, first, {})
  kill_in_the_middle_of_step_200(tmp_path)
  assert checkpoints.path(200).is_dir() and checkpoints.steps() == [100]
  capfd.readouterr()
  assert checkpoints.latest() == 100
  assert capfd.readouterr().err == f'{checkpoints.path(200)} was never finished: going on from step 100\n'
  assert_same(checkpoints.load_state(100, second), first)
  assert 'cannot be read' in refusal(checkpoints.load_facts, 200)
  checkpoints.save_state(200, second, {})
  assert checkpoints.latest() == 200 and checkpoints.steps() == [200]
  assert not capfd.readouterr().err
  assert_same(checkpoints.load_state(200, first), second)
  assert 'cannot be read' in refusal(checkpoints.load_facts, 100)


def test_without_the_mark_it_is_not_finished(tmp_path, capfd):
  """Weights whole or not: what decides is the mark, which is written last."""
  checkpoints = Checkpoints(tmp_path, keep=2)
  decoder = random_decoder(DecoderConfig.tiny())
  checkpoints.save_state(1, decoder, {})
  (checkpoints.path(1) / orbax.TRAINING_MARK).unlink()
  assert checkpoints.latest() is None
  assert 'there is no earlier one' in capfd.readouterr().err


def test_keep(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=2)
  decoder = random_decoder(DecoderConfig.tiny())
  for step in (9, 10, 11):
    checkpoints.save_state(step, decoder, {})
  assert checkpoints.steps() == [10, 11] and checkpoints.latest() == 11
  assert 'keep 1 or more' in refusal(Checkpoints, tmp_path, keep=0)


@pytest.mark.parametrize('model, kv_heads', [(2, 2), (4, 4), (8, 8)])
def test_repeated_heads(tmp_path, model, kv_heads):
  """fault 49: 8 query heads on 2 kv heads; each device gets as many of either, and the logits stay."""
  config = dataclasses.replace(DEEP, num_layers=2, num_kv_heads=2, qkv_bias=True)
  decoder = random_decoder(config)
  orbax.save_decoder(tmp_path / 'it', decoder)
  mesh = mesh_of(1, model)
  again, placed = load_decoder(tmp_path / 'it', mesh=mesh)
  assert placed == dataclasses.replace(config, num_kv_heads=kv_heads)
  for weight in (again.layers[1].attn.qkv[...], again.layers[1].attn.qkv_bias[...]):
    assert weight.addressable_shards[0].data.shape[:2] == (kv_heads // model, 8 // kv_heads + 2)
  with jax.set_mesh(mesh):
    logits = forward(again, TOKENS)
  np.testing.assert_allclose(logits, forward(decoder, TOKENS), atol=1e-5, rtol=1e-5)


def test_heads_that_no_repeating_spreads(tmp_path):
  """fault 49: 3 heads on 8 devices, as SmolLM2 has 9: attention is whole on each, MLP and vocabulary are split."""
  config = DecoderConfig.tiny(vocab_size=16, num_heads=3, num_kv_heads=1, tied_embedding=True)
  decoder = random_decoder(config)
  orbax.save_decoder(tmp_path / 'it', decoder)
  mesh = mesh_of(1, 8)
  again, placed = load_decoder(tmp_path / 'it', mesh=mesh)
  assert placed == config
  layer = again.layers[0]
  for weight, theirs in ((layer.attn.qkv, (1, 5, 8, 32)), (layer.attn.out, (32, 3)), (layer.mlp.up, (2, 8, 32)),
                         (layer.mlp.down, (32, 8)), (again.embed, (2, 32))):
    assert [shard.data.shape for shard in weight[...].addressable_shards] == [theirs] * 8
  with jax.set_mesh(mesh):
    logits = forward(again, TOKENS)
  np.testing.assert_allclose(logits, forward(decoder, TOKENS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('changes', [
    dict(num_heads=8, num_kv_heads=2), dict(num_heads=8, num_kv_heads=8, positions='relative', mlp='gelu')],
                         ids=['repeated', 'relative'])
def test_random_weights_are_made_where_they_lie(changes):
  """The same model as on one device; no device gets more than its part."""
  config = DecoderConfig.tiny(vocab_size=16, **changes)
  mesh = mesh_of(2, 4)
  alone, spread = random_decoder_of(config, 5), random_decoder_of(config, 5, mesh)
  for leaf, place in zip(jax.tree.leaves(nnx.state(spread)), jax.tree.leaves(shardings(nnx.state(spread), mesh)),
                         strict=True):
    assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
  if spread.config == alone.config:
    assert_same(spread, alone)
  with jax.set_mesh(mesh):
    logits = forward(spread, TOKENS)
  np.testing.assert_allclose(logits, forward(alone, TOKENS), atol=1e-5, rtol=1e-5)
