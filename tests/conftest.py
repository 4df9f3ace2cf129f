"""One JAX set-up for all tests: 8 fake CPU devices, float32 products in full precision.

Rank promotion is allowed: the code aligns trailing dimensions on purpose, as the shape suffixes in its names show
(`index_T < count_B[:, None]`). Toy sizes all differ instead, so that arrays lined up wrongly do not fit.
"""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')  # test files that plan may run side by side

from collections.abc import Callable, Iterator
import contextlib
import pathlib

import jax
import pytest

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_default_matmul_precision', 'highest')

# Tests and the commands that they start compile the same toy programs many times over: once is enough, and fast code
# is not wanted of programs that run for a moment (`optimized` is for tests of what the compiler makes of a program).
PROGRAMS = {
    'jax_disable_most_optimizations': True,
    'jax_compilation_cache_dir': str(pathlib.Path(__file__).parents[1] / '.pytest_cache' / 'programs'),
    'jax_persistent_cache_min_compile_time_secs': 0.3,
    'jax_persistent_cache_min_entry_size_bytes': 0}
if jax.__version_info__ < (0, 12):  # XLA ends a process that names a flag which it does not know
  os.environ['XLA_FLAGS'] = f'--xla_cpu_use_fusion_emitters=false {os.environ.get("XLA_FLAGS", "")}'
for name, value in PROGRAMS.items():
  os.environ.setdefault(name.upper(), str(value))
  jax.config.update(name, value)

jax.jit(lambda: 0)()  # XLA has read its flags now; the TPU compiler, which reads them again, knows fewer (`optimized`)

MAPS, MANY_MAPS = pathlib.Path('/proc/self/maps'), 30_000
COMPILE_EVENT = '/jax/core/compile/backend_compile_duration'


class CompileCount:
  """How many programs were compiled in the block."""

  def __init__(self):
    self.total = 0

  def __call__(self, event: str, duration: float, **metadata):
    self.total += event == COMPILE_EVENT


@pytest.fixture(autouse=True, scope='module')
def forget_programs() -> Iterator[None]:
  """Every compiled program holds memory maps, and a process may have 65,530 of them: all tests together need more."""
  yield
  if MAPS.exists() and MAPS.read_text().count('\n') > MANY_MAPS:
    jax.clear_caches()


@pytest.fixture(scope='module')
def optimized() -> Iterator[None]:
  """Programs as users get them, for the TPU too."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '0')
    patch.delenv('XLA_FLAGS', raising=False)
    jax.clear_caches()
    jax.config.update('jax_disable_most_optimizations', False)
    yield
  jax.clear_caches()
  jax.config.update('jax_disable_most_optimizations', True)


@pytest.fixture
def count_compiles() -> Callable[[], contextlib.AbstractContextManager[CompileCount]]:
  """`with count_compiles() as count:` then `count.total`. Every program counts, eager operations too."""

  @contextlib.contextmanager
  def counting() -> Iterator[CompileCount]:
    count = CompileCount()
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
      yield count
    finally:
      jax.monitoring.unregister_event_duration_listener(count)

  return counting
