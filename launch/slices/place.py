"""Where this process stands among the processes of its job: given by flags, or read off SLURM, GKE or a TPU VM.

JAX can find this out by itself, but tells neither how many processes it waits for nor which one is missing.
"""

from collections.abc import Callable, Mapping
import dataclasses
import re
import urllib.error
import urllib.request

from models.errors import InputError

TPU_PORT = 8482  # of the coordinator on TPU hosts, as JAX has it; the JobSet manifest opens it
METADATA_URL = 'http://metadata.google.internal/computeMetadata/v1/instance/attributes/'
METADATA_SECONDS = 5


@dataclasses.dataclass(frozen=True)
class Place:
  """One process among several.

  Attributes:
    coordinator: host:port on which process 0 listens.
    num_processes, process_id: ids are 0..num_processes-1.
    local_device_ids: the devices of its host that are this process's; None is all of them.
  """

  coordinator: str
  num_processes: int
  process_id: int
  local_device_ids: tuple[int, ...] | None = None


def given_place(coordinator: str | None, num_processes: int | None, process_id: int | None) -> Place | None:
  """The place that flags give; None where none is given.

  Raises:
    InputError: for some of them without the others, or values that contradict each other.
  """
  given = {'--coordinator': coordinator, '--num_processes': num_processes, '--process_id': process_id}
  missing = [flag for flag, value in given.items() if value is None]
  if len(missing) == len(given):
    return None
  if missing:
    raise InputError(f'{" and ".join(missing)} missing: pass {", ".join(given)} together, or none of them')
  if not re.fullmatch(r'\S+:\d+', coordinator):
    raise InputError(f'--coordinator={coordinator!r} must be host:port, the host that of process 0')
  if not 0 <= process_id < num_processes:
    raise InputError(f'--process_id={process_id} must lie in 0..{num_processes - 1}, below --num_processes')
  return Place(coordinator, num_processes, process_id) if num_processes > 1 else None


def found_place(environ: Mapping[str, str], metadata: Callable[[str], str | None]) -> Place | None:
  """The place that SLURM or a TPU host gives; None for a process that is alone.

  Args:
    environ: the environment, after `import jax`: JAX sets TPU_SKIP_MDS_QUERY on hosts without a TPU.
    metadata: an attribute of this virtual machine, by name.
  """
  if place := _slurm_place(environ):
    return place
  if environ.get('JAX_PLATFORMS') == 'cpu':
    return None
  if 'MEGASCALE_NUM_SLICES' in environ and int(environ['MEGASCALE_NUM_SLICES']) > 1:
    raise InputError('a job over several slices is not supported: start one job on each slice')
  names = environ.get('TPU_PROCESS_ADDRESSES', environ.get('TPU_WORKER_HOSTNAMES'))
  if names is not None:  # GKE
    return _tpu_place(names.split(','), environ.get('TPU_WORKER_ID'))
  if 'TPU_SKIP_MDS_QUERY' in environ:
    return None
  endpoints = metadata('worker-network-endpoints')  # a TPU VM
  return endpoints and _tpu_place([_endpoint_host(part) for part in endpoints.split(',')],
                                  metadata('agent-worker-number'))


def gce_metadata(name: str) -> str | None:
  """An attribute of this virtual machine, from Google's metadata server; None where there is no such thing."""
  request = urllib.request.Request(METADATA_URL + name, headers={'Metadata-Flavor': 'Google'})
  try:
    with urllib.request.urlopen(request, timeout=METADATA_SECONDS) as response:
      return response.read().decode()
  except (urllib.error.URLError, TimeoutError):
    return None


def _slurm_place(environ: Mapping[str, str]) -> Place | None:
  """One process a task of `srun`; where a node has several, each takes the device with its number on the node."""
  if not {'SLURM_JOB_ID', 'SLURM_STEP_NODELIST', 'SLURM_NTASKS', 'SLURM_PROCID', 'SLURM_LOCALID'} <= set(environ):
    return None
  num_processes = int(environ['SLURM_NTASKS'])
  if num_processes == 1:
    return None
  port = 61440 + int(environ['SLURM_JOB_ID']) % 4096
  tasks_of_first_node = re.match(r'\d*', environ.get('SLURM_STEP_TASKS_PER_NODE', '')).group()
  local = None if tasks_of_first_node == '1' else (int(environ['SLURM_LOCALID']),)
  return Place(f'{first_host(environ["SLURM_STEP_NODELIST"])}:{port}', num_processes, int(environ['SLURM_PROCID']),
               local)


def first_host(node_list: str) -> str:
  """Of SLURM's compressed lists: node[003-007,9],other -> node003"""
  match = re.match(r'([^,\[]+)(?:\[([^,\-\]]+))?', node_list)
  return match.group(1) + (match.group(2) or '')


def _tpu_place(hosts: list[str], process_id: str | None) -> Place | None:
  if len(hosts) == 1 or process_id is None:
    return None
  return Place(f'{hosts[0].partition(":")[0]}:{TPU_PORT}', len(hosts), int(process_id))


def _endpoint_host(endpoint: str) -> str:
  """Entries are hosts, or name:id:host."""
  return endpoint.rpartition(':')[2]
