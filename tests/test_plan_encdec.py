"""`launch.plan` for an encoder-decoder: T5-XXL's width on one TPU v4 chip, with fewer layers."""

import dataclasses
import functools
import os

import pytest

from configs import leviathan_t5
from launch import build, plan
from launch.compile_ahead import described_mesh, need_compiler, programs_of
from launch.shapes import device_bytes
from launch.slices.table import SLICES, chip_alone, slice_of
from models.errors import InputError
from specdec.engine import SMALLEST_BUCKET

try:
  import libtpu
except ImportError:
  libtpu = None
needs_libtpu = pytest.mark.skipif(libtpu is None, reason="pip install -e '.[tpu]'")
pytestmark = pytest.mark.usefixtures('optimized')
LAYERS = {'t5_xxl': 2, 't5_small': 1}


@pytest.fixture(autouse=True)
def few_layers(monkeypatch):
  """The models of the config, shorter on both sides."""
  monkeypatch.setattr(os, 'environ', os.environ.copy())
  for name, layers in LAYERS.items():
    make, seed = build.RANDOM_MODELS[name]
    monkeypatch.setitem(build.RANDOM_MODELS, name, (functools.partial(shortened, make, layers), seed))


def shortened(make, layers: int):
  return dataclasses.replace(make(), num_layers=layers, num_encoder_layers=1)


@pytest.mark.slow
@needs_libtpu
def test_structure_and_table():
  """Nothing of the target is copied, caches of the source included; published figures at their own gamma only."""
  need_compiler()
  facts = plan.plan(leviathan_t5.get_config('xxl_small'), chip_alone('v4-2'), wanted=plan.LOOPS)
  assert facts['chips'] == facts['hosts'] == 1 and facts['fits']
  assert not [copy for copy in facts['loop_copies'] if 'bf16[1, 64,' in copy or 'bf16[32128' in copy]
  assert facts['vector_dots'] == [] and facts['aliased'] and facts['same_shardings']
  assert facts['temp_mib'] <= 64
  assert not any(any(counts.values()) for counts in facts['all_reduces_per_pass'].values()), 'one chip has no links'
  rows = {row['name']: row for row in facts['workloads']}
  assert rows['en-de greedy']['published_speedup'] == 3.4 and rows['cnn/dm greedy']['published_speedup'] is None
  assert all(row['measured_ms_per_token'] is None and row['predicted_speedup'] > 0 for row in rows.values())


@needs_libtpu
def test_what_a_pass_reads():
  """Not the encoder, nor what makes keys and values of the source, nor an embedding that is not the head."""
  need_compiler()
  config = leviathan_t5.get_config('xxl_small')
  programs = programs_of(config, described_mesh(chip_alone('v4-2'), config.mesh))
  state, target = programs.state(1, SMALLEST_BUCKET), programs.params.target
  assert state.cache.cross.k[0].shape == (1, 64, 512, 64) and state.source.tokens_BS.shape == (1, 512)
  width, heads, ff, vocab = 4096, 64 * 64, 10_240, 32_128
  read = 2 * (4 * width * heads + 2 * width * heads + 3 * width * ff + 3 * width) + vocab * width + width + 64 * 32
  cached = sum(leaf.size for leaf in (*state.cache.k, *state.cache.v, *state.cache.cross.k, *state.cache.cross.v))
  assert plan._read(target, state.cache) == 2 * (read + cached) + 4 * 1  # and the source's length
  assert device_bytes(target) > 2 * read + 2 * vocab * width


def test_one_chip_is_no_slice():
  """Nobody rents one: it is for plans."""
  made = chip_alone('v4-2')
  assert (made.chips, made.hosts, made.aot_name) == (1, 1, 'v4:1x1x1')
  assert chip_alone('v5e-1').aot_name == 'v5e:1x1' and chip_alone('v4-32') is None and 'v4-2' not in SLICES
  with pytest.raises(InputError, match="slice 'v4-2' is unknown"):
    slice_of('v4-2')


def test_drafts_without_a_pass_cannot_be_planned():
  config = leviathan_t5.get_config('xxl_small').copy_and_resolve_references()
  with config.unlocked():
    config.drafter = {'name': 'unigram', 'counts': 'x.txt'}
  need_compiler()
  with pytest.raises(InputError, match='it has no pass to plan'):
    programs_of(config, described_mesh(chip_alone('v4-2'), config.mesh))
