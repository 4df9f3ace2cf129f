"""TPU slices by accelerator name: chips, hosts, topology, and what Cloud, GKE and the TPU compiler call them.

The number in a name counts TensorCores, of which v4 and v5p have two a chip, v5e and v6e one: v4-32, v5p-32,
v5litepod-16 and v6e-16 all have 16 chips. JAX sees one device per chip on all four. Sources: the pages of the
generations under cloud.google.com/tpu/docs, and the tables of two launchers, xpk (`system_characteristics.py`) and
MaxText (`accelerator_to_spec_map.py`).
"""

import dataclasses
import math
from typing import Any

from models.errors import InputError

# Of the machine types ct4p-hightpu-4t, ct5lp-hightpu-4t, ct5p-hightpu-4t and ct6e-standard-4t; ct5lp-hightpu-8t and
# ct6e-standard-8t hold 2x4 on one host instead.
CHIPS_PER_HOST = 4


@dataclasses.dataclass(frozen=True)
class Slice:
  """What one accelerator name stands for.

  Attributes:
    name: as the Cloud TPU API has it (`--accelerator-type`).
    generation: 'v4', 'v5e', 'v5p' or 'v6e'.
    topology: chips along each axis; also the GKE label cloud.google.com/gke-tpu-topology.
    chips: as many as JAX has devices.
    hosts: virtual machines; as many as JAX has processes.
    chips_per_host: chips that one process sees.
    gke_accelerator: the GKE label cloud.google.com/gke-tpu-accelerator.
    aot_name: `topology_name` of `jax.experimental.topologies.get_topology_desc`.
    aot_chip_config: its `chip_config_name`; on v4 only 'megacore' describes one device per chip.
    aot_host_bounds: its `chips_per_host_bounds`; without them some versions refuse a chip alone.
    device_kinds: what JAX may call a device (`jax/_src/pallas/mosaic/tpu_info.py`), the usual name first.
  """

  name: str
  generation: str
  topology: str
  chips: int
  hosts: int
  chips_per_host: int
  gke_accelerator: str
  aot_name: str
  aot_chip_config: str
  aot_host_bounds: tuple[int, int, int]
  device_kinds: tuple[str, ...]

  @property
  def says(self) -> str:
    return f'{self.name} has {self.chips} chips on {self.hosts} hosts'


@dataclasses.dataclass(frozen=True)
class _Generation:
  """What the slices of one generation share."""

  name: str
  prefix: str
  cores_per_chip: int
  gke_accelerator: str
  aot_chip_config: str
  device_kinds: tuple[str, ...]
  topologies: tuple[str, ...]

  def slice(self, topology: str) -> Slice:
    sizes = [int(size) for size in topology.split('x')]
    chips = math.prod(sizes)
    return Slice(
        name=f'{self.prefix}-{chips * self.cores_per_chip}', generation=self.name, topology=topology, chips=chips,
        hosts=max(1, chips // CHIPS_PER_HOST), chips_per_host=min(chips, CHIPS_PER_HOST),
        gke_accelerator=self.gke_accelerator,
        aot_name=f'{self.name}:{topology}', aot_chip_config=self.aot_chip_config,
        aot_host_bounds=(min(sizes[0], 2), min(sizes[1], 2), 1), device_kinds=self.device_kinds)


_FLAT = ('2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_GENERATIONS = (
    _Generation('v4', 'v4', 2, 'tpu-v4-podslice', 'megacore', ('TPU v4',),
                ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4')),
    _Generation('v5e', 'v5litepod', 1, 'tpu-v5-lite-podslice', 'default',
                ('TPU v5 lite', 'TPU v5e'), _FLAT),
    _Generation('v5p', 'v5p', 2, 'tpu-v5p-slice', 'megacore', ('TPU v5', 'TPU v5p'),
                ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4')),
    _Generation('v6e', 'v6e', 1, 'tpu-v6e-slice', 'default',
                ('TPU v6 lite', 'TPU v6e'), _FLAT),
)

SLICES: dict[str, Slice] = {
    made.name: made for generation in _GENERATIONS for made in map(generation.slice, generation.topologies)}


def slice_of(name: str) -> Slice:
  """The slice of an accelerator name; v5e-16 is v5litepod-16.

  Raises:
    InputError: for a name that is not in the table.
  """
  found = SLICES.get(name.replace('v5e-', 'v5litepod-'))
  if found is None:
    raise InputError(f'slice {name!r} is unknown: use one of {", ".join(SLICES)}')
  return found


def chip_alone(name: str) -> Slice | None:
  """One chip of a machine, such as v4-2: no slice that is rented, but what a paper may have measured on.

  None for any other name.
  """
  chips = {made.name: made for made in (
      generation.slice('x'.join('1' * (generation.topologies[0].count('x') + 1))) for generation in _GENERATIONS)}
  return chips.get(name.replace('v5e-', 'v5litepod-'))


def slice_or_chip(name: str) -> Slice:
  """What can be planned for: a slice, or one chip.

  Raises:
    InputError: neither has this name.
  """
  return chip_alone(name) or slice_of(name)


def check_mesh(mesh: Any, made: Slice) -> None:
  """Refuses a `mesh` section of another size than the slice.

  Raises:
    InputError: with both.
  """
  if mesh.data * mesh.model != made.chips:
    raise InputError(f'mesh.data={mesh.data} x mesh.model={mesh.model} does not match the slice: {made.says}')
