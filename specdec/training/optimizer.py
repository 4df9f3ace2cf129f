"""AdamW as language models are trained with it (Loshchilov and Hutter, 2019)."""

from typing import Any

import jax
import optax

from specdec.training.config import TrainConfig
from specdec.training.schedule import learning_rate

UNDECAYED = ('norm', 'bias')  # in the name of a parameter


def decayed(tree: Any) -> Any:
  """Of each parameter whether weight decay pulls at it: not at norms and biases."""
  def is_decayed(path: tuple, leaf: Any) -> bool:
    name = jax.tree_util.keystr(path)
    return not any(part in name for part in UNDECAYED)

  return jax.tree_util.tree_map_with_path(is_decayed, tree)


def clip(config: TrainConfig) -> optax.GradientTransformation:
  """Of the gradient of all parameters together."""
  return optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()


def adamw(config: TrainConfig, rate: optax.Schedule | None = None) -> optax.GradientTransformation:
  """Clips the gradient of all parameters together, then AdamW; decay is scaled by the learning rate.

  Args:
    config: of the run.
    rate: in the place of `schedule.learning_rate`.
  """
  return optax.chain(clip(config), optax.adamw(
      rate or learning_rate(config), b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay, mask=decayed))
