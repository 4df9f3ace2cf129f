"""One step of training as a pure function: gradients of all micro-batches together, then one update."""

from typing import Any, Protocol, runtime_checkable

from flax import struct
import jax
from jax import Array
import jax.numpy as jnp
import optax

from models.sharding import constrain
from specdec.training.config import TrainConfig

COUNT = 'count'


class Objective(Protocol):
  """What is minimised: pure, jitted by the trainer."""

  def loss(self, trainable: Any, frozen: Any, batch: dict[str, Array], key: Array) -> tuple[Array, dict[str, Array]]:
    """The loss of the rows of a batch, or of some of them (a micro-batch).

    Args:
      trainable, frozen: trees of parameters; the trainable ones in the dtype that a pass computes in.
      batch: row fields, stacked: [B, ...].
      key: for what the objective draws; another one in each step and micro-batch.

    Returns:
      The sum of the losses over what counts, float32, and a dict of float32 scalars. Of these 'count' is what the sum
      is divided by, over all micro-batches together, so that it does not matter how rows are cut into them; the others
      are sums too and are reported divided by 'count'.
    """
    ...


@runtime_checkable
class Changing(Protocol):
  """An objective that is another one in every step."""

  def at_step(self, step: Array) -> Objective:
    """What is minimised in the step after so many."""
    ...


@struct.dataclass
class TrainState:
  """All that a step changes.

  A step whose loss or gradient is not finite changes nothing but `failed`, and no step after it anything.

  Attributes:
    step: updates so far.
    trainable: float32.
    optimizer: optax's state.
    key_data: of the key that all steps' keys come from.
    window: sums since the last line of the log: 'loss', what the objective counts, 'grad_norm' and 'steps'.
    failed: scalar bool.
  """

  step: Array
  trainable: Any
  optimizer: Any
  key_data: Array
  window: dict[str, Array]
  failed: Array


def cast(tree: Any, dtype: str) -> Any:
  """Floating-point leaves in another dtype."""
  return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def train_step(objective: Objective, optimizer: optax.GradientTransformation, config: TrainConfig, state: TrainState,
               frozen: Any, batch: dict[str, Array]) -> tuple[TrainState, Array]:
  """The next state, and whether all is finite so far."""
  key = jax.random.fold_in(jax.random.wrap_key_data(state.key_data), state.step)
  objective = objective.at_step(state.step) if isinstance(objective, Changing) else objective
  grads, sums = gradients(objective, config, state.trainable, frozen, batch, key)
  norm = optax.global_norm(grads)
  failed = state.failed | ~(jnp.isfinite(sums['loss']) & jnp.isfinite(norm))
  updates, moved = optimizer.update(grads, state.optimizer, state.trainable)
  window = {name: state.window[name] + value for name, value in (sums | {'grad_norm': norm, 'steps': 1.0}).items()}
  after = state.replace(step=state.step + 1, trainable=optax.apply_updates(state.trainable, updates), optimizer=moved,
                        window=window)
  kept = jax.tree.map(lambda new, old: jnp.where(failed, old, new), after, state)
  return kept.replace(failed=failed), ~failed


def gradients(objective: Objective, config: TrainConfig, trainable: Any, frozen: Any, batch: dict[str, Array],
              key: Array) -> tuple[Any, dict[str, Array]]:
  """Gradients of the mean loss over all that counts in the batch (0 where nothing does), and all sums."""

  def summed(trainable: Any, batch: dict[str, Array], key: Array) -> tuple[Array, dict[str, Array]]:
    loss, sums = objective.loss(cast(trainable, config.dtype), frozen, batch, key)
    return loss, sums | {'loss': loss}

  def part(micro: dict[str, Array], index: Array | int) -> tuple[Any, dict[str, Array]]:
    (_, sums), grads = jax.value_and_grad(summed, has_aux=True)(trainable, micro, jax.random.fold_in(key, index))
    return grads, sums

  if config.accumulate == 1:
    grads, sums = part(batch, 0)
  else:
    parts = jax.tree.map(lambda x: micro_batches(x, config.accumulate), batch), jnp.arange(config.accumulate)
    shapes = jax.eval_shape(part, *jax.tree.map(lambda x: x[0], parts))
    total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (grads, sums), _ = jax.lax.scan(lambda total, one: (jax.tree.map(jnp.add, total, part(*one)), None), total, parts)
  return jax.tree.map(lambda grad: grad / jnp.maximum(sums[COUNT], 1.0), grads), sums


def micro_batches(x: Array, accumulate: int) -> Array:
  """[B, ...] -> [accumulate, B / accumulate, ...], each part over all of the axis `data`."""
  x = x.reshape(accumulate, -1, *x.shape[1:])
  return constrain(x, 'B' + 'T' * (x.ndim - 2))


def first_state(objective: Objective, optimizer: optax.GradientTransformation, config: TrainConfig, trainable: Any,
                frozen: Any, batch: dict[str, Array]) -> TrainState:
  """Before the first step; `batch` gives shapes only."""
  key = jax.random.key(config.seed)
  shapes = jax.eval_shape(objective.loss, cast_shapes(trainable, config.dtype), frozen, batch, key)[1]
  window = {name: jnp.zeros((), jnp.float32) for name in (*shapes, 'loss', 'grad_norm', 'steps')}
  return TrainState(
      step=jnp.zeros((), jnp.int32), trainable=trainable, optimizer=optimizer.init(trainable),
      key_data=jax.random.key_data(key), window=window, failed=jnp.zeros((), bool))


def cast_shapes(tree: Any, dtype: str) -> Any:
  """`cast` of shapes."""
  return jax.eval_shape(lambda tree: cast(tree, dtype), tree)


def means(window: dict[str, float]) -> dict[str, float]:
  """What a line of the log says of the steps since the last one."""
  count, steps = max(window[COUNT], 1.0), max(window['steps'], 1.0)
  per_count = {name: value / count for name, value in window.items() if name not in (COUNT, 'grad_norm', 'steps')}
  return per_count | {'grad_norm': window['grad_norm'] / steps, COUNT: window[COUNT]}
