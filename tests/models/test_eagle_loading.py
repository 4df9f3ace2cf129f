"""EAGLE heads in every published layout against what PyTorch made of them (experiments/peers/record_eagle.py), and
files that are broken."""

import dataclasses
import json
from pathlib import Path
import shutil

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import DecoderConfig, EagleConfig
from models.decoder import Decoder
from models.eagle import EagleHead, EagleWeights
from models.errors import InputError
from models.loading.eagle import load_eagle, read_taps, save_eagle
from models.loading.safetensors import SafetensorsDirectory, write_safetensors
from models.loading.torch_file import TorchFile
from tests.toys import random_toy

FIXTURES = Path(__file__).parents[1] / 'fixtures' / 'eagle'
LAYOUTS = sorted(path.name for path in FIXTURES.iterdir())
TARGET = DecoderConfig.tiny(vocab_size=48, width=32)


def recorded(layout: str) -> dict[str, np.ndarray]:
  with np.load(FIXTURES / layout / 'recorded.npz') as file:
    return dict(file)


def target_of(layout: str) -> Decoder:
  """A target with the embedding and LM head that were recorded; its layers do not matter here."""
  model, arrays = random_toy(TARGET), recorded(layout)
  model.embed, model.head = nnx.Param(jnp.asarray(arrays['embedding'])), nnx.Param(jnp.asarray(arrays['lm_head']))
  return model


@jax.jit
def guess(weights: EagleWeights, tokens_T, features_TD):
  count = len(tokens_T)
  cache = weights.head.init_cache(1, count)
  guessed_BTD, _ = weights(tokens_T[None], features_TD[None], jnp.arange(count)[None], cache.causal_mask(count), cache)
  return guessed_BTD[0], weights.logits(guessed_BTD)[0]


def outputs(weights: EagleWeights, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
  features_TD = weights.head.fuse(jnp.asarray(arrays['features'])[None])[0]
  guessed_TD, logits_TU = guess(weights, arrays['tokens'][0], features_TD)
  return dict(guessed=guessed_TD, logits=logits_TU, again=guess(weights, arrays['tokens'][1], guessed_TD)[0])


def assert_as_recorded(weights: EagleWeights, arrays: dict[str, np.ndarray]):
  for name, computed in outputs(weights, arrays).items():
    assert np.abs(computed - arrays[name]).max() < 1e-5 * max(1, np.abs(arrays[name]).max()), name


@pytest.mark.parametrize('layout', LAYOUTS)
def test_as_in_pytorch(layout, tmp_path):
  """From true features and from guesses; again after saving and loading."""
  target, arrays = target_of(layout), recorded(layout)
  head = load_eagle(FIXTURES / layout, target)
  config = head.config
  assert config.version == (3 if layout.startswith('eagle3') else 1)
  assert (config.own_embedding, config.fc_bias) == (layout == 'eagle3-narrow', layout == 'eagle1')
  ids = np.arange(48) if head.draft_ids is None else np.asarray(head.draft_ids[...])
  np.testing.assert_array_equal(ids, arrays['ids'])
  assert_as_recorded(EagleWeights.create(head, target), arrays)
  save_eagle(head, tmp_path)
  again = load_eagle(tmp_path, target)
  assert again.config == config
  jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(head))


def test_reduced_vocabulary_of_version_1(tmp_path):
  """The target's rows of a few tokens; the map comes with the head."""
  target, arrays = target_of('eagle2'), recorded('eagle2')
  full = load_eagle(FIXTURES / 'eagle2', target)
  head = EagleHead(dataclasses.replace(full.config, draft_vocab=3), nnx.Rngs(0))
  head.fc, head.layer = full.fc, full.layer
  head.draft_ids[...] = jnp.array([3, 7, 9])
  save_eagle(head, tmp_path)
  weights = EagleWeights.create(load_eagle(tmp_path, target), target)
  np.testing.assert_array_equal(weights.head.draft_ids[...], [3, 7, 9])
  logits_TU = outputs(weights, arrays)['logits']
  np.testing.assert_allclose(logits_TU, arrays['logits'][:, [3, 7, 9]], atol=1e-4)


