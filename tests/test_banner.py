"""What a job refuses to run on."""

from ml_collections import ConfigDict
import pytest

from launch.banner import check
from launch.slices.table import SLICES, slice_of
from models.errors import InputError

MESH = ConfigDict({'data': 1, 'model': 16})


@pytest.mark.parametrize('made', SLICES.values(), ids=list(SLICES))
def test_each_slice_is_itself(made):
  for kind in made.device_kinds:
    check([kind] * made.chips, made.hosts, None, made)


@pytest.mark.parametrize('kinds, num_processes, mesh, name, message', [
    (['cpu'] * 16, 4, MESH, 'v4-32', "JAX sees devices of kind 'cpu', but v4-32 has 'TPU v4'"),
    (['TPU v5'] * 16, 4, MESH, 'v4-32', "JAX sees devices of kind 'TPU v5', but v4-32 has 'TPU v4'"),
    (['TPU v5 lite'] * 16, 4, MESH, 'v5p-32', "'TPU v5 lite', but v5p-32 has 'TPU v5'"),
    (['TPU v6 lite'] * 16, 4, MESH, 'v5e-16', "'TPU v6 lite', but v5litepod-16 has 'TPU v5 lite'"),
    (['TPU v4'] * 4, 1, MESH, 'v4-32', 'JAX sees 4 devices, but v4-32 has 16 chips on 4 hosts'),
    (['TPU v4'] * 16, 2, MESH, 'v4-32', '2 processes run, but v4-32 has 16 chips on 4 hosts'),
    (['TPU v4'] * 4, 1, MESH, 'v4-8', 'mesh.data=1 x mesh.model=16 does not match the slice: v4-8 has 4 chips'),
    (['cpu'] * 8, 2, MESH, None, 'does not match the job: it has 8 devices in 2 processes')])
def test_other_devices_are_refused(kinds, num_processes, mesh, name, message):
  with pytest.raises(InputError, match=message):
    check(kinds, num_processes, mesh, slice_of(name) if name else None)


def test_without_a_slice_any_devices_do():
  check(['cpu'] * 16, 2, MESH, None)
  check(['cpu'] * 3, 1, None, None)
