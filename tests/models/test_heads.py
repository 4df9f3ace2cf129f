"""Medusa heads: what they compute, and what is read and refused of their checkpoints.

Recorded by `experiments.peers.record_medusa` with PyTorch: `own` 5 heads with LM heads in float16, whose config names
2; `shared` 3 heads of two blocks that borrow it; `inside` 4 heads among a model's tensors, in bfloat16 and two files.
"""

import collections
import json
from pathlib import Path
import pickle
import re
import shutil
import zipfile

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from launch.mesh import make_mesh
from models.config import MedusaConfig
from models.decoder import Decoder
from models.errors import InputError
from models.heads import MedusaHeads
from models.loading.medusa import load_medusa, save_medusa
from models.loading.torch_file import TorchFile
from models.random_weights import new_module
from models.sharding import shardings
from tests import toys

FIXTURES = Path(__file__).parents[1] / 'fixtures' / 'medusa'
LAYOUTS = {'own': MedusaConfig(5, 24, 40), 'shared': MedusaConfig(3, 24, 40, 2, own_head=False),
           'inside': MedusaConfig(4, 24, 40)}
WIDTH, VOCAB = 24, 40


def recorded(layout: str) -> dict[str, np.ndarray]:
  with np.load(FIXTURES / layout / 'logits.npz') as file:
    return dict(file)


def by_numpy(tensors: dict[str, np.ndarray], layers: int, hidden_TD: np.ndarray, lm_head_VD: np.ndarray) -> np.ndarray:
  """[K, T, V]: the forward pass written from the paper, in float64, on tensors by their published names."""
  outputs = []
  for head in range(1 + max(int(name.split('.')[0]) for name in tensors)):
    x_TD = hidden_TD.astype(np.float64)
    for layer in range(layers):
      inner_TD = x_TD @ tensors[f'{head}.{layer}.linear.weight'].T + tensors[f'{head}.{layer}.linear.bias']
      x_TD = x_TD + inner_TD / (1 + np.exp(-inner_TD))
    outputs.append(x_TD @ tensors.get(f'{head}.{layers}.weight', lm_head_VD).T)
  return np.stack(outputs)


def outputs(heads: MedusaHeads, hidden_TD: np.ndarray, lm_head_VD: np.ndarray) -> np.ndarray:
  """[K, T, V]"""
  logits_BTKV = jax.jit(MedusaHeads.__call__)(heads, jnp.asarray(hidden_TD)[None], jnp.asarray(lm_head_VD))
  return np.moveaxis(np.asarray(logits_BTKV[0]), 1, 0)


def random_tensors(config: MedusaConfig, seed: int = 1) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.standard_normal(shape, np.float32) * WIDTH ** -0.5
  tensors = {}
  for head in range(config.num_heads):
    for layer in range(config.num_layers):
      tensors[f'{head}.{layer}.linear.weight'] = draw(WIDTH, WIDTH)
      tensors[f'{head}.{layer}.linear.bias'] = draw(WIDTH)
    if config.own_head:
      tensors[f'{head}.{config.num_layers}.weight'] = draw(VOCAB, WIDTH)
  return tensors


def write(directory: Path, tensors: dict[str, np.ndarray], **fields) -> Path:
  directory.mkdir(exist_ok=True)
  safetensors.numpy.save_file(tensors, directory / 'medusa_lm_head.safetensors')
  if fields:
    (directory / 'config.json').write_text(json.dumps(fields))
  return directory


def refusal(path: Path, width: int = WIDTH, vocab: int = VOCAB) -> str:
  """The one line that refuses the heads."""
  with pytest.raises(InputError) as caught:
    load_medusa(path, width, vocab)
  assert '\n' not in str(caught.value)
  return str(caught.value)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_outputs_are_those_of_pytorch(layout):
  """Fault 37: each published layout, read from its own kind of file, without PyTorch."""
  heads, record = load_medusa(FIXTURES / layout, WIDTH, VOCAB), recorded(layout)
  assert heads.config == LAYOUTS[layout]
  computed = outputs(heads, record['hidden'], record['lm_head'])
  np.testing.assert_allclose(computed, record['logits'], rtol=0, atol=1e-5 * np.abs(record['logits']).max())


