"""The trainer: exact resume, SIGTERM, a loss that is no number, micro-batches (faults 42 and 57)."""

from collections.abc import Sequence
import dataclasses
import itertools
from pathlib import Path
import re
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.errors import InputError
from specdec.training.checkpoints import Checkpoints
from specdec.training.config import TrainConfig
from specdec.training.log import Log, read_metrics
from specdec.training.optimizer import adamw
from specdec.training.rows import batches
from specdec.training.step import first_state, gradients
from specdec.training.trainer import DivergedError, StoppedError, Trainer

WIDTH, ROWS = 5, 23
CONFIG = TrainConfig(steps=12, batch=6, learning_rate=0.05, warmup_steps=2, log_every=5, save_every=4, eval_every=6)
TIMES = {'tokens_per_second'}
RNG = np.random.default_rng(0)
DATA = [{'tokens': np.arange(WIDTH, dtype=np.int32), 'x': RNG.standard_normal(WIDTH, np.float32),
         'y': RNG.standard_normal((), np.float32), 'valid': np.float32(i % 3 > 0)} for i in range(ROWS)]

BATCH = {name: np.stack([row[name] for row in DATA[:12]]) for name in DATA[0]}


@dataclasses.dataclass(frozen=True)
class Squares:
  """Least squares over the valid rows, with noise that the key decides."""

  noise: float = 0.1

  def loss(self, trainable: Any, frozen: Any, batch: dict[str, Array], key: Array) -> tuple[Array, dict[str, Array]]:
    noise_B = self.noise * jax.random.normal(key, batch['y'].shape)
    error_B = batch['x'] @ trainable['w'] + trainable['bias'] + frozen + noise_B - batch['y']
    count = jnp.sum(batch['valid'])
    return jnp.sum(batch['valid'] * error_B ** 2), {'count': count, 'absolute': jnp.sum(batch['valid'] * abs(error_B))}


def fresh() -> dict[str, Array]:
  return {'w': jnp.ones(WIDTH), 'bias': jnp.zeros(())}


def trainer(directory: Path | None, config: TrainConfig = CONFIG, rows: Sequence[dict] = DATA, **options) -> Trainer:
  return Trainer(Squares(), adamw(config), fresh(), jnp.float32(0.5), rows, config,
                 None if directory is None else str(directory),
                 lambda trainable: {'eval_size': float(jnp.sum(trainable['w'] ** 2))}, **options)


def curve(directory: Path) -> list[dict]:
  """The log without times."""
  return [{name: value for name, value in row.items() if name not in TIMES} for row in read_metrics(directory)]


def assert_same(left: Any, right: Any):
  for ours, theirs in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> tuple[dict, list[dict]]:
  """What a run without interruption comes to."""
  directory = tmp_path_factory.mktemp('whole')
  return trainer(directory).run(), curve(directory)


def test_a_step_is_compiled_once(caplog):
  with jax.log_compiles():
    trainer(None, dataclasses.replace(CONFIG, steps=4, log_every=1, eval_every=0)).run()
  assert sum('Compiling jit(train_step)' in record.message for record in caplog.records) == 1


def stops_after(steps: int):
  return itertools.chain([False] * (steps - 1), itertools.repeat(True)).__next__


def test_it_learns_and_logs(whole, tmp_path):
  trained, rows = whole
  lines = [row for row in rows if 'loss' in row]
  assert [row['step'] for row in lines] == [5, 10, 12]
  assert [row['step'] for row in rows if 'eval_size' in row] == [6, 12]
  assert lines[-1]['loss'] < lines[0]['loss'] and set(lines[0]) == {
      'step', 'loss', 'absolute', 'count', 'grad_norm', 'learning_rate'}
  assert rows[-1]['eval_size'] == pytest.approx(float(jnp.sum(trained['w'] ** 2)))
  assert_same(trainer(None).run(), trained)


@pytest.mark.parametrize('stops', [(7,), (1, 4, 11)])
def test_interrupted_equals_uninterrupted(whole, tmp_path, stops):
  """Bit for bit: parameters and every line of the log, also of windows that the interruption cut."""
  done = 0
  for at in stops:
    with pytest.raises(StoppedError, match=f'stopped after step {at} of 12'):
      trainer(tmp_path, should_stop=stops_after(at - done)).run()
    assert Checkpoints(tmp_path, 1).latest() == at
    done = at
  assert_same(trainer(tmp_path).run(), whole[0])
  assert curve(tmp_path) == whole[1]


