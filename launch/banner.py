"""What a program runs on, in one block at its start, and whether that is what was meant."""

from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from launch.chips import GIB
from launch.slices.table import Slice, check_mesh
from models.errors import InputError


def banner(devices: Sequence[jax.Device], mesh: ConfigDict | None, made: Slice | None) -> str:
  """One fact a line.

  Args:
    devices: all of the job.
    mesh: the `mesh` section of the config.
    made: the slice that the job was said to run on.
  """
  local = [device for device in devices if device.process_index == jax.process_index()]
  facts = {
      'slice': 'not given (--slice)',
      'processes': f'{jax.process_count()}, this is process {jax.process_index()}',
      'chips': f'{num_chips(devices)}, {num_chips(local)} on this host',
      'devices': f'{len(devices)} x {devices[0].device_kind}, {len(local)} on this host',
      'memory per device': _memory(local[0]),
      'mesh': f'data {mesh.data} x model {mesh.model}' if mesh else 'none',
  }
  if made:
    facts['slice'] = f'{made.name}: {made.topology}, {made.chips} chips on {made.hosts} hosts'
  width = max(map(len, facts))
  return '\n'.join(f'{name:<{width}}  {fact}' for name, fact in facts.items())


def check(kinds: Sequence[str], num_processes: int, mesh: ConfigDict | None, made: Slice | None) -> None:
  """Refuses a mesh or devices other than those of the slice, and a mesh that leaves processes of the job out.

  Args:
    kinds: `device_kind` of each device of the job.
    num_processes: of the job.
    mesh, made: as for `banner`.

  Raises:
    InputError: which it is, with what there is.
  """
  size = mesh.data * mesh.model if mesh else None
  if made is None:
    if size not in (None, len(kinds)):
      raise InputError(f'mesh.data={mesh.data} x mesh.model={mesh.model} does not match the job: it has '
                       f'{len(kinds)} devices in {num_processes} processes')
    return
  if mesh:
    check_mesh(mesh, made)
  others = set(kinds) - set(made.device_kinds)
  if others:
    raise InputError(f'JAX sees devices of kind {min(others)!r}, but {made.name} has {made.device_kinds[0]!r}: '
                     'start the command on that slice, or name the right one with --slice')
  if len(kinds) != made.chips:
    raise InputError(f'JAX sees {len(kinds)} devices, but {made.says}: start the command on all hosts, with one '
                     'device a chip')
  if num_processes != made.hosts:
    raise InputError(f'{num_processes} processes run, but {made.says}: start one on each host')


def num_chips(devices: Sequence[jax.Device]) -> int:
  """Devices that share a place on the torus are cores of one chip; elsewhere each is a chip."""
  places = [(device.process_index, getattr(device, 'coords', device.id)) for device in devices]
  return len({(process, tuple(place) if isinstance(place, list) else place) for process, place in places})


def _memory(device: jax.Device) -> str:
  """The device's own memory, as far as JAX may use it."""
  stats = device.memory_stats() or {}
  return f'{stats["bytes_limit"] / GIB:.1f} GiB' if 'bytes_limit' in stats else 'unknown'
