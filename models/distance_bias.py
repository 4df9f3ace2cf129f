"""Attention scores by distance in buckets: short distances each have their own, long ones share one logarithmically.

Raffel et al. (2020), "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", section 2.1.
A distance is the query's position minus the key's.
"""

import functools
import math

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

INFINITE = np.iinfo(np.int32).max


@functools.cache
def bucket_ranges(num_buckets: int, max_distance: int, bidirectional: bool) -> tuple[np.ndarray, np.ndarray]:
  """The distances of each bucket, as its least one and the one after its last, both [X] int32.

  All distances from `max_distance` on share a bucket. Half of the buckets are for keys after the query if attention is
  `bidirectional`; else such keys, which are not seen, count as distance 0.
  """
  side = num_buckets // 2 if bidirectional else num_buckets
  starts = _starts(side, max_distance)
  ends = np.append(starts[1:], INFINITE)
  if not bidirectional:
    return np.append(-INFINITE, starts[1:]).astype(np.int32), ends.astype(np.int32)
  later_low, later_high = 1 - ends, 1 - np.maximum(starts, 1)  # of keys after the query, whose distances are negative
  return np.concatenate([starts, later_low]).astype(np.int32), np.concatenate([ends, later_high]).astype(np.int32)


def _starts(side: int, max_distance: int) -> np.ndarray:
  """The least distance of each bucket on one side, in float32 as the published models have it."""
  exact = side // 2
  distance = np.arange(exact, max_distance + 1, dtype=np.float32)
  logarithm = np.log(distance / np.float32(exact)) / np.float32(math.log(max_distance / exact))
  bucket = np.minimum(exact + (logarithm * np.float32(side - exact)).astype(np.int64), side - 1)
  later = exact + np.searchsorted(bucket, np.arange(exact, side))
  return np.concatenate([np.arange(exact), later])


def bias_at(table_NX: Array, distance_BTS: Array, ranges: tuple[np.ndarray, np.ndarray]) -> Array:
  """[B, N, T, S] float32: what each head adds to the score of each distance.

  As a product with the buckets' membership: a TPU would gather one score at a time.
  """
  low_X, high_X = ranges
  inside = (distance_BTS[..., None] >= low_X) & (distance_BTS[..., None] < high_X)
  return jnp.einsum('NX,BTSX->BNTS', table_NX.astype(jnp.float32), inside.astype(jnp.float32),
                    precision=jax.lax.Precision.HIGHEST)


def bias_over_row(table_NX: Array, width: int, ranges: tuple[np.ndarray, np.ndarray]) -> Array:
  """[N, T, T] float32: `bias_at` for the tokens of whole rows.

  Each distance is looked up once; repeating the 2 T scores T times in rows of 2 T - 1 moves each row on by one.
  """
  distance_S = np.where(np.arange(2 * width) < width, 0, 2 * width) - np.arange(2 * width)
  once_NS = bias_at(table_NX, jnp.asarray(distance_S)[None, None], ranges)[0, :, 0]
  rows = jnp.tile(once_NS, width)[:, :width * (2 * width - 1)].reshape(-1, width, 2 * width - 1)
  return rows[:, :, :width]
