"""Prints a JobSet manifest that runs a command on every host of a TPU slice on GKE.

    python -m launch.slices.jobset --topology=v4-32 --image=REGISTRY/specdec:1 \\
        --volume=results --command="python -m experiments.humaneval --config=configs/smollm2.py:lookup \\
            --config.mesh.model=16 --slice=v4-32 --generate_only --units_dir=/results/units \\
            --samples_out=/results/samples.jsonl" | kubectl apply -f -

JobSet (kubernetes-sigs/jobset, v1alpha2) makes an indexed Job with a pod on each host and the service by which they
find each other; GKE then tells each pod its number, so the command needs no arguments for that. The command is run as
it is, without a shell, so that SIGTERM reaches it. If a host is lost all pods start again; a wrong flag (status 2) or a
failure of the run (1) ends the set at once. What pods write is lost with them, except on the volume: --volume names a
PersistentVolumeClaim that all hosts can mount at once (ReadWriteMany), and it is mounted at /results.
"""

import re
import shlex
import sys
from typing import Any

from absl import flags
import yaml

from launch import cli
from launch.preemption import RESTART_STATUS
from launch.slices.place import TPU_PORT
from launch.slices.table import Slice, slice_of
from models.errors import InputError

API_VERSION = 'jobset.x-k8s.io/v1alpha2'
RUNTIME_PORT = 8471  # on which libtpu's own processes talk
RESULTS = '/results'  # where the volume is mounted
KEEP_SECONDS = 12 * 3600  # for the logs of a set that has ended
TERMINATION_SECONDS = 30  # from SIGTERM to SIGKILL; launch/preemption.py uses less
RESTARTABLE = [RESTART_STATUS, *range(127, 256)]  # asked for, or killed by a signal
NAME = re.compile(r'[a-z]([-a-z0-9]{0,38}[a-z0-9])?')  # pods are named after it, in 63 characters


def manifest(made: Slice, name: str, image: str, command: list[str], spot: bool = False, queue: str | None = None,
             max_restarts: int = 3, volume: str | None = None) -> dict[str, Any]:
  """The JobSet as plain data.

  Args:
    made: what to run on.
    name: of the JobSet.
    image: of the container; has the code and its packages.
    command: and its arguments.
    spot: run on Spot machines, which may be taken away.
    queue: of Kueue, where that is installed.
    max_restarts: of the whole set, after a lost host or status 42.
    volume: a PersistentVolumeClaim for results.
  """
  return {
      'apiVersion': API_VERSION,
      'kind': 'JobSet',
      'metadata': {
          'name': name,
          **({'labels': {'kueue.x-k8s.io/queue-name': queue}} if queue else {}),
          'annotations': {'alpha.jobset.sigs.k8s.io/exclusive-topology': 'cloud.google.com/gke-nodepool'},
      },
      'spec': {
          'ttlSecondsAfterFinished': KEEP_SECONDS,
          'failurePolicy': {
              'maxRestarts': max_restarts,
              'rules': [{'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}],
          },
          'replicatedJobs': [{
              'name': 'slice',
              'replicas': 1,
              'template': {'spec': _job(made, _pod(made, image, command, spot, volume))},
          }],
      },
  }


def _job(made: Slice, pod: dict[str, Any]) -> dict[str, Any]:
  """A pod on each host; one that fails fails the Job, and JobSet starts the set anew."""
  return {
      'parallelism': made.hosts,
      'completions': made.hosts,
      'backoffLimit': 0,
      'podFailurePolicy': {'rules': [{
          'action': 'FailJob',
          'onExitCodes': {'containerName': 'jax-tpu', 'operator': 'NotIn', 'values': RESTARTABLE},
      }]},
      'template': {'spec': pod},
  }


def _pod(made: Slice, image: str, command: list[str], spot: bool, volume: str | None) -> dict[str, Any]:
  mounts = [{'mountPath': '/dev/shm', 'name': 'dshm'}]
  volumes: list[dict[str, Any]] = [{'name': 'dshm', 'emptyDir': {'medium': 'Memory'}}]
  if volume:
    mounts.append({'mountPath': RESULTS, 'name': 'results'})
    volumes.append({'name': 'results', 'persistentVolumeClaim': {'claimName': volume}})
  return {
      'restartPolicy': 'Never',
      'hostNetwork': True,
      'dnsPolicy': 'ClusterFirstWithHostNet',
      'terminationGracePeriodSeconds': TERMINATION_SECONDS,
      'nodeSelector': {
          'cloud.google.com/gke-tpu-accelerator': made.gke_accelerator,
          'cloud.google.com/gke-tpu-topology': made.topology,
          **({'cloud.google.com/gke-spot': 'true'} if spot else {}),
      },
      'tolerations': [{'key': 'google.com/tpu', 'operator': 'Exists'}],
      'containers': [{
          'name': 'jax-tpu',
          'image': image,
          'command': command,
          'ports': [{'containerPort': RUNTIME_PORT}, {'containerPort': TPU_PORT}],
          'resources': {'limits': {'google.com/tpu': made.chips_per_host}},
          'volumeMounts': mounts,
      }],
      'volumes': volumes,
  }


def main() -> None:
  made = slice_of(_required('topology', TOPOLOGY.value))
  image, command = _required('image', IMAGE.value), _words(_required('command', COMMAND.value))
  if not NAME.fullmatch(JOB_NAME.value):
    raise InputError(f'--name={JOB_NAME.value!r} must be at most 40 small letters, digits and inner dashes, '
                     'and begin with a letter')
  if not VOLUME.value:
    print(f'note: without --volume a restarted set begins anew: --units_dir under {RESULTS} goes on only on a volume',
          file=sys.stderr)
  made_manifest = manifest(
      made, JOB_NAME.value, image, command, SPOT.value, QUEUE.value, MAX_RESTARTS.value, VOLUME.value)
  cli.say(yaml.safe_dump(made_manifest, sort_keys=False).rstrip())
  cli.write_json(made_manifest)


def _required(flag: str, value: str | None) -> str:
  if not value:
    raise InputError(f'--{flag} is missing: see --help')
  return value


def _words(command: str) -> list[str]:
  try:
    return shlex.split(command)
  except ValueError as error:
    raise InputError(f'--command: {str(error).lower()}') from error


if __name__ == '__main__':
  TOPOLOGY = flags.DEFINE_string('topology', None, 'The slice, by its accelerator name: v4-32, v5p-32, v6e-16, ...')
  IMAGE = flags.DEFINE_string('image', None, 'Container image with the code and its packages.')
  COMMAND = flags.DEFINE_string('command', None, 'What every host runs.')
  JOB_NAME = flags.DEFINE_string('name', 'specdec', 'Of the JobSet.')
  SPOT = flags.DEFINE_bool('spot', False, 'Run on Spot machines.')
  QUEUE = flags.DEFINE_string('queue', None, 'Local queue of Kueue, where that is installed.')
  VOLUME = flags.DEFINE_string('volume', None, 'PersistentVolumeClaim, mounted at /results.')
  MAX_RESTARTS = flags.DEFINE_integer('max_restarts', 3, 'Of the whole set.', lower_bound=0)
  cli.run(main, alone=True)