def test_killed_between_two_checkpoints(whole, tmp_path):
  """Fault 57: it goes on from the last finished one, and takes back the lines after it."""
  def die(step: int, loss: float | None):
    if step == 11:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    trainer(tmp_path, on_step=die).run()
  assert Checkpoints(tmp_path, 1).latest() == 8 and curve(tmp_path)[-1]['step'] == 10
  unfinished = Checkpoints(tmp_path, 1).path(11)
  (unfinished / 'weights').mkdir(parents=True)
  (unfinished / 'model.json.part').touch()
  Checkpoints(tmp_path, 1).path(12).mkdir()  # as far as a save has come that made its directory
  assert Checkpoints(tmp_path, 1).latest() == 8
  assert_same(trainer(tmp_path).run(), whole[0])
  assert curve(tmp_path) == whole[1]


def test_a_log_that_is_taken_back_is_never_half(tmp_path, monkeypatch):
  """Killed while it is written again, it is as it was."""
  trainer(tmp_path).run()
  before = read_metrics(tmp_path)
  write = Path.write_text

  def die(path: Path, text: str) -> None:
    write(path, text[:20])
    raise KeyboardInterrupt

  monkeypatch.setattr(Path, 'write_text', die)
  with pytest.raises(KeyboardInterrupt):
    Log(str(tmp_path), 5)
  assert read_metrics(tmp_path) == before


def test_a_finished_run_is_not_run_again(tmp_path):
  trained = trainer(tmp_path).run()
  steps = []
  again = trainer(tmp_path, on_step=lambda step, loss: steps.append(step)).run()
  assert_same(again, trained)
  assert not steps and curve(tmp_path)[-1]['step'] == 12


@pytest.fixture(scope='module')
def finished(tmp_path_factory) -> Path:
  directory = tmp_path_factory.mktemp('finished')
  trainer(directory).run()
  return directory


def test_a_run_with_other_data(tmp_path):
  trainer(tmp_path).run()
  others = [row | {'tokens': row['tokens'] + (index == 7)} for index, row in enumerate(DATA)]
  for rows in (others, DATA[:-1]):
    with pytest.raises(InputError, match=r'is of a run of something else \(rows differs\)'):
      trainer(tmp_path, rows=rows).run()


@pytest.mark.parametrize('name, here', [
    ('seed', 1), ('steps', 8), ('learning_rate', 0.1), ('beta2', 0.5), ('clip_norm', 2.0)])
def test_a_run_with_another_schedule(finished, name, here):
  """Also one whose last step is passed already; how it is watched may change."""
  said = f'is of a run with train.{name}={getattr(CONFIG, name)}, not {here}: set it so, or name another'
  with pytest.raises(InputError, match=re.escape(said)):
    trainer(finished, dataclasses.replace(CONFIG, **{name: here})).run()
  trainer(finished, dataclasses.replace(CONFIG, log_every=1, eval_every=0, save_every=1, keep=3)).run()


def test_a_run_with_another_objective(finished):
  other = Trainer(Squares(noise=0.2), adamw(CONFIG), fresh(), jnp.float32(0.5), DATA, CONFIG, str(finished))
  with pytest.raises(InputError, match=r'something else \(objective differs\)'):
    other.run()


def test_another_model(tmp_path):
  trainer(tmp_path).run()
  more = fresh() | {'more': jnp.ones(2)}
  other = Trainer(Squares(), adamw(CONFIG), more, jnp.float32(0), DATA, CONFIG, str(tmp_path))
  with pytest.raises(InputError, match=r'does not match this training \(3 parameters\): .*more.* is missing'):
    other.run()


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_a_loss_that_is_no_number(tmp_path, bad):
  """The run ends in one line, and the last good step is kept."""
  poisoned = [row | {'y': np.float32(bad)} if index == 17 else row for index, row in enumerate(DATA)]
  config = dataclasses.replace(CONFIG, save_every=0, log_every=50)
  with pytest.raises(DivergedError, match=r'no finite number at step (\d+) \(the state after step') as caught:
    trainer(tmp_path, config, poisoned).run()
  assert '\n' not in str(caught.value)
  step = int(str(caught.value).split('at step ')[1].split()[0])
  with pytest.raises(StoppedError):
    trainer(tmp_path / 'good', config, should_stop=stops_after(step - 1)).run()
  kept, good = (Checkpoints(directory, 1) for directory in (tmp_path, tmp_path / 'good'))
  assert kept.latest() == good.latest() == step - 1 > 0
  like = first_state(Squares(), adamw(config), config, fresh(), jnp.float32(0.5), BATCH)
  assert_same(kept.load_state(step - 1, like), good.load_state(step - 1, like))


