"""`launch.plan` of drafts from files: what is planned is what is loaded, and no weight is read for it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from flax import nnx
import jax
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import tiny
from launch.build import TINY, build_model
from launch.build_drafter import build_drafter
from launch.chips import CHIPS, GIB
from launch.compile_ahead import programs_of
from launch.drafter_fields import taps_of
from launch.mesh import make_mesh
from launch.plan import Sizes, caches_of
from launch.roofline import num_parameters, roofline
from launch.shapes import abstract_draft, abstract_target, device_bytes
from models.config import DecoderConfig, EagleConfig, MedusaConfig
from models.eagle import EagleHead
from models.errors import InputError
from models.heads import MedusaHeads
from models.loading.eagle import save_eagle
from models.loading.medusa import save_medusa
from models.loading.reduced import head_rows, save_reduced
from models.loading.safetensors import SafetensorsDirectory, write_safetensors
from models.random_weights import random_decoder

TARGET = DecoderConfig.tiny(**TINY)
LAYER = dataclasses.replace(TARGET, num_layers=1)
IDS = np.arange(10, 58, dtype=np.int32)
MEDUSA = {'medusa, own head': MedusaConfig(3, TARGET.width, TARGET.vocab_size, 2),
          'medusa': MedusaConfig(3, TARGET.width, TARGET.vocab_size, own_head=False),
          'medusa, reduced': MedusaConfig(3, TARGET.width, TARGET.vocab_size, own_head=False, draft_vocab=len(IDS))}
EAGLE = {'eagle': EagleConfig(LAYER, fc_bias=True), 'eagle, reduced': EagleConfig(LAYER, draft_vocab=len(IDS)),
         'eagle 3': EagleConfig(LAYER, version=3, num_taps=2, draft_vocab=len(IDS))}
DRAFTS = {'draft': False, 'draft, borrowed head': True}


def written(kind: str, directory: Path) -> Path:
  """The files of a draft."""
  if kind in MEDUSA:
    save_medusa(MedusaHeads(MEDUSA[kind], nnx.Rngs(0)), directory)
  elif kind in EAGLE:
    save_eagle(EagleHead(EAGLE[kind], nnx.Rngs(0)), directory, (0, 1) if kind == 'eagle 3' else ())
  else:
    target = random_decoder(TARGET, 0)
    model = target.first_layers(1).with_head(head_rows(target, IDS))
    save_reduced(model, IDS, directory, borrows_head=DRAFTS[kind])
  return directory


def decoding(kind: str, source: Path, dtype: str = 'bfloat16', draft: str = 'sharded') -> ConfigDict:
  config = tiny.get_config('none')
  version = 3 if kind == 'eagle 3' else 1
  section = {'name': 'model' if kind in DRAFTS else kind.partition(',')[0].partition(' ')[0], 'source': str(source),
             'dtype': dtype, 'tree': ((0,),), 'children': 'top', 'version': version,
             'taps': (0, 1) if version == 3 else (), 'num_heads': 1, 'own_head': True, 'draft_vocab': ''}
  with config.unlocked():
    config.accept.rule = 'multiround' if kind in MEDUSA else 'rejection'
    config.drafter, config.engine.gamma, config.mesh.draft = section, 1, draft
  return config


def described(tree: Any) -> dict[str, tuple]:
  return {jax.tree_util.keystr(path): (leaf.shape, str(leaf.dtype), leaf.sharding.shard_shape(leaf.shape))
          for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize('kind, draft', [
    *((kind, 'sharded') for kind in (*MEDUSA, *EAGLE, *DRAFTS)), ('draft', 'replicated')])
def test_what_is_planned_is_what_is_loaded(kind, draft, tmp_path, monkeypatch):
  """Every array, its dtype, and how it lies on a mesh; planned without reading a tensor."""
  config, mesh = decoding(kind, written(kind, tmp_path / 'draft'), draft=draft), make_mesh(4, 2)
  with jax.set_mesh(mesh):
    target, tokenizer = build_model(config.target, config.engine.attention_block, taps=taps_of(config.drafter))
    _, loaded = build_drafter(config, target, tokenizer)
    monkeypatch.setattr(SafetensorsDirectory, 'read', None)
    planned = abstract_draft(config, config.drafter, abstract_target(config, mesh), mesh)
  assert described(planned) == described(loaded)
  assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(planned))


def test_an_embedding_beside_the_head(tmp_path):
  """Published heads repeat the target's: a table of its shape is planned as that, and not read."""
  directory = written('eagle', tmp_path)
  source = SafetensorsDirectory(directory)
  tensors = {name: source.read(name) for name in source.shapes}
  tensors['embed_tokens.weight'] = np.asarray(random_decoder(TARGET, 0).embed[...])
  write_safetensors(directory / 'model.safetensors', tensors)
  config, mesh = decoding('eagle', directory), make_mesh(4, 2)
  with jax.set_mesh(mesh):
    target = abstract_target(config, mesh)
    assert abstract_draft(config, config.drafter, target, mesh).embed_VD is target.embed.get_value()


