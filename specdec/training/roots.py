"""Where guesses begin: at all places of a row, or at as many as count.

Half of a row may be prompts and padding, where nothing is to be guessed. With a fixed number of places per row, drawn
anew for every batch where more count, a pass costs what answers cost.
"""

import jax
from jax import Array
import jax.numpy as jnp

from specdec.training.guesses import counted


def all_places(tokens_BT: Array) -> Array:
  """[B, T]."""
  return jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)


def roots_of(batch: dict[str, Array], count: int, key: Array) -> Array:
  """[B, N]: places whose next token but one is an answer, `count` of each row; all places for 0 or so many.

  Rows where fewer count are filled up with others.
  """
  if not 0 < count < batch['tokens'].shape[1]:
    return all_places(batch['tokens'])
  drawn_BT = jax.random.uniform(key, batch['tokens'].shape) + counted(batch, 2)
  return jnp.sort(jax.lax.top_k(drawn_BT, count)[1], axis=-1)


def at(x_BTX: Array, places_BN: Array) -> Array:
  """[B, N, ...]: what stands at the places."""
  return jax.vmap(lambda x_TX, places_N: x_TX[places_N])(x_BTX, places_BN)
