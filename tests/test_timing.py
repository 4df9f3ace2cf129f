"""The stopwatch waits, takes turns, and keeps compilation apart."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import timing
from models.errors import InputError


class _Pending:
  """A result that is handed over at once and computed 0.2 s later."""

  def __init__(self):
    self.ready = time.perf_counter() + 0.2

  def block_until_ready(self):
    time.sleep(max(0.0, self.ready - time.perf_counter()))
    return self


def _sleep(x):
  time.sleep(0.2)
  return x


@jax.jit
def _slow_program(x):
  return jax.pure_callback(_sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1


def test_waits_for_the_whole_result():
  # Only a leaf deep in the result is late.
  measured = timing.measure({'late': lambda: {'now': 1, 'later': (np.ones(2), _Pending())}}, repeats=2)
  assert min(measured['late'].seconds) >= 0.2


def test_waits_for_a_program_on_the_device():
  x = jnp.zeros(3)
  measured = timing.measure({'program': lambda: _slow_program(x)}, repeats=2)['program']
  assert min(measured.seconds) >= 0.2
  np.testing.assert_array_equal(measured.result, np.ones(3))


def test_takes_turns_and_drops_warmups():
  calls = []
  functions = {name: lambda name=name: calls.append(name) or len(calls) for name in 'abc'}
  measured = timing.measure(functions, repeats=3, warmups=2)
  assert ''.join(calls) == 'abc' * 5
  assert [len(measured[name].seconds) for name in 'abc'] == [3, 3, 3]
  assert [measured[name].result for name in 'abc'] == [13, 14, 15]


def test_preparation_is_not_timed():
  made = []

  def prepare():
    time.sleep(0.1)
    made.append(_Pending())
    return made[-1]

  used = []
  measured = timing.measure({'f': used.append, 'g': lambda: None}, repeats=2, prepare={'f': prepare})
  assert used == made
  assert len(made) == 3
  assert max(*measured['f'].seconds, measured['f'].first_call_seconds) < 0.1


def test_compilation_is_apart():
  compiled = []

  def function():
    if not compiled:
      time.sleep(0.2)
      compiled.append(True)

  measured = timing.measure({'f': function}, repeats=3)['f']
  assert measured.first_call_seconds >= 0.2
  assert max(measured.seconds) < 0.1


def test_median():
  assert timing.Timing((3.0, 1.0, 2.0), 2.5).median == 2.0
  assert timing.Timing((0.5, 9.0, 0.5), 0.1).median == 0.5


@pytest.mark.parametrize('value', [np.ones(3), 1.0])
def test_host_transfers_are_forbidden_while_the_clock_runs(value):
  add = jax.jit(lambda x: x + 1)
  call = lambda x: {'f': lambda: add(x)}
  timing.measure(call(jax.device_put(value)), repeats=1)
  add(value)  # compiled, and allowed here
  with pytest.raises(RuntimeError, match='Disallowed host-to-device transfer'):
    timing.measure(call(value), repeats=1, warmups=0)


@pytest.mark.parametrize('repeats, warmups', [(0, 1), (1, -1)])
def test_too_few_calls(repeats, warmups):
  with pytest.raises(InputError, match='at least 1'):
    timing.measure({'f': lambda: None}, repeats, warmups)


def test_memory_bandwidth(monkeypatch):
  monkeypatch.setattr(timing, 'CPU_BYTES', 1 << 26)
  monkeypatch.setattr(timing, 'DEVICE_BYTES', 1 << 26)
  for measure in (timing._cpu_bandwidth, timing._device_bandwidth):
    assert 1e8 < measure() < 1e13


def test_a_device_is_measured_alone(monkeypatch):
  """Under a mesh too: one process of a job may measure while the others do not."""
  monkeypatch.setattr(timing, 'DEVICE_BYTES', 1 << 20)
  used = []
  monkeypatch.setattr(timing, '_best_seconds', lambda function: used.append(function().devices()) or 1.0)
  with jax.set_mesh(jax.make_mesh((8,), ('model',), axis_types=(jax.sharding.AxisType.Auto,))):
    timing._device_bandwidth()
  assert used == [{jax.local_devices()[0]}]


def test_memory_bandwidth_is_measured_once(monkeypatch):
  timing.memory_bandwidth.cache_clear()
  calls = []
  monkeypatch.setattr(timing, '_cpu_bandwidth', lambda: calls.append(1) or 5.0)
  monkeypatch.setattr(timing, '_device_bandwidth', lambda: calls.append(1) or 5.0)
  assert [timing.memory_bandwidth() for _ in range(3)] == [5.0] * 3
  assert len(calls) == 1
  timing.memory_bandwidth.cache_clear()
