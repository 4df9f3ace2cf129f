"""Writing, masking and rolling back."""

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import kv_cache
from models.kv_cache import KVCache, write_rows

LAYERS, BATCH, HEADS, SLOTS, HEAD_DIM = 2, 3, 2, 16, 4


def empty(dtype=jnp.float32) -> KVCache:
  return KVCache.zeros(LAYERS, BATCH, HEADS, SLOTS, HEAD_DIM, dtype)


def at(*lengths: int) -> KVCache:
  return empty().with_length(jnp.asarray(lengths, jnp.int32))


def random_update(width: int, seed: int = 0) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).standard_normal((BATCH, HEADS, width, HEAD_DIM)), jnp.float32)


@pytest.mark.parametrize('width', [1, 5])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_write_rows_by_slices_and_by_scatter(width, dtype, monkeypatch):
  """A batch too large to unroll writes the same."""
  buffer = jnp.asarray(np.random.default_rng(1).standard_normal((BATCH, HEADS, SLOTS, HEAD_DIM)), dtype)
  start_B = jnp.asarray([0, 7, SLOTS - width])
  sliced = write_rows(buffer, random_update(width), start_B)
  monkeypatch.setattr(kv_cache, 'MAX_UNROLLED_ROWS', 0)
  scattered = write_rows(buffer, random_update(width), start_B)
  assert sliced.dtype == scattered.dtype == dtype
  np.testing.assert_array_equal(np.asarray(sliced), np.asarray(scattered))
  expected = np.array(buffer)
  for row, start in enumerate((0, 7, SLOTS - width)):
    expected[row, :, start:start + width] = random_update(width)[row].astype(dtype)
  np.testing.assert_array_equal(np.asarray(sliced), expected)


def test_write_layer_touches_its_layer_and_slots_only():
  cache = at(0, 5, 13).write_layer(1, random_update(3), random_update(3, 1))
  assert not np.any(cache.k[0]) and not np.any(cache.v[0])
  written = np.zeros((BATCH, SLOTS), bool)
  for row, start in enumerate((0, 5, 13)):
    written[row, start:start + 3] = True
    np.testing.assert_array_equal(cache.k[1][row, :, start:start + 3], random_update(3)[row])
    np.testing.assert_array_equal(cache.v[1][row, :, start:start + 3], random_update(3, 1)[row])
  np.testing.assert_array_equal(np.any(np.asarray(cache.k[1]), axis=(1, 3)), written)
  np.testing.assert_array_equal(cache.length_B, [0, 5, 13])


def test_mark_positions():
  cache = at(0, 5, 13).mark_positions(jnp.asarray([[0, 1], [5, 5], [20, 21]]))
  expected = np.zeros((BATCH, SLOTS), int)
  expected[0, :2], expected[1, 5:7], expected[2, 13:15] = [0, 1], [5, 5], [20, 21]
  np.testing.assert_array_equal(cache.position_BS, expected)


def test_causal_mask():
  """Fault 13: query i of a block at length 10 sees slots 0..10+i, not a triangle from slot 0."""
  mask_BTS = at(10, 0, 2).causal_mask(3)
  expected = np.array([
      ['1111111111100000', '1111111111110000', '1111111111111000'],
      ['1000000000000000', '1100000000000000', '1110000000000000'],
      ['1110000000000000', '1111000000000000', '1111100000000000']])
  np.testing.assert_array_equal(mask_BTS, [[[c == '1' for c in row] for row in rows] for rows in expected])


def test_length_at_the_edges():
  """Fault 11: of a full cache of 3 slots nothing or everything stays; a length is never relative to the end."""
  cache = KVCache.zeros(LAYERS, BATCH, HEADS, 3, HEAD_DIM, jnp.float32).with_length(jnp.full(BATCH, 3))
  assert cache.capacity == 3
  np.testing.assert_array_equal(cache.with_length(jnp.zeros(BATCH, jnp.int32)).length_B, [0, 0, 0])
  np.testing.assert_array_equal(cache.with_length(jnp.full(BATCH, 3)).length_B, [3, 3, 3])
  for lengths in ([3, 5, 3], [3, 3, -1]):
    with pytest.raises(ValueError, match=r'0\.\.3'):
      cache.with_length(jnp.asarray(lengths))


def test_rollback_keeps_buffers():
  """Fault 12: nothing but the length changes, so shapes and shardings stay."""
  cache = at(3, 4, 5)
  back = cache.with_length(jnp.asarray([1, 4, 0]))
  assert all(new is old for new, old in zip(back.k + back.v, cache.k + cache.v, strict=True))


@jax.jit
def append(cache: KVCache, values_BKTH: jax.Array) -> KVCache:
  """Writes and commits, as one pass of a model does."""
  width = values_BKTH.shape[2]
  cache = cache.mark_positions(cache.length_B[:, None] + jnp.arange(width))
  for layer in range(LAYERS):
    cache = cache.write_layer(layer, values_BKTH + layer, -values_BKTH - layer)
  return cache.with_length(cache.length_B + width)


OPERATIONS = st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 3), min_size=BATCH, max_size=BATCH)),
                      max_size=12)


@settings(max_examples=40, deadline=None)
@given(OPERATIONS)
def test_append_and_rollback_equal_append_of_what_stays(operations):
  """Rows roll back by different counts; the committed slots hold what a list would."""
  cache, kept = empty(), [[] for _ in range(BATCH)]
  for seed, (width, backs) in enumerate(operations):
    if max(map(len, kept)) + width > SLOTS:
      break
    values = random_update(width, seed)
    cache = append(cache, values)
    kept = [[*row, *np.moveaxis(np.asarray(values[b]), 1, 0)] for b, row in enumerate(kept)]
    kept = [row[:max(0, len(row) - back)] for row, back in zip(kept, backs, strict=True)]
    cache = cache.with_length(jnp.asarray([len(row) for row in kept], jnp.int32))
  cache = jax.device_get(cache)
  for b, row in enumerate(kept):
    assert cache.length_B[b] == len(row)
    expected = np.moveaxis(np.reshape(row, (len(row), HEADS, HEAD_DIM)), 0, 1)
    for layer in range(LAYERS):
      np.testing.assert_array_equal(cache.k[layer][b, :, :len(row)], expected + layer)
      np.testing.assert_array_equal(cache.v[layer][b, :, :len(row)], -expected - layer)
    np.testing.assert_array_equal(cache.position_BS[b, :len(row)], np.arange(len(row)))
