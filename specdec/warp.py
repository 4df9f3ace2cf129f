"""Logits to the law that tokens are drawn from: temperature, then top-k, then top-p, in float32.

One function for draft, target, correction and bonus tokens: exactness needs the same law everywhere.
"""

import dataclasses
import math

import jax
from jax import Array
import jax.numpy as jnp

from specdec.wide import first_max, tiled

GREEDY_TEMPERATURE = 1e-5  # at or below, the law is one-hot at the (first) maximum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
  """Sampling parameters as device scalars: changing a value compiles nothing.

  Attributes:
    temperature: 0 (or anything up to `GREEDY_TEMPERATURE`) is greedy.
    top_k: keep the k likeliest tokens, ties included (1 is greedy: the first of them); 0 or less, or at least the
      vocabulary, is off.
    top_p: keep the smallest set of likeliest tokens whose mass reaches top_p (Holtzman et al., 2020), ties
      included; 1 is off.
  """

  temperature: Array
  top_k: Array
  top_p: Array

  @classmethod
  def create(cls, temperature: float = 0.0, top_k: int | None = 0, top_p: float = 1.0) -> 'Sampling':
    """Checked scalars.

    Raises:
      ValueError: temperature negative or not finite; top_p outside (0, 1].
    """
    if not (temperature >= 0 and math.isfinite(temperature)):
      raise ValueError(f'temperature must be 0 (greedy) or positive, got {temperature}')
    if not 0 < top_p <= 1:
      raise ValueError(f'top_p must lie in (0, 1], got {top_p}')
    smallest = float(jnp.finfo(jnp.float32).tiny)
    return cls(jnp.float32(temperature), jnp.int32(min(max(top_k or 0, 0), 2**31 - 1)),
               jnp.float32(max(top_p, smallest)))

  @property
  def greedy(self) -> Array:
    """Whether laws are one-hot."""
    return (self.temperature <= GREEDY_TEMPERATURE) | (self.top_k == 1)


def warp(logits: Array, sampling: Sampling) -> Array:
  """The law [..., V] float32 that decoding with `sampling` draws from; the order is fixed (module docstring).

  Where logits are NaN or +inf the whole law is NaN, so that one entry tells.
  """
  logits = logits.astype(jnp.float32)
  return jax.lax.cond(sampling.greedy, _one_hot_of_max, lambda x: _sampled_law(x, sampling), logits)


def _one_hot_of_max(logits: Array) -> Array:
  top, index = first_max(logits)
  valid = jnp.isfinite(top)[..., None]
  one_hot = jnp.arange(logits.shape[-1]) == index[..., None]
  return jnp.where(valid, one_hot.astype(jnp.float32), jnp.nan)


def _sampled_law(logits: Array, sampling: Sampling) -> Array:
  vocab = logits.shape[-1]
  law = jax.nn.softmax(logits / jnp.maximum(sampling.temperature, GREEDY_TEMPERATURE), axis=-1)
  use_top_k = (sampling.top_k > 0) & (sampling.top_k < vocab)
  law = jax.lax.cond(use_top_k, lambda p: keep_top_k(p, sampling.top_k), lambda p: p, law)
  return jax.lax.cond(sampling.top_p < 1, lambda p: keep_top_p(p, sampling.top_p), lambda p: p, law)


def keep_top_k(law: Array, top_k: Array) -> Array:
  """The k likeliest tokens and their ties, renormalised."""
  ones = lambda kept, _: kept.astype(jnp.float32)
  return _keep_from(law, _largest_threshold(law, ones, top_k.astype(jnp.float32)))


def keep_top_p(law: Array, top_p: Array) -> Array:
  """The smallest set of likeliest tokens with mass at least top_p, and ties of its last token, renormalised."""
  mass = lambda kept, p: jnp.where(kept, p, 0.0)
  return _keep_from(law, _largest_threshold(law, mass, top_p))


def _keep_from(law: Array, threshold: Array) -> Array:
  kept = jnp.where(law >= threshold[..., None], law, 0.0)
  return kept / jnp.sum(kept, axis=-1, keepdims=True)


def _largest_threshold(law: Array, weigh, wanted: Array) -> Array:
  """The largest t with sum(weigh(law >= t, law)) >= wanted, by bisection on the bits of t: no sort.

  Non-negative floats are ordered like their bit patterns, so 30 halvings between 0.0 and 1.0 are exact.
  """
  tiles = tiled(law)

  def halve(_, bounds):
    low, high = bounds
    middle = low + (high - low) // 2
    threshold = jax.lax.bitcast_convert_type(middle, jnp.float32)
    total = jnp.sum(jnp.sum(weigh(tiles >= threshold[..., None, None], tiles), axis=-2), axis=-1)
    enough = total >= wanted
    return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

  rows = law.shape[:-1]
  one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32) + 1
  low, _ = jax.lax.fori_loop(0, 30, halve, (jnp.zeros(rows, jnp.int32), jnp.full(rows, one)))
  return jax.lax.bitcast_convert_type(low, jnp.float32)