def copy_of(layout: str, directory: Path, tensors: dict | None = None, drop: tuple[str, ...] = (),
            **fields) -> Path:
  """A copy as safetensors, with other tensors and fields of config.json."""
  source = FIXTURES / layout
  shutil.copytree(source, directory, dirs_exist_ok=True)
  read = TorchFile(source) if (source / 'pytorch_model.bin').is_file() else SafetensorsDirectory(source)
  mine = {name: read.read(name) for name in read.shapes if name not in drop}
  (directory / 'pytorch_model.bin').unlink(missing_ok=True)
  write_safetensors(directory / 'model.safetensors', mine | (tensors or {}))
  config = json.loads((directory / 'config.json').read_text()) | fields
  (directory / 'config.json').write_text(json.dumps(config))
  return directory


OFFSETS = recorded('eagle3')['ids'] - np.arange(20)
BROKEN = {
    'missing': ('eagle2', dict(drop=('layers.0.mlp.up_proj.weight',)), "'layers.0.mlp.up_proj.weight' is missing"),
    'misshapen': ('eagle2', dict(tensors={'fc.weight': np.zeros((32, 65), np.float32)}), r'\(32, 65\), not \(32, 64\)'),
    'more layers': ('eagle2', dict(tensors={'layers.1.mlp.up_proj.weight': np.zeros(3, np.float32)}),
                    "'layers.1.mlp.up_proj.weight' is not part"),
    'whole numbers': ('eagle2', dict(tensors={'fc.weight': np.zeros((32, 64), np.int64)}), 'no floating-point type'),
    'no head': ('eagle2', dict(drop=tuple(SafetensorsDirectory(FIXTURES / 'eagle2').shapes)), 'no EAGLE head'),
    'bias': ('eagle1', dict(bias=False), "'bias' is False"),
    'no map (fault 40)': ('eagle3', dict(drop=('d2t', 't2d')), "20 of 48 tokens, and has no tensor 'd2t'"),
    'map of another size': ('eagle3', dict(tensors={'d2t': OFFSETS[:-1]}), 'no map of 20 tokens'),
    'map past the end': ('eagle3', dict(tensors={'d2t': OFFSETS + 40}), 'to 20 of 48 tokens'),
    'map with a token twice': ('eagle3', dict(tensors={'d2t': OFFSETS * 0 - np.arange(20)}), 'to 20 of 48 tokens'),
    'maps that differ': ('eagle3', dict(tensors={'t2d': np.arange(48) < 20}), "'t2d' names other tokens"),
    'other vocabulary': ('eagle3', dict(vocab_size=49), '49 tokens and vectors of 32, this one has 48 and 32'),
    'other target': ('eagle3', dict(target_hidden_size=64), '48 tokens and vectors of 64, this one has 48 and 32'),
    'no embedding': ('eagle3-narrow', dict(drop=('embed_tokens.weight',)), "'embed_tokens.weight' is missing"),
}


@pytest.mark.parametrize('case', BROKEN)
def test_broken(case, tmp_path):
  layout, changes, message = BROKEN[case]
  with pytest.raises(InputError, match=message) as error:
    load_eagle(copy_of(layout, tmp_path, **changes), target_of(layout))
  assert '\n' not in str(error.value)


def test_no_files(tmp_path):
  with pytest.raises(InputError, match=r'neither model\.safetensors nor pytorch_model.bin'):
    load_eagle(tmp_path, target_of('eagle2'))
  with pytest.raises(InputError, match='is no directory'):
    load_eagle(tmp_path / 'nothing', target_of('eagle2'))


def test_embedding_that_differs(tmp_path):
  """It is the head's own then."""
  tensors = {'embed_tokens.weight': np.ones((48, 32), np.float32)}
  head = load_eagle(copy_of('eagle2', tmp_path, tensors), target_of('eagle2'))
  np.testing.assert_array_equal(head.embed[...], tensors['embed_tokens.weight'])


def test_taps(tmp_path):
  assert read_taps(FIXTURES / 'eagle2', 32) == ()
  assert read_taps(FIXTURES / 'eagle3', 32) == EagleConfig.published_taps(32) == (1, 15, 28)
  named = copy_of('eagle3', tmp_path, eagle_config={'eagle_aux_hidden_state_layer_ids': [3, 1, 2]})
  assert read_taps(named, 3) == (0, 1, 2)
  with pytest.raises(InputError, match='the target has 4 layers'):
    read_taps(FIXTURES / 'eagle3', 4)
