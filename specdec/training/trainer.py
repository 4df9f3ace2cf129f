"""Trains whatever an `Objective` says, resumably.

    DIR/step_00000200/    the state after that step (`specdec.training.checkpoints`)
    DIR/metrics.jsonl     one line every `log_every` steps; DIR/tensorboard the same
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from models.errors import InputError
from models.sharding import put_whole
from specdec.training.checkpoints import Checkpoints
from specdec.training.config import TrainConfig
from specdec.training.log import Log
from specdec.training.rows import Row, batches, digest, place
from specdec.training.schedule import learning_rate
from specdec.training.step import Objective, TrainState, first_state, means, train_step

if TYPE_CHECKING:
  import grain

# Of a `TrainConfig`: how a run is watched and kept. All else decides what a step does: a run that goes on has the same.
FREE = ('log_every', 'eval_every', 'save_every', 'keep')


class DivergedError(Exception):
  """The loss or its gradient is not finite. The message is one line."""


class StoppedError(Exception):
  """The run was asked to stop before its last step, and has saved its state."""


class Trainer:
  """Trains to the last step, saves on the way, and goes on from the newest finished checkpoint.

  On one device an interrupted run ends, bit for bit, as one that was not.
  """

  def __init__(self, objective: Objective, optimizer: optax.GradientTransformation, trainable: Any, frozen: Any,
               rows: 'grain.MapDataset | Sequence[Row]', config: TrainConfig, directory: str | None,
               evaluate: Callable[[Any], dict[str, float]] | None = None, *,
               should_stop: Callable[[], bool] = lambda: False,
               on_step: Callable[[int, float | None], None] = lambda step, loss: None):
    """A run; a mesh must be the process's own before (`jax.set_mesh`).

    Args:
      objective: what is minimised.
      optimizer: such as `specdec.training.optimizer.adamw(config)`.
      trainable: tree of float32 parameters, no integers, where they belong on the mesh. It is given away: the first
        step writes over it.
      frozen: tree that the objective reads.
      rows: fields of each row, all rows alike in shape.
      config: steps, batches and the like.
      directory: where the run lives, and goes on; None writes nothing.
      evaluate: `trainable` -> what to log besides, every `eval_every` steps and at the end. It must not give
        its argument away.
      should_stop: asked after each step: whether to save and end, as after SIGTERM. Processes must agree.
      on_step: told each step, with the mean loss where a line of the log is due; for a progress bar.

    Raises:
      InputError: too few rows for a batch; parameters that are not float32.
    """
    wrong = [leaf.dtype for leaf in jax.tree.leaves(trainable) if leaf.dtype != np.float32]
    if wrong:
      raise InputError(f'parameters are trained in float32, not in {wrong[0]}: load the model with dtype float32')
    self._config, self._frozen, self._evaluate = config, frozen, evaluate
    self._should_stop, self._on_step = should_stop, on_step
    self._directory = directory
    self._checkpoints = Checkpoints(directory, config.keep) if directory is not None else None
    self._iterator = batches(rows, config.batch, config.seed)
    # Read first, so that nothing is compiled for data that cannot be read.
    self._first_batch = next(batches(rows, config.batch, config.seed))
    state = put_scalars(first_state(objective, optimizer, config, trainable, frozen, self._first_batch))
    self._state = state
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    self._step = jax.jit(functools.partial(train_step, objective, optimizer, config), donate_argnums=0,
                         out_shardings=(places, None))
    self._places: dict[int, Any] = {}  # step -> where the data is after it, for the newest steps
    self._facts = facts_of(objective, rows, config) if directory is not None else {}
    self._tokens = int(self._first_batch['tokens'].size) if 'tokens' in self._first_batch else 0

  def run(self) -> Any:
    """The trained parameters.

    Raises:
      StoppedError: `should_stop` said so; the same call in a new process goes on.
      DivergedError: the loss is no number; the last state in which it was is saved.
      InputError: a checkpoint in the directory is of another run.
    """
    start = self._resume()
    log = Log(self._directory, start)
    try:
      self._run(start, log)
    finally:
      log.close()
    return self._state.trainable

  def _run(self, start: int, log: Log) -> None:
    config, pending = self._config, None
    self._clock = start, time.perf_counter()
    for step in range(start + 1, config.steps + 1):
      self._state, finite = self._step(self._state, self._frozen, place(next(self._iterator)))
      self._places = {at: self._places[at] for at in (step - 1, step - 2) if at in self._places}
      self._places[step] = self._iterator.get_state()
      self._check(pending)  # of the step before: the device has this one to do meanwhile
      pending = step, finite
      due = functools.partial(_is_due, step, config.steps)
      stop = step < config.steps and self._should_stop()
      if stop or due(config.log_every) or due(config.eval_every) or due(config.save_every):
        self._check(pending)
      self._on_step(step, self._write_means(step, log) if due(config.log_every) else None)
      if step == start + 1:
        self._check(pending)
        self._clock = step, time.perf_counter()  # compilation does not count
      with self._clock_stopped():
        if due(config.eval_every) and self._evaluate is not None:
          log.write(step, self._evaluate(self._state.trainable))
        if stop or due(config.save_every):
          self._save(step)
      if stop:
        raise StoppedError(f'stopped after step {step} of {config.steps}')

  @contextlib.contextmanager
  def _clock_stopped(self) -> Iterator[None]:
    """What happens inside does not count as training."""
    began = time.perf_counter()
    yield
    self._clock = self._clock[0], self._clock[1] + time.perf_counter() - began

  def _check(self, pending: tuple[int, jax.Array] | None) -> None:
    if pending is None or bool(pending[1]):
      return
    step = pending[0]
    self._state = self._state.replace(failed=self._state.failed & False)  # a step that failed changed nothing
    kept = 'nothing is saved'
    if self._checkpoints is not None:
      if step - 1 in self._places:
        self._save(step - 1)
      newest = self._checkpoints.latest()
      kept = f'the state after step {newest} is kept' if newest is not None else 'no step was good'
    raise DivergedError(f'the loss or its gradient is no finite number at step {step} ({kept}): lower '
                        'train.learning_rate, or look at the data')

  def _write_means(self, step: int, log: Log) -> float:
    """Writes what the steps since the last line were like, and returns their mean loss."""
    values = means({name: float(value) for name, value in self._state.window.items()})
    self._state = self._state.replace(window=jax.tree.map(lambda x: x * 0, self._state.window))
    before, then = self._clock
    self._clock = step, time.perf_counter()
    values['learning_rate'] = float(learning_rate(self._config)(step - 1))
    if step - before:
      values['tokens_per_second'] = self._tokens * (step - before) / (self._clock[1] - then)
    log.write(step, values)
    return values['loss']

  def _save(self, step: int) -> None:
    if self._checkpoints is None or step in self._checkpoints.steps():
      return
    self._checkpoints.save_state(step, self._state, {'step': step, 'data': self._places[step]} | self._facts)

  def _resume(self) -> int:
    step = self._checkpoints.latest() if self._checkpoints is not None else None
    if step is None:
      return 0
    facts = self._checkpoints.load_facts(step)
    for name, value in self._facts.items():
      if facts.get(name) != value:
        its = f'with {name}={facts[name]}, not {value}' if name.startswith('train.') and name in facts else (
            f'of something else ({name} differs)')
        raise InputError(f'{self._checkpoints.path(step)} is of a run {its}: set it so, or name another '
                         'train.directory')
    self._state = self._checkpoints.load_state(step, self._state)
    self._places[step] = facts['data']
    self._iterator.set_state(facts['data'])
    return step


def facts_of(objective: Objective, rows: 'grain.MapDataset | Sequence[Row]', config: TrainConfig) -> dict[str, Any]:
  """What a run that goes on must have in common with the one that began."""
  fields = {f'train.{name}': value for name, value in dataclasses.asdict(config).items() if name not in FREE}
  return fields | {'objective': _told(objective), 'rows': digest(rows)}


def _told(value: Any) -> Any:
  """The names and numbers that an objective is made of, as JSON holds them."""
  if value is None or isinstance(value, bool | int | float | str):
    return value
  fields = {field.name: _told(getattr(value, field.name)) for field in dataclasses.fields(value)} if (
      dataclasses.is_dataclass(value)) else {}
  return {'type': type(value).__name__} | fields


def _is_due(step: int, steps: int, every: int) -> bool:
  return step == steps or (every > 0 and step % every == 0)


def put_scalars(state: TrainState) -> TrainState:
  """What is no parameter, whole on every device of the mesh; all of it where a step leaves it, so that one compiles."""
  leaves, structure = jax.tree.flatten(state)
  leaves = [leaf if leaf.ndim and leaf.committed else put_whole(leaf) for leaf in leaves]
  return jax.tree.unflatten(structure, [jax.device_put(leaf, leaf.sharding) for leaf in leaves])
