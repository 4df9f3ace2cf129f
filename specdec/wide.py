"""Reductions over a vocabulary, laid out so that CPUs vectorise them and no sort is needed anywhere."""

from jax import Array
import jax.numpy as jnp

LANES = 128


def tiled(x: Array) -> Array:
  """[..., V] as [..., V / LANES, LANES], padded with 0: sums over tiles first are vector adds, not a chain."""
  missing = -x.shape[-1] % LANES
  padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
  return padded.reshape(*x.shape[:-1], -1, LANES)


def first_max(x: Array) -> tuple[Array, Array]:
  """The maximum over the last axis and the lowest index where it is, [...]; rows with a NaN give NaN and index 0.

  The same index as `argmax`, from two plain reductions instead of one over pairs.
  """
  top = jnp.max(x, axis=-1, keepdims=True)
  index = jnp.min(jnp.where(x == top, jnp.arange(x.shape[-1]), x.shape[-1]), axis=-1)
  broken = jnp.any(jnp.isnan(x), axis=-1)
  return jnp.where(broken, jnp.nan, top[..., 0]), jnp.where(broken, 0, index).astype(jnp.int32)


def invert_cdf(law: Array, uniform: Array) -> Array:
  """The token in which the cumulated law [..., V] passes the uniform in [0, 1), [...] int32.

  Never a token of probability zero, whatever the rounding of the sums.
  """
  tiles = tiled(law)
  mass = jnp.sum(tiles, axis=-1)
  upto = jnp.cumsum(mass, axis=-1)
  goal = uniform * upto[..., -1]
  tile = _first_true_with_mass(upto > goal[..., None], mass)
  pick = lambda x: jnp.take_along_axis(x, tile[..., None], axis=-1)[..., 0]
  inner = jnp.take_along_axis(tiles, tile[..., None, None], axis=-2)[..., 0, :]
  rest = goal - (pick(upto) - pick(mass))
  lane = _first_true_with_mass(jnp.cumsum(inner, axis=-1) > rest[..., None], inner)
  return (tile * LANES + lane).astype(jnp.int32)


def _first_true_with_mass(passed: Array, mass: Array) -> Array:
  """The first entry that has mass and passed; if rounding let none pass, the last that has mass."""
  size = mass.shape[-1]
  index = jnp.arange(size)
  positive = mass > 0
  first = jnp.min(jnp.where(passed & positive, index, size), axis=-1)
  last = jnp.max(jnp.where(positive, index, 0), axis=-1)
  return jnp.minimum(first, last)
