"""Two devices train as one does, within rounding; a state goes from one mesh to another."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from flax import nnx
import jax
import numpy as np
import pytest

from launch.mesh import make_mesh
from models.config import DecoderConfig
from models.random_weights import random_decoder
from models.sequence import Stack, stack
from models.sharding import shardings
from specdec.training.config import TrainConfig
from specdec.training.log import read_metrics
from specdec.training.next_token import NextToken
from specdec.training.optimizer import adamw
from specdec.training.packing import pack
from specdec.training.step import first_state
from specdec.training.trainer import StoppedError, Trainer
from tests.toys import VOCAB

MODEL = DecoderConfig.tiny(vocab_size=VOCAB, num_heads=4, num_kv_heads=4)
CONFIG = TrainConfig(steps=6, batch=8, accumulate=2, learning_rate=1e-2, log_every=2, clip_norm=1.0)
RNG = np.random.default_rng(0)
ROWS = pack([RNG.integers(1, VOCAB, RNG.integers(2, 30)) for _ in range(40)], 17)


@contextlib.contextmanager
def on(data: int, parts: int):
  """The process's mesh; 1 x 1 is none."""
  if data == parts == 1:
    yield None
    return
  mesh = make_mesh(data, parts, jax.devices()[:data * parts])
  with jax.set_mesh(mesh):
    yield mesh


def trainer(mesh: Any, directory: Path | None = None, **options) -> Trainer:
  trainable = stack(random_decoder(MODEL, 3, mesh))
  return Trainer(NextToken(remat=True), adamw(CONFIG), trainable, None, ROWS, CONFIG,
                 directory and str(directory), **options)


def run(data: int, parts: int, directory: Path | None = None) -> Stack:
  with on(data, parts) as mesh:
    return trainer(mesh, directory).run()


@pytest.fixture(scope='module')
def alone(tmp_path_factory) -> tuple[Stack, list[dict]]:
  directory = tmp_path_factory.mktemp('alone')
  return run(1, 1, directory), read_metrics(directory)


def assert_close(ours: Any, theirs: Any):
  for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(np.asarray(mine), np.asarray(other), atol=2e-4)


@pytest.mark.parametrize('data, parts', [pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)])
def test_it_trains_as_one_device_does(alone, tmp_path, data, parts):
  assert_close(run(data, parts, tmp_path), alone[0])
  losses = [[row['loss'] for row in rows] for rows in (read_metrics(tmp_path), alone[1])]
  np.testing.assert_allclose(*losses, rtol=1e-4)
  assert losses[0][-1] < losses[0][0]


def test_the_state_lies_as_the_parameters_do():
  with on(2, 2) as mesh:
    stacked = stack(random_decoder(MODEL, 3, mesh))
    state = first_state(NextToken(), adamw(CONFIG), CONFIG, stacked, None, {
        name: np.stack([row[name] for row in ROWS][:4]) for name in ROWS[0]})
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    places = jax.tree.leaves(shardings(nnx.state(stacked), mesh))
    assert len(moments) == 2 * len(places)
    for moment, place in zip(moments, places * 2, strict=True):
      assert moment.sharding.is_equivalent_to(place, moment.ndim)


def test_from_one_mesh_to_another(alone, tmp_path):
  """Stopped on two devices, gone on with four, then on one."""
  for data, parts, at in ((2, 1, 2), (2, 2, 4)):
    with on(data, parts) as mesh, pytest.raises(StoppedError):
      trainer(mesh, tmp_path, should_stop=iter([False, True]).__next__).run()
    assert (tmp_path / f'step_{at:08d}').is_dir()
  assert_close(run(1, 1, tmp_path), alone[0])
  np.testing.assert_allclose([row['loss'] for row in read_metrics(tmp_path)], [row['loss'] for row in alone[1]],
                             rtol=1e-4)


def test_bfloat16_stays_near(alone):
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  trained = Trainer(NextToken(), adamw(config), stack(random_decoder(MODEL, 3)), None, ROWS, config, None).run()
  assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(trained))
  for mine, other in zip(jax.tree.leaves(trained), jax.tree.leaves(alone[0]), strict=True):
    assert np.linalg.norm(np.asarray(mine) - np.asarray(other)) < 0.1 * np.linalg.norm(np.asarray(other))