@pytest.mark.parametrize('own_head', [True, False], ids=['own', 'shared'])
@pytest.mark.parametrize('layers', [1, 2])
@pytest.mark.parametrize('prefix', ['', 'medusa_head.'])
def test_outputs_are_those_of_numpy(tmp_path, own_head, layers, prefix):
  config = MedusaConfig(3, WIDTH, VOCAB, layers, own_head)
  tensors, record = random_tensors(config), recorded('own')
  write(tmp_path, {prefix + name: tensor for name, tensor in tensors.items()})
  heads = load_medusa(tmp_path, WIDTH, VOCAB)
  assert heads.config == config
  expected = by_numpy(tensors, layers, record['hidden'], record['lm_head'])
  computed = outputs(heads, record['hidden'], record['lm_head'])
  np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_new_heads_say_what_the_target_says():
  """Fault 37: blocks start as nothing, biases included; the borrowed LM head then gives the target's logits, bit for
  bit."""
  target, config = toys.target(), MedusaConfig(3, toys.CONFIG.width, toys.VOCAB, 2, own_head=False)
  hidden_BTD = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, toys.CONFIG.width)), jnp.float32)
  logits_BTKV = MedusaHeads(config, nnx.Rngs(0))(hidden_BTD, target.lm_head)
  expected_BRV = target.logits(jnp.repeat(hidden_BTD, 3, axis=1))
  np.testing.assert_array_equal(logits_BTKV[:, 0], expected_BRV)


def test_tied_targets_lend_their_embedding():
  model = Decoder(toys.DecoderConfig.tiny(tied_embedding=True), nnx.Rngs(0))
  np.testing.assert_array_equal(model.lm_head, model.embed[...])
  np.testing.assert_array_equal(toys.target().lm_head, toys.target().head[...])


@pytest.mark.parametrize('layout', LAYOUTS)
def test_saved_heads_come_back(tmp_path, layout):
  """As safetensors in the published layout, in their own dtype, bit for bit."""
  heads = load_medusa(FIXTURES / layout, WIDTH, VOCAB, dtype='bfloat16')
  save_medusa(heads, tmp_path / 'saved', 'some/model')
  again = load_medusa(tmp_path / 'saved', WIDTH, VOCAB, dtype='bfloat16')
  assert again.config == heads.config
  jax.tree.map(np.testing.assert_array_equal, again, heads)
  stored = safetensors.numpy.load_file(tmp_path / 'saved' / 'medusa_lm_head.safetensors')
  assert '0.0.linear.weight' in stored and all(tensor.dtype == 'bfloat16' for tensor in stored.values())
  assert (f'0.{heads.config.num_layers}.weight' in stored) == heads.config.own_head


