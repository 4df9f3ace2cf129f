"""Keys by position: a row's text depends on its own key alone, not on its neighbours or on the drafter's luck.

Every random number is drawn from `fold_in(fold_in(row key, position), purpose)`. Reusing the noise of a position
after a rejection is exact for rules that never look past the first rejected token (`rejection`, `coupled`): a
discarded token had no influence on anything that was kept.
"""

import enum

import jax
from jax import Array
import jax.numpy as jnp

from specdec.wide import first_max, invert_cdf


class Purpose(enum.IntEnum):
  DRAFT = 0  # drawing the drafted token
  ACCEPT = 1  # the uniform of the acceptance test
  EMIT = 2  # the correction or bonus token
  SHARED = 3  # noise that draft and target share (coupled rule)
  STEP = 4  # the keys of one step


def row_keys(seeds_B: Array) -> Array:
  """One key per row from one seed per row."""
  return jax.vmap(jax.random.key)(seeds_B)


def step_keys(row_key_B: Array, position_B: Array) -> Array:
  """Row keys of the step that begins at this position, used in no other step.

  For rules that look past the first rejected token: what was drawn for a position there is not to be drawn again.
  """
  return keys_at(row_key_B, position_B, Purpose.STEP)


def keys_at(row_key_B: Array, position_B: Array, purpose: Purpose) -> Array:
  """The key of each row for one position of its text and one purpose."""
  return jax.vmap(lambda key, position: jax.random.fold_in(jax.random.fold_in(key, position), purpose))(
      row_key_B, position_B)


def uniforms(row_key_B: Array, position_B: Array, width: int, purpose: Purpose, each: int | None = None) -> Array:
  """[B, T] uniforms in [0, 1) for the positions position..position+T-1 of each row; [B, T, `each`] if given."""
  shape = () if each is None else (each,)
  draw = jax.vmap(lambda key: jax.random.uniform(key, shape))
  return jnp.stack(
      [draw(keys_at(row_key_B, position_B + i, purpose)) for i in range(width)], axis=1) if width else (
          jnp.zeros((position_B.shape[0], 0, *shape)))


def gumbels(row_key_B: Array, position_B: Array, vocab: int, purpose: Purpose) -> Array:
  """[B, V] standard Gumbel noise, float32 always: in bfloat16 a large vocabulary is badly skewed."""
  return jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(keys_at(row_key_B, position_B, purpose))


def gumbel_max(law_BTV: Array, noise_BTV: Array) -> Array:
  """[B, T] tokens from the laws by the Gumbel-max trick (Gumbel, 1954); ties go to the lowest id."""
  return first_max(jnp.log(law_BTV) + noise_BTV)[1]


def draw(row_key_B: Array, position_B: Array, law_BV: Array, purpose: Purpose) -> Array:
  """[B] tokens from the laws, for one position of each row.

  Noise that draft and target share must be Gumbel noise over the vocabulary; else one uniform inverts the
  cumulated law, which costs less.
  """
  if purpose is Purpose.SHARED:
    return gumbel_max(law_BV, gumbels(row_key_B, position_B, law_BV.shape[-1], purpose))
  return invert_cdf(law_BV, uniforms(row_key_B, position_B, 1, purpose)[:, 0])