def test_nothing_to_keep(tmp_path):
  poisoned = [row | {'y': np.float32(np.nan)} for row in DATA]
  with pytest.raises(DivergedError, match=r'at step 1 \(no step was good\)'):
    trainer(tmp_path, rows=poisoned).run()




def grads_of(accumulate: int, batch: dict = BATCH) -> tuple[Any, dict]:
  config = dataclasses.replace(CONFIG, batch=12, accumulate=accumulate)
  return jax.jit(lambda: gradients(Squares(noise=0), config, fresh(), jnp.float32(0), batch, jax.random.key(0)))()


@pytest.mark.parametrize('accumulate', [2, 4, 12])
def test_micro_batches_equal_one_batch(accumulate):
  """Fault 42: micro-batches with different numbers of valid rows, some with none."""
  whole, parts = grads_of(1), grads_of(accumulate)
  for ours, theirs in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_nothing_valid():
  """Fault 42: no gradient, and no NaN; one invalid row takes nothing from the others' mean."""
  grads, sums = grads_of(3, BATCH | {'valid': np.zeros(12, np.float32)})
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads)) and sums['count'] == 0 and sums['loss'] == 0
  one = {name: np.repeat(values[1:2], 12, axis=0) for name, values in BATCH.items()}
  alone = grads_of(1, one | {'valid': np.eye(12, dtype=np.float32)[0]})
  for ours, theirs in zip(jax.tree.leaves(alone[0]), jax.tree.leaves(grads_of(1, one)[0]), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_bfloat16_with_float32_masters():
  seen = []

  class Watch(Squares):
    def loss(self, trainable, frozen, batch, key):
      seen.append(trainable['w'].dtype)
      return Squares.loss(self, trainable, frozen, batch, key)

  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  trained = Trainer(Watch(), adamw(config), fresh(), jnp.float32(0.5), DATA, config, None).run()
  assert set(map(str, seen)) == {'bfloat16'} and trained['w'].dtype == jnp.float32
  for leaf, other in zip(jax.tree.leaves(trained), jax.tree.leaves(trainer(None).run()), strict=True):
    np.testing.assert_allclose(leaf, other, atol=0.05)


def test_masters_must_be_float32():
  with pytest.raises(InputError, match='float32, not in bfloat16'):
    Trainer(Squares(), optax.sgd(1.0), {'w': jnp.ones(WIDTH, jnp.bfloat16)}, None, DATA, CONFIG, None)


def test_batches_of_one_row():
  """Epoch after epoch, each in an order of its own."""
  rows = batches([{'x': np.array(i)} for i in range(4)], 1, 3)
  epochs = [[int(next(rows)['x'][0]) for _ in range(4)] for _ in range(3)]
  assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs) and len(set(map(tuple, epochs))) > 1


class Growing:
  """Its loss is the number of the step."""

  def __init__(self, step: Array | float = -1.0):
    self.step = step

  def at_step(self, step: Array) -> 'Growing':
    return Growing(step + 1.0)

  def loss(self, trainable: Any, frozen: Any, batch: dict[str, Array], key: Array) -> tuple[Array, dict[str, Array]]:
    return self.step + 0 * jnp.sum(trainable['w']), {'count': jnp.ones(())}


def test_an_objective_that_changes(tmp_path):
  """That of each step is asked for."""
  config = dataclasses.replace(CONFIG, steps=3, log_every=1, warmup_steps=0, save_every=0)
  Trainer(Growing(), optax.sgd(0.1), {'w': jnp.ones(2)}, None, DATA, config, str(tmp_path)).run()
  assert [row['loss'] for row in read_metrics(tmp_path)] == [1, 2, 3]


def test_fewer_rows_than_a_batch():
  with pytest.raises(InputError, match=r'5 rows of data do not fill a batch of train\.batch=6'):
    trainer(None, rows=DATA[:5])


@pytest.mark.parametrize('change, said', [
    ({'batch': 0}, 'train.batch=0 must be 1 or more'), ({'accumulate': 4}, 'train.batch=6 must be a multiple of'),
    ({'learning_rate': float('nan')}, 'train.learning_rate=nan must be positive'), ({'dtype': 'float16'}, 'bfloat16'),
    ({'warmup_steps': 13}, 'at most train.steps=12'), ({'beta2': 1.0}, 'in [0, 1)')])
def test_config(change, said):
  with pytest.raises(InputError) as caught:
    dataclasses.replace(CONFIG, **change)
  assert said in str(caught.value)
