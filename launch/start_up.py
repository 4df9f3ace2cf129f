"""What every command does before its own work, and the flags for it: joins its job, keeps compiled programs.

Also how it ends where other processes are: one that fails leaves at once, since the others may be waiting for it.
"""

import os
import sys
import time
import traceback

from absl import flags
import jax
from ml_collections import ConfigDict

from launch import banner, distributed, preemption
from launch.libtpu_flags import skip_absent_tpu, use_libtpu_flags
from launch.slices.place import given_place
from launch.slices.table import slice_of
from models.errors import InputError

COORDINATOR = flags.DEFINE_string(
    'coordinator', None, 'host:port of process 0, where neither a TPU host nor SLURM says it.')
NUM_PROCESSES = flags.DEFINE_integer('num_processes', None, 'Processes of the job.', lower_bound=1)
PROCESS_ID = flags.DEFINE_integer('process_id', None, 'Of this process: 0 to num_processes - 1.')
JOIN_TIMEOUT = flags.DEFINE_integer(
    'join_timeout', 300, 'Seconds in which all processes of the job must have come.', lower_bound=1)
SLICE = flags.DEFINE_string('slice', None, 'TPU slice, such as v4-32: refuses to run on anything else.')
COMPILE_CACHE_DIR = flags.DEFINE_string(
    'compile_cache_dir', None, 'Keep compiled programs here, a directory or gs://: the next start compiles nothing. '
    'Whoever can write there can run code in your job.')

LAST_WORDS_SECONDS = 2  # process 0 takes the others down with it: it lets them say what is wrong first


def start_up(alone: bool) -> None:
  """To be called before anything touches a device.

  Args:
    alone: the command uses no devices; it neither waits for other processes nor follows them.
  """
  skip_absent_tpu()
  use_libtpu_flags()
  if not alone:
    place = given_place(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value)
    distributed.join(place, JOIN_TIMEOUT.value)
  preemption.watch()
  if COMPILE_CACHE_DIR.value is not None:
    _keep_programs(COMPILE_CACHE_DIR.value)


def show_banner(config: ConfigDict) -> None:
  """Says what the job runs on, where that is in question, and refuses what --slice and the config do not fit."""
  if SLICE.value is None and not distributed.joined():
    return
  made = slice_of(SLICE.value) if SLICE.value is not None else None
  mesh = config.get('mesh')
  if distributed.speaks():
    print(banner.banner(jax.devices(), mesh, made), file=sys.stderr, flush=True)
  kinds = [device.device_kind for device in jax.devices()]
  banner.check(kinds, jax.process_count(), mesh, made)


def blame(error: Exception) -> int:
  """Says what went wrong in one process of a job, and gives the exit status."""
  own_fault = ('RESOURCE_EXHAUSTED', 'INVALID_ARGUMENT', 'UNIMPLEMENTED')
  if isinstance(error, jax.errors.JaxRuntimeError) and not str(error).startswith(own_fault):
    print(f'error: lost another process of the job: start all again ({str(error).splitlines()[0]})', file=sys.stderr)
    return preemption.RESTART_STATUS
  traceback.print_exception(error)
  return 1


def leave(status: int) -> None:
  """Ends a process whose job cannot go on; one that is alone ends as Python does."""
  if distributed.joined():
    if distributed.speaks():
      time.sleep(LAST_WORDS_SECONDS)
    _exit(status)
  sys.exit(status)


def leave_together(status: int) -> None:
  """Ends a process that has done its part of a job, when all have; one that is alone ends as Python does.

  Python's own way down would take the connections between processes apart while others still use them, which now and
  then aborts one of them.
  """
  if distributed.joined():
    try:
      jax.distributed.shutdown()
    except jax.errors.JaxRuntimeError as error:
      print(f'warning: another process of the job did not end well: {str(error).splitlines()[0]}', file=sys.stderr)
    _exit(status)
  sys.exit(status)


def _exit(status: int) -> None:
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def _keep_programs(directory: str) -> None:
  if '://' not in directory:
    try:
      os.makedirs(directory, exist_ok=True)
    except OSError as error:
      raise InputError(f'--compile_cache_dir={directory} cannot be made: {error.strerror}') from error
  jax.config.update('jax_compilation_cache_dir', directory)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)  # decode programs are many and small
