"""The mesh: the devices as `data` x `model`."""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict
import numpy as np

from models.errors import InputError
from models.sharding import DATA, MODEL


def make_mesh(data: int, model: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh over all of `devices` (default: all that JAX sees), in the order that suits their links.

  Raises:
    InputError: if there are more or fewer of them than data x model.
  """
  devices = jax.devices() if devices is None else devices
  if data < 1 or model < 1 or data * model != len(devices):
    raise InputError(f'mesh.data={data} x mesh.model={model} must use all {len(devices)} devices: '
                     f'for example mesh.data=1, mesh.model={len(devices)}')
  return jax.make_mesh((data, model), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=np.asarray(devices))


def set_mesh(config: ConfigDict) -> Mesh | None:
  """Makes the mesh of the `mesh` section the process's own; 1 x 1 is no mesh: one device, as JAX chooses it.

  Raises:
    InputError: see `make_mesh`.
  """
  alone = config.mesh.data == config.mesh.model == 1
  mesh = None if alone else make_mesh(config.mesh.data, config.mesh.model)
  jax.set_mesh(mesh)
  return mesh
