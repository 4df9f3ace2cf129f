"""`launch.plan` of a training config: what the TPU compiler makes of a step, few layers deep."""

import os

import pytest

from configs import pretrain
from launch import plan_training
from launch.chips import CHIPS, GIB
from launch.compile_ahead import DoesNotFitError, need_compiler
from launch.plan_training import TRAINING, assumed_mfu
from launch.plan_training import plan_training as plan
from launch.slices.table import slice_of
from models.errors import InputError

try:
  import libtpu
except ImportError:
  libtpu = None
needs_libtpu = pytest.mark.skipif(libtpu is None, reason="pip install -e '.[tpu]'")
pytestmark = pytest.mark.usefixtures('optimized')
LAYERS, ACCUMULATE, WIDTH = 3, 2, 512


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
  monkeypatch.setattr(os, 'environ', os.environ.copy())


def small():
  """The 1B config, shallow, narrow and with a small vocabulary."""
  config = pretrain.get_config('1b').unlock()
  config.model.update(num_layers=LAYERS, vocab_size=4096, width=WIDTH, num_heads=4, num_kv_heads=4, ff_width=1408)
  config.train.row_tokens = 1024
  config.train.batch, config.train.accumulate = 32, ACCUMULATE
  return config


@pytest.mark.slow
@needs_libtpu
def test_a_step_on_v4():
  """Memory adds up, activations of both halves of a layer are reduced over `model`, gradients over `data`."""
  need_compiler()
  facts = plan(small(), slice_of('v4-32'), mfu=0.5)
  assert facts['fits'] and facts['chips'] == 16
  layer = 4 * WIDTH * WIDTH + 3 * 1408 * WIDTH + 2 * WIDTH
  assert facts['parameters'] == LAYERS * layer + 4096 * WIDTH + WIDTH
  assert facts['weights_gib'] == pytest.approx(facts['parameters'] * 4 / 2 / GIB, rel=0.01)  # over model=2
  assert facts['optimizer_gib'] == pytest.approx(2 * facts['weights_gib'], rel=1e-3)
  assert facts['kept_activations_gib'] == 2 * 1024 * WIDTH * LAYERS * 2 / GIB < facts['temp_gib']
  per_layer = (facts['all_reduces'] + facts['reduce_scatters']) / (LAYERS * ACCUMULATE)
  assert 6 <= per_layer < 12  # two forward, again and back two each, and the gradients of the layer
  assert facts['reduced_gib'] > ACCUMULATE * facts['parameters'] * 2 / 2 / GIB  # the gradients in bfloat16
  assert facts['flops'] == 6 * facts['parameters'] * 32 * 1024
  assert facts['predicted_seconds'] == 2 * facts['roofline_seconds'] == pytest.approx(
      2 * facts['flops'] / (16 * CHIPS['v4'].bf16_tflops * 1e12))


@needs_libtpu
def test_a_step_that_does_not_fit(monkeypatch):
  def refuse(*_):
    raise DoesNotFitError('the total memory exceeds available HBM (30.75G)')

  monkeypatch.setattr(plan_training, 'compile_step', refuse)
  need_compiler()
  facts = plan(small(), slice_of('v4-32'))
  assert not facts['fits'] and 'exceeds available HBM (30.75G): raise train.accumulate' in facts['problem']


@needs_libtpu
def test_mesh_of_another_size():
  config = small()
  config.mesh.data = 4
  need_compiler()
  with pytest.raises(InputError, match='does not match the slice'):
    plan(config, slice_of('v4-32'))


def test_one_billion():
  """The shipped config: its size, and tokens by the rule."""
  config = pretrain.get_config('1b')
  assert all(section in config for section in TRAINING)
  schedule = plan_training.schedule_of(config)
  parameters = plan_training.num_parameters(plan_training.model_config(config))
  assert 1.0e9 < parameters < 1.2e9
  assert schedule.steps * schedule.batch * config.train.row_tokens == pytest.approx(20 * parameters, rel=1e-3)


def test_gpus():
  with pytest.raises(InputError, match='planned for a slice, such as v4-32, not for GPUs'):
    plan_training.plan_command(small(), '8xH100', [])


def test_assumptions():
  assert assumed_mfu([]) == plan_training.MFU and assumed_mfu(['mfu=0.25']) == 0.25
  for wrong in ('hop_us=1', 'mfu=2', 'mfu=much', 'mfu'):
    with pytest.raises(InputError, match='mfu=SHARE alone'):
      assumed_mfu([wrong])