@pytest.mark.parametrize('own_head', [True, False], ids=['own', 'shared'])
def test_outputs_on_a_mesh(tmp_path, own_head):
  """Blocks and LM heads are split over `model`; loaded or made there, they say the same."""
  config, record = MedusaConfig(2, WIDTH, VOCAB, 2, own_head), recorded('own')
  write(tmp_path, random_tensors(config))
  expected = outputs(load_medusa(tmp_path, WIDTH, VOCAB), record['hidden'], record['lm_head'])
  mesh = make_mesh(2, 4)
  with jax.set_mesh(mesh):
    heads = load_medusa(tmp_path, WIDTH, VOCAB, mesh=mesh)
    block = heads.heads[1].blocks[0]
    assert block.residual[...].sharding.shard_shape((WIDTH, WIDTH)) == (WIDTH // 4, WIDTH)
    computed = outputs(heads, record['hidden'], record['lm_head'])
  np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
  made = new_module(lambda: MedusaHeads(config, nnx.Rngs(0)), mesh)
  jax.tree.map(lambda leaf, place: leaf.sharding == place or pytest.fail('misplaced'), nnx.state(made),
               shardings(nnx.state(made), mesh))


def test_file_of_heads_by_itself():
  heads = load_medusa(FIXTURES / 'own' / 'medusa_lm_head.pt', WIDTH, VOCAB)
  assert heads.config == LAYOUTS['own']


def test_wrong_target():
  refused = refusal(FIXTURES / 'own', width=32)
  assert "made for 'some/model'" in refused and "'0.0.linear.weight' has shape (24, 24), not (32, 32)" in refused
  assert "'0.1.weight' has shape (40, 24), not (41, 24)" in refusal(FIXTURES / 'own', vocab=41)


@pytest.mark.parametrize(('change', 'message'), [
    (dict(drop='1.0.linear.bias'), "'1.0.linear.bias' is missing"),
    (dict(drop='2.1.weight'), 'mixes two layouts: head 0 has an LM head of its own, head 2 has none'),
    (dict(add={'0.1.linear.weight': np.zeros((WIDTH, WIDTH), np.float32)}), "'0.1.linear.bias' is missing"),
    (dict(add={'0.norm.weight': np.zeros(WIDTH, np.float32)}), "'0.norm.weight' is not part of a head"),
    (dict(add={'0.0.linear.bias': np.zeros(WIDTH, np.int64)}), "'0.0.linear.bias' has no floating-point type"),
    (dict(fields=dict(medusa_num_heads=4)), 'names medusa_num_heads=4, and'),
    (dict(fields=dict(medusa_num_layers=2)), 'names medusa_num_layers=2, and'),
    (dict(fields=dict(medusa_num_heads='many')), "'medusa_num_heads' should be of type int"),
], ids=lambda value: '' if isinstance(value, str) else '-'.join(value))
def test_malformed_heads(tmp_path, change, message):
  """Fault 37: a mixed file among them."""
  tensors = random_tensors(MedusaConfig(3, WIDTH, VOCAB)) | change.get('add', {})
  tensors.pop(change.get('drop'), None)
  assert message in refusal(write(tmp_path, tensors, **change.get('fields', {})))


def test_no_heads(tmp_path):
  assert 'has no medusa_lm_head.safetensors' in refusal(tmp_path)
  assert 'does not exist' in refusal(tmp_path / 'nowhere')
  write(tmp_path, {'model.norm.weight': np.ones(WIDTH, np.float32)})
  assert 'holds no medusa heads' in refusal(tmp_path)


@pytest.mark.parametrize(('field', 'value'), [('num_heads', 0), ('num_layers', 0), ('width', -1), ('vocab_size', 0)])
def test_config_is_checked(field, value):
  with pytest.raises(InputError, match=f'{field}={value} must be positive'):
    MedusaConfig(**(dict(num_heads=2, width=4, vocab_size=5) | {field: value}))


class Calls:
  """Pickled, a call of `os.system`."""

  def __init__(self, command: str):
    self.command = command

  def __reduce__(self):
    import os
    return os.system, (self.command,)


def write_torch(path: Path, pickled: bytes, storages: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
  with zipfile.ZipFile(path, 'w', compression) as archive:
    archive.writestr('heads/data.pkl', pickled)
    for key, raw in storages.items():
      archive.writestr(f'heads/data/{key}', raw)
  return path


def test_nothing_of_a_pickle_is_run(tmp_path):
  """A file that calls a function is refused, and the function is not called."""
  trace = tmp_path / 'trace'
  path = write_torch(tmp_path / 'evil.pt', pickle.dumps({'0.0.linear.weight': Calls(f'touch {trace}')}), {})
  refused = refusal(path)
  assert 'system' in refused and 'only tensors, storages and dictionaries are read' in refused
  assert not trace.exists()


def tensor_pickle(offset: int = 0, shape=(2, 3), strides=(3, 1), count: int = 6, key: str = '0',
                  storage: str = 'FloatStorage') -> bytes:
  """A dictionary of one tensor as PyTorch pickles it, opcode by opcode."""
  def text(value: str) -> bytes:
    return b'X' + len(value).to_bytes(4, 'little') + value.encode()

  def number(value: int) -> bytes:
    return b'J' + value.to_bytes(4, 'little', signed=True)

  row = lambda values: b'(' + b''.join(map(number, values)) + b't'
  kind = f'ctorch\n{storage}\n'.encode()
  persistent = b'(' + text('storage') + kind + text(key) + text('cpu') + number(count) + b'tQ'
  hooks = b'ccollections\nOrderedDict\n)R'
  tensor = (b'ctorch._utils\n_rebuild_tensor_v2\n(' + persistent + number(offset) + row(shape) + row(strides) + b'\x89'
            + hooks + b'tR')
  return b'\x80\x02}' + text('a') + tensor + b's.'


def test_tensors_are_views_of_storages(tmp_path):
  numbers = np.arange(6, dtype=np.float32)
  path = write_torch(tmp_path / 'a.pt', tensor_pickle(), {'0': numbers.tobytes()})
  np.testing.assert_array_equal(TorchFile(path).read('a'), numbers.reshape(2, 3))
  path = write_torch(tmp_path / 'b.pt', tensor_pickle(1, (2, 2), (1, 3)), {'0': numbers.tobytes()})
  np.testing.assert_array_equal(TorchFile(path).read('a'), [[1, 4], [2, 5]])


@pytest.mark.parametrize(('changes', 'message'), [
    (dict(offset=1), 'reaches past the end of its storage'), (dict(shape=(2, 4)), 'reaches past'),
    (dict(offset=-1), 'malformed'), (dict(shape=(2, -3)), 'malformed'), (dict(strides=(3,)), 'strides'),
    (dict(shape=(9, 9), strides=(0, 0)), 'larger than its storage'),
    (dict(count=7), 'are missing or of another number'),
    (dict(key='1'), 'are missing or of another number'), (dict(key='../0'), 'are missing or of another number'),
    (dict(storage='DoubleStorage'), 'are missing or of another number'), (dict(storage='nn'), "names 'torch.nn'")],
    ids=str)
def test_torch_tensors_without_their_bytes(tmp_path, changes, message):
  path = write_torch(tmp_path / 'a.pt', tensor_pickle(**changes), {'0': bytes(24)})
  with pytest.raises(InputError, match=re.escape(message)):
    TorchFile(path)


def test_other_files_than_torch(tmp_path):
  def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
      TorchFile(path)
    assert '\n' not in str(caught.value)
    return str(caught.value)

  (tmp_path / 'old.pt').write_bytes(pickle.dumps(collections.OrderedDict()))
  assert 'no whole zip archive' in refused(tmp_path / 'old.pt')
  assert 'it has no data.pkl' in refused(
      write_torch(tmp_path / 'packed.pt', tensor_pickle(), {'0': bytes(24)}, zipfile.ZIP_DEFLATED))
  assert "entry 'a' is no tensor" in refused(write_torch(tmp_path / 'number.pt', pickle.dumps({'a': 1}), {}))
  assert 'no dictionary' in refused(write_torch(tmp_path / 'list.pt', pickle.dumps([1]), {}))
  assert 'is refused' in refused(write_torch(tmp_path / 'cut.pt', tensor_pickle()[:-9], {'0': bytes(24)}))
  assert 'has neither pytorch_model.bin nor' in refused(tmp_path)


def test_damaged_bytes_are_noticed(tmp_path):
  path = write_torch(tmp_path / 'a.pt', tensor_pickle(), {'0': b'x' * 24})
  path.write_bytes(path.read_bytes().replace(b'x' * 24, b'y' * 24))
  with pytest.raises(InputError, match='cannot be read'):
    TorchFile(path).read('a')


def test_missing_part(tmp_path):
  shutil.copytree(FIXTURES / 'inside', tmp_path / 'inside')
  (tmp_path / 'inside' / 'pytorch_model-00002-of-00002.bin').unlink()
  assert 'pytorch_model-00002-of-00002.bin cannot be read' in refusal(tmp_path / 'inside')
