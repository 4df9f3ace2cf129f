"""Joins the processes of a job, one a host, into one JAX program. It must run before JAX touches a device.

On a TPU VM, on GKE and under SLURM nothing needs to be said; elsewhere --coordinator, --num_processes and --process_id
do. A process that is alone does nothing.
"""

import os
import sys

import jax

from launch.roll_call import call_roll
from launch.slices.place import Place, found_place, gce_metadata

SHUTDOWN_SECONDS = 3600  # process 0 may score texts for so long while the others wait to leave together

_joined: Place | None = None


def join(place: Place | None, timeout: int) -> None:
  """Waits for all processes of the job and connects them; without a place it is looked for, and may be none.

  Raises:
    InputError: names the processes that did not come within `timeout` seconds.
  """
  global _joined
  place = place or found_place(os.environ, gce_metadata)
  if place is None:
    return
  print(f'process {place.process_id} of {place.num_processes}: meeting the others at {place.coordinator}',
        file=sys.stderr, flush=True)
  call_roll(place.coordinator, place.num_processes, place.process_id, timeout)
  jax.distributed.initialize(
      place.coordinator, place.num_processes, place.process_id, local_device_ids=place.local_device_ids,
      cluster_detection_method='deactivate', initialization_timeout=timeout,
      shutdown_timeout_seconds=SHUTDOWN_SECONDS)
  _joined = place


def joined() -> bool:
  """Whether this process is one of several."""
  return _joined is not None


def speaks() -> bool:
  """Whether this process shows texts and writes files: one of a job does."""
  return _joined is None or _joined.process_id == 0