@pytest.mark.parametrize('kind, said', [
    ('medusa', 'does not fit the target'), ('eagle', 'made for a target with 264 tokens and vectors of 64'),
    ('draft', 'made for a target with 264 tokens and vectors of 64')])
def test_files_of_another_target(kind, said, tmp_path):
  """One line, as when they are loaded."""
  config, mesh = decoding(kind, written(kind, tmp_path)), make_mesh(4, 2)
  with jax.set_mesh(mesh):
    target = abstract_target(config, mesh)
    target.config = dataclasses.replace(target.config, width=32)
    with pytest.raises(InputError, match=said):
      abstract_draft(config, config.drafter, target, mesh)


def test_other_layers_than_the_head_reads(tmp_path):
  """The file names them; a wrong config would be accepted by its shapes, and no draft of it by the target."""
  config, mesh = decoding('eagle 3', written('eagle 3', tmp_path)), make_mesh(4, 2)
  fields = json.loads((tmp_path / 'config.json').read_text())
  assert fields['eagle_config'] == {'eagle_aux_hidden_state_layer_ids': [1, 2]}
  fields['eagle_config'] = {'eagle_aux_hidden_state_layer_ids': [2, 3]}
  (tmp_path / 'config.json').write_text(json.dumps(fields))
  with jax.set_mesh(mesh), pytest.raises(InputError, match=r'reads the outputs of layers \(1, 2\) of the target, not '
                                         r'\(0, 1\): set drafter\.taps=\(1, 2\)'):
    abstract_draft(config, config.drafter, abstract_target(config, mesh), mesh)


def test_gpus_read_few_rows_of_a_head(tmp_path):
  """A draft that says 48 of 264 tokens, by roofline: its layers and these rows, no embedding."""
  config = decoding('draft', written('draft', tmp_path), 'float32')
  facts, plain = roofline(config, 1, CHIPS['H100']), roofline(tiny.get_config('none'), 1, CHIPS['H100'])
  layer = num_parameters(LAYER) - 2 * TARGET.vocab_size * TARGET.width
  assert (facts['weights_gib'] - plain['weights_gib']) * GIB == pytest.approx(4 * (layer + len(IDS) * TARGET.width))


@pytest.mark.parametrize('kind', ['medusa, reduced', 'eagle 3', 'draft, borrowed head'])
def test_the_loop_takes_what_is_planned(kind, tmp_path):
  """Up to the compiler: the state after the prompts, and the bytes that a draft reads, no embedding among them."""
  config, mesh = decoding(kind, written(kind, tmp_path), 'float32'), make_mesh(4, 2)
  programs = programs_of(config, mesh)
  state = programs.state(batch=4, bucket=128)
  assert state.length_B.shape == (4,)
  caches = device_bytes([(cache.k, cache.v) for cache in caches_of(state.draft_state)])
  weights = device_bytes(programs.params.draft, ('embed', 'ids'))
  assert weights > len(IDS) * TARGET.width * 4 // 2  # the LM head, split over two devices
  ids = len(IDS) * 4 if kind != 'draft, borrowed head' else 0
  assert Sizes.of(programs, state).draft_pass == weights + caches + ids
