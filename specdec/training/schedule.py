"""How long to train, and how fast: Chinchilla's recipe (Hoffmann et al., 2022)."""

import math

from jax import Array
import jax.numpy as jnp
import optax

from models.errors import InputError
from specdec.training.config import TrainConfig

TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al. (2022), Table 3: 1e9 parameters, 20.2e9 tokens


def planned_tokens(num_parameters: int, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> int:
  """Tokens that make the best of a budget, for a model of this size.

  Raises:
    InputError: unless the ratio is positive.
  """
  if not 0 < tokens_per_parameter < float('inf'):
    raise InputError(f'train.tokens_per_parameter={tokens_per_parameter} must be positive')
  return math.ceil(num_parameters * tokens_per_parameter)


def steps_for(tokens: int, batch: int, row_tokens: int) -> int:
  """Steps of `batch` rows that hold at least so many tokens.

  Raises:
    InputError: for a number that is not positive.
  """
  for name, value in (('tokens', tokens), ('batch', batch), ('row_tokens', row_tokens)):
    if value < 1:
      raise InputError(f'train.{name}={value} must be 1 or more')
  return math.ceil(tokens / (batch * row_tokens))


def learning_rate(config: TrainConfig) -> optax.Schedule:
  """Of each step, from 0: linear up to the highest rate, then a cosine that ends at `final_share` of it.

  The cosine is as long as the training: a longer one leaves the loss above what the tokens allow (section B).
  """
  warmup, top, last = config.warmup_steps, config.learning_rate, config.steps - 1

  def rate(step: Array) -> Array:
    step = jnp.asarray(step, jnp.float32)
    done = jnp.clip((step - warmup) / max(1, last - warmup), 0.0, 1.0)
    share = config.final_share + (1 - config.final_share) * 0.5 * (1 + jnp.cos(jnp.pi * done))
    return top * jnp.where(step < warmup, (step + 1) / (warmup + 1), share)

  return rate
