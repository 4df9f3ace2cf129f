"""An encoder-decoder on its own: cached passes against whole rows, what each side sees, positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.distance_bias import bias_at, bias_over_row, bucket_ranges
from models.errors import InputError
from models.source import Source
from tests.encdec_toys import (
  CONFIG,
  SOURCES,
  VOCAB,
  draft,
  forward,
  random_encdec,
  source_of,
  stranger,
  target,
)

BATCH, WIDTH, SLOTS = len(SOURCES), 30, 48
TOKENS_BT = np.random.default_rng(3).integers(0, VOCAB, (BATCH, WIDTH))


def close(actual, expected, tolerance: float = 1e-5):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@jax.jit
def whole_pass(model, source: Source, tokens_BT) -> tuple[jax.Array, jax.Array]:
  """Logits, and a cache with all of them in it."""
  cache = model.init_cache(tokens_BT.shape[0], SLOTS, source)
  position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  output = model(tokens_BT, position_BT, cache.causal_mask(tokens_BT.shape[1]), cache)
  return output.logits_BRV, output.cache


@pytest.mark.parametrize('make', [
    *(pytest.param(make, marks=pytest.mark.slow) for make in (target, draft)), stranger],
                         ids=['target', 'first layer', 'v1.0'])
def test_cached_equals_whole_rows(make):
  """All tokens at once, and then in pieces at different places of each row."""
  model, source = make(), source_of(SOURCES)
  expected = forward(model, source, TOKENS_BT)
  logits_BTV, _ = whole_pass(model, source, TOKENS_BT)
  close(logits_BTV, expected)
  start_B = jnp.asarray([0, 3, 11, 7])
  rows_B1 = jnp.arange(BATCH)[:, None]
  _, filled = whole_pass(model, source, TOKENS_BT)
  cache = filled.with_length(start_B)  # what lies past the lengths is there, and is not seen
  for width in (1, 5, 2):
    position_BT = start_B[:, None] + jnp.arange(width)
    output = model(TOKENS_BT[rows_B1, position_BT], position_BT, cache.causal_mask(width), cache)
    close(output.logits_BRV, expected[rows_B1, position_BT])
    start_B = start_B + width
    cache = output.cache.with_length(start_B)


def test_attention_in_blocks():
  """Text and source both longer than a block."""
  model = random_encdec(dataclasses.replace(CONFIG, attention_block=16))
  logits_BTV, _ = whole_pass(model, source_of(SOURCES), TOKENS_BT)
  close(logits_BTV, forward(target(), source_of(SOURCES), TOKENS_BT))


def test_rows_that_need_logits():
  source = source_of(SOURCES)
  cache = target().init_cache(BATCH, SLOTS, source)
  position_BT = jnp.broadcast_to(jnp.arange(WIDTH), TOKENS_BT.shape)
  rows_BR = jnp.asarray([[4, 2], [0, 1], [29, 3], [7, 7]])
  output = target()(TOKENS_BT, position_BT, cache.causal_mask(WIDTH), cache, rows_BR)
  close(output.logits_BRV, forward(target(), source, TOKENS_BT)[jnp.arange(BATCH)[:, None], rows_BR])


def test_what_lies_past_a_source_is_never_seen():
  """Poison there changes nothing; the source itself changes everything."""
  expected, _ = whole_pass(target(), source_of(SOURCES), TOKENS_BT)
  poisoned, _ = whole_pass(target(), source_of(SOURCES, padding=VOCAB - 1), TOKENS_BT)
  np.testing.assert_array_equal(poisoned, expected)
  wider, _ = whole_pass(target(), source_of(SOURCES, width=64, padding=3), TOKENS_BT)
  close(wider, expected)
  cache = target().init_cache(BATCH, SLOTS, source_of(SOURCES))
  dead_BS = jnp.arange(cache.cross.k[0].shape[2]) >= cache.cross.length_B[:, None]
  rubbish = lambda arrays: tuple(jnp.where(dead_BS[:, None, :, None], 1e4, x) for x in arrays)
  spoiled = cache.replace(cross=cache.cross.replace(k=rubbish(cache.cross.k), v=rubbish(cache.cross.v)))
  position_BT = jnp.broadcast_to(jnp.arange(WIDTH), TOKENS_BT.shape)
  output = target()(TOKENS_BT, position_BT, cache.causal_mask(WIDTH), spoiled)
  np.testing.assert_allclose(output.logits_BRV, expected, rtol=0, atol=1e-4)
  other, _ = whole_pass(target(), source_of(tuple((*text[:-1], 2) for text in SOURCES)), TOKENS_BT)
  assert (np.abs(other - expected).max(axis=(1, 2)) > 0.1).all(), 'the last token of each source is seen'


def test_who_sees_whom():
  """The encoder both ways, the decoder backwards only."""
  source, model = source_of(SOURCES[:1], 37), target()
  encoded = lambda tokens_BS: model.encode(Source(tokens_BS, source.length_B))
  first, last = (np.abs(encoded(source.tokens_BS.at[0, slot].set(2)) - encoded(source.tokens_BS)).max(axis=(0, 2))
                 for slot in (0, 36))
  assert (first > 1e-4).all() and (last > 1e-4).all()
  tokens_BT = TOKENS_BT[:1].copy()
  changed = tokens_BT.copy()
  changed[0, 12] = (changed[0, 12] + 1) % VOCAB
  moved_T = np.abs(forward(model, source, changed) - forward(model, source, tokens_BT)).max(axis=(0, 2))
  assert not moved_T[:12].any() and (moved_T[12:] > 1e-4).all()


def test_first_layers_and_another_head_share_arrays():
  other = target().with_head(target().lm_head[:5])
  assert draft().config.num_layers == 1 and draft().embed is target().embed and draft().encoder is target().encoder
  assert other.lm_head.shape == (5, CONFIG.width) and target().lm_head.shape == (VOCAB, CONFIG.width)


@pytest.mark.parametrize('bidirectional', [True, False])
def test_bias_by_distance(bidirectional):
  """Whole rows by their distances, and every distance in exactly one bucket."""
  ranges = bucket_ranges(8, 20, bidirectional)
  table_NX = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
  distance_TT = np.arange(40)[:, None] - np.arange(40)
  low_X, high_X = ranges
  assert ((distance_TT[..., None] >= low_X) & (distance_TT[..., None] < high_X)).sum(axis=-1).max() == 1
  expected = bias_at(table_NX, jnp.asarray(distance_TT)[None], ranges)[0]
  bucket_TT = np.argmax((distance_TT[..., None] >= low_X) & (distance_TT[..., None] < high_X), axis=-1)
  np.testing.assert_allclose(expected, table_NX[:, bucket_TT], atol=1e-6)
  np.testing.assert_array_equal(bias_over_row(table_NX, 40, ranges), expected)


@pytest.mark.parametrize(('changes', 'message'), [
    ({'mlp': 'swiglu'}, 'mlp'), ({'num_buckets': 6}, 'num_buckets'), ({'max_distance': 4}, 'max_distance'),
    ({'start_token': 64}, 'start_token'), ({'taps': (1,)}, 'taps'), ({'num_heads': 0}, 'num_heads')])
def test_configs_that_are_refused(changes, message):
  with pytest.raises(InputError, match=message):
    dataclasses.replace(CONFIG, **changes)
