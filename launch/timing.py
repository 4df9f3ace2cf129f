"""The one stopwatch: every time this project reports was taken here."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import functools
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.errors import InputError

CPU_BYTES, DEVICE_BYTES = 1 << 29, 1 << 30  # far beyond any cache


@dataclasses.dataclass(frozen=True)
class Timing:
  """Times of one function.

  Attributes:
    seconds: of each timed call.
    first_call_seconds: of the very first call, compilation included.
    result: what the last call returned.
  """

  seconds: tuple[float, ...]
  first_call_seconds: float
  result: Any = None

  @property
  def median(self) -> float:
    return float(np.median(self.seconds))


def _call(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
  start = time.perf_counter()
  result = jax.block_until_ready(function(*arguments))
  return time.perf_counter() - start, result


def measure(functions: Mapping[str, Callable[..., Any]], repeats: int, warmups: int = 1,
            prepare: Mapping[str, Callable[[], Any]] | None = None) -> dict[str, Timing]:
  """Times functions side by side: in turns, in this process, each call until all of its result is computed.

  In turns, because a machine that slows down for a while should slow all of them. A timed call must not move data
  between host and device on the quiet: JAX refuses it (`jax.device_put` and `jax.device_get` say so and may).

  Args:
    functions: by name; called without arguments, or with what `prepare` made.
    repeats: timed calls of each.
    warmups: untimed calls of each before; the first also compiles and is reported apart. 0 only for functions that
      have run before.
    prepare: for functions that need something fresh for each call, such as a prompt's cache: makes it, untimed.
  """
  if repeats < 1 or warmups < 0:
    raise InputError(f'repeats must be at least 1 and warmups at least 0, not {repeats} and {warmups}')
  prepare = prepare or {}

  def call(name: str, guard: str) -> tuple[float, Any]:
    prepared = [jax.block_until_ready(prepare[name]())] if name in prepare else []
    with jax.transfer_guard(guard):
      return _call(functions[name], *prepared)

  first: dict[str, float] = {}
  seconds: dict[str, list[float]] = {name: [] for name in functions}
  results: dict[str, Any] = {}
  for turn in range(warmups + repeats):
    timed = turn >= warmups
    for name in functions:
      elapsed, results[name] = call(name, 'disallow' if timed else 'allow')  # compilation may move constants
      first.setdefault(name, elapsed)
      if timed:
        seconds[name].append(elapsed)
  return {name: Timing(tuple(seconds[name]), first[name], results[name]) for name in functions}


@functools.cache
def memory_bandwidth() -> float:
  """Measured read bandwidth in bytes per second: of all cores together on a CPU, else of one device."""
  return _cpu_bandwidth() if jax.default_backend() == 'cpu' else _device_bandwidth()


def _best_seconds(function: Callable[[], Any], tries: int = 8) -> float:
  return min(_call(function)[0] for _ in range(tries))


def _cpu_bandwidth() -> float:
  # A dot product: the numpy reduction that reads fastest, and it leaves the interpreter to the other threads.
  array = np.ones(CPU_BYTES // 4, np.float32)
  cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
  parts = np.array_split(array, cores)
  with ThreadPoolExecutor(cores) as pool:
    return array.nbytes / _best_seconds(lambda: list(pool.map(lambda part: np.dot(part, part), parts)))


def _device_bandwidth() -> float:
  # Of a job's processes one alone may measure: a program over the mesh would wait for the others for ever.
  with jax.set_mesh(None):
    array = jnp.ones((DEVICE_BYTES // 4096, 1024), jnp.float32, device=jax.local_devices()[0])
    return array.nbytes / _best_seconds(functools.partial(jax.jit(jnp.sum), array))
