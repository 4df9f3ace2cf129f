"""Chips, GPU names, and the hops of an all-reduce."""

import pytest

from launch.chips import CHIPS, GPUS, all_reduce_hops, gpus_of
from launch.slices.table import SLICES, slice_of
from models.errors import InputError


@pytest.mark.parametrize('slice_name, hops', [
    ('v4-32', 10), ('v5p-32', 10), ('v4-8', 4), ('v5e-16', 12), ('v6e-16', 12), ('v6e-4', 4), ('v4-128', 12),
    ('v5e-256', 32), ('v5e-128', 30)])
def test_hops(slice_name, hops):
  """2x2x4 is no ring anywhere: 1 + 1 + 3 steps each way; 4x4x4 is one in every direction, 16x16 too."""
  assert all_reduce_hops(slice_of(slice_name)) == hops


def test_every_slice_has_a_chip():
  assert {made.generation for made in SLICES.values()} == set(CHIPS) - set(GPUS)


def test_clocks_give_the_peak():
  """Matrix units x 2 operations x clock: the figure that turns cycles into time is the one behind the peak."""
  units = {'v4': 8 * 128**2, 'v5e': 4 * 128**2, 'v5p': 8 * 128**2, 'v6e': 4 * 256**2}
  for name, multipliers in units.items():
    chip = CHIPS[name]
    assert 2 * multipliers * chip.clock_ghz / 1000 == pytest.approx(chip.bf16_tflops, rel=0.02)


def test_gpus():
  assert gpus_of('8xH100') == (8, CHIPS['H100'])
  assert gpus_of('1xA100') == (1, CHIPS['A100'])
  assert gpus_of('v4-32') is None
  with pytest.raises(InputError, match=r"8xV100: the GPU 'V100' is unknown: use one of A100, H100, H200"):
    gpus_of('8xV100')
  with pytest.raises(InputError, match='unknown'):
    gpus_of('8xv4')
