"""What `libtpu` is told: options that every program for a TPU is compiled with, and not to look for a TPU in vain."""

from collections.abc import MutableMapping
import glob
import importlib.util
import os

import jax

# The tables of prefetches, 512 bytes each, lie at multiples of this: of 16 KiB by default, which makes 90 MiB of the 80
# unrolled layers of Chinchilla. The code that comes out is the same.
LIBTPU_FLAGS = {'xla_jf_program_hbm_alignment_in_kib': 1}
TPU_FILES = ('/dev/accel[0-9]*', '/dev/vfio/[0-9]*')  # up to v4, and from v5 on


def use_libtpu_flags(environment: MutableMapping[str, str] = os.environ) -> None:
  """Adds the flags to those that the user gave, which count more; `libtpu` reads them when it is loaded."""
  given = environment.get('LIBTPU_INIT_ARGS', '')
  missing = [f'--{name}={value}' for name, value in LIBTPU_FLAGS.items() if f'--{name}=' not in given]
  environment['LIBTPU_INIT_ARGS'] = ' '.join(filter(None, [given, *missing]))


def skip_absent_tpu() -> None:
  """Where `libtpu` is installed for planning alone, JAX would search for a TPU, loudly and for seconds."""
  planning_only = importlib.util.find_spec('libtpu') and not any(map(glob.glob, TPU_FILES))
  if planning_only and not jax.config.jax_platforms and not _has_gpu_plugin():
    jax.config.update('jax_platforms', 'cpu')


def _has_gpu_plugin() -> bool:
  return any(importlib.util.find_spec(name) for name in ('jax_cuda12_plugin', 'jax_cuda13_plugin', 'jax_rocm7_plugin'))
