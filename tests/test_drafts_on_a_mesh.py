"""Drafts on a mesh: trained as on one device, in bfloat16 as well, and untrained heads that decode as on one device."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
from pathlib import Path

from flax import nnx
import jax
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import tiny
from launch import draft_training
from launch.mesh import make_mesh
from launch.prompts import Prompt
from launch.recipe import Recipe
from launch.session import Session
from launch.train import run
from specdec.training.log import read_metrics
from tests.test_draft_recipes import config_of, texts, write_corpus

TREE = ((0,), (1,), (0, 0))


@pytest.fixture(scope='module')
def corpus(tmp_path_factory) -> Path:
  directory = tmp_path_factory.mktemp('data')
  write_corpus(directory / 'corpus', [vars(text) for text in texts()])
  return directory / 'corpus'


@contextlib.contextmanager
def on(data: int, parts: int) -> Iterator[None]:
  """The process's mesh; 1 x 1 is none."""
  with jax.set_mesh(None if data == parts == 1 else make_mesh(data, parts, jax.devices()[:data * parts])):
    yield


def config_for(kind: str, corpus: Path, **changes) -> ConfigDict:
  config = config_of(kind, corpus, steps=3, save_every=0, learning_rate=1e-3, warmup_steps=0, **changes)
  config.data.keep_vectors = False
  if kind != 'distill':
    config.loss.roots, config.data.learn = 24, 'answers'
  if kind == 'medusa':
    config.draft.num_heads = 2
  return config


def recipe_of(config: ConfigDict) -> Recipe:
  """The same four rows in each step, so that the loss must fall."""
  recipe = draft_training.recipe(draft_training.MAKERS[config.train.objective], config)
  return dataclasses.replace(recipe, evaluate=None, rows=recipe.rows[:4])


def trained(config: ConfigDict, directory: Path, data: int = 1, parts: int = 1) -> tuple[dict, list[float]]:
  """The parameters and the losses of each step."""
  with on(data, parts):
    learnt = run(recipe_of(config), str(directory))
    return jax.device_get(learnt), [row['loss'] for row in read_metrics(directory)]


@pytest.fixture(scope='module')
def alone(corpus, tmp_path_factory) -> Callable[[str], tuple[dict, list[float]]]:
  """What comes out on one device, by the kind of draft."""
  return functools.cache(lambda kind: trained(config_for(kind, corpus), tmp_path_factory.mktemp('alone')))


KINDS = ['medusa', *(pytest.param(kind, marks=pytest.mark.slow) for kind in ('eagle', 'distill'))]


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS)
def test_it_trains_as_on_one_device(kind, corpus, alone, tmp_path):
  """Rows over two devices, or the target and the draft; what comes out is the same within rounding."""
  learnt, losses = alone(kind)
  assert losses[-1] < losses[0]
  for data, parts in ((2, 1), (1, 2)):
    ours, its = trained(config_for(kind, corpus), tmp_path / f'{data}x{parts}', data, parts)
    np.testing.assert_allclose(its, losses, rtol=1e-4)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(learnt), strict=True):
      np.testing.assert_allclose(mine, other, atol=2e-4)


@pytest.mark.parametrize('kind', KINDS)
def test_bfloat16_with_float32_masters(kind, corpus, alone, tmp_path):
  """The loss falls as it does in float32; heads compute in bfloat16."""
  (learnt, losses), config = alone(kind), config_for(kind, corpus, dtype='bfloat16')
  if kind != 'distill':
    recipe = recipe_of(config)
    its = nnx.merge(recipe.objective.graph, recipe.trainable, recipe.frozen.rest).config
    assert (its.decoder if kind == 'eagle' else its).dtype == 'bfloat16'
  low, its = trained(config, tmp_path)
  assert its[-1] < its[0]
  np.testing.assert_allclose(its, losses, rtol=0.05)
  for mine, other in zip(jax.tree.leaves(low), jax.tree.leaves(learnt), strict=True):
    assert mine.dtype == np.float32
    assert np.linalg.norm(mine - other) < 0.2 * np.linalg.norm(other)


def decoding(kind: str, data: int, parts: int) -> ConfigDict:
  config = tiny.get_config('none')
  section = {'name': kind, 'source': 'untrained', 'dtype': 'float32', 'tree': TREE, 'num_heads': 3, 'own_head': True,
             'children': 'top', 'version': 1, 'taps': ()}
  with config.unlocked():
    config.drafter, config.accept.rule, config.engine.gamma = section, 'multiround', len(TREE)
    config.mesh.update({'data': data, 'model': parts})
    config.sampling.max_new_tokens = 16
  return config


@pytest.mark.parametrize('kind, changes', [
    pytest.param('medusa', {'own_head': False}, marks=pytest.mark.slow), ('eagle', {}),
    pytest.param('medusa', {'own_head': True}, marks=pytest.mark.slow),
    pytest.param('eagle', {'version': 3, 'taps': (0, 1)}, marks=pytest.mark.slow)])
def test_untrained_heads_say_what_they_say_on_one_device(kind, changes, monkeypatch):
  """From a config: two devices that share the model."""
  prompts, said = [Prompt('it', 'two and so', False)], []
  for parts in (1, 2):
    config = decoding(kind, 1, parts)
    config.drafter.update(changes)
    with monkeypatch.context() as patch, jax.set_mesh(None):
      devices = jax.devices()[:parts]
      patch.setattr(jax, 'devices', lambda devices=devices: devices)
      session = Session.from_config(config)
      said.append([(done.token_ids, done.metrics.accepted) for done in session.generate(prompts)])
      heads = jax.tree.leaves(session.params.draft)
      assert {len(leaf.sharding.device_set) for leaf in heads} == {parts}
  assert said[0] == said[1]
