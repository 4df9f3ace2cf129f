"""A small version of `experiments.checkpoint_memory`."""

import dataclasses
from pathlib import Path

import pytest

from experiments import checkpoint_memory
from models.config import DecoderConfig

TINY = DecoderConfig.tiny(vocab_size=16, num_heads=8, num_kv_heads=2, dtype='bfloat16')
SMALL = dataclasses.replace(
    TINY, vocab_size=8192, width=1024, num_layers=8, head_dim=128, ff_width=4096, tied_embedding=True)
CACHES = 64e6  # bytes of file caches, which do not grow with the model


def peaks(config: DecoderConfig, directory: Path) -> tuple[int, dict[str, int]]:
  weights, phases = checkpoint_memory.measure(config, directory)
  return weights, {phase.name: phase.peak_bytes for phase in phases}


@pytest.mark.slow
@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='reads Linux process accounts')
def test_the_host_holds_little_beside_what_lies_on_its_devices(tmp_path):
  """0.26 GB of weights, against a model of nothing: a second copy of them would show."""
  _, nothing = peaks(TINY, tmp_path / 'tiny')
  weights, small = peaks(SMALL, tmp_path / 'small')
  assert weights > 240e6
  assert small['convert'] - nothing['convert'] < 0.9 * weights
  for phase in ('restore', 'save'):
    assert small[phase] - nothing[phase] < checkpoint_memory.LIMIT * weights + CACHES, (phase, small, nothing)
