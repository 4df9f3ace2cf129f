"""One call serves prefill, decode and verify: blocks over the cache against one pass over everything."""

import dataclasses
import functools

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import MASKED, Attention, attend, window_mask
from models.decoder import Decoder
from models.kv_cache import KVCache
from models.protocol import Output
from tests.toys import CONFIG, VOCAB, forward, random_toy, target

BATCH, WIDTH, SLOTS = 3, 15, 20
TOKENS_BT = np.random.default_rng(0).integers(0, VOCAB, (BATCH, WIDTH))
POSITIONS_BT = np.broadcast_to(np.arange(WIDTH), (BATCH, WIDTH))
KINDS = {
    'rope': CONFIG,
    'blocks': dataclasses.replace(CONFIG, attention_block=8),
    'windows': dataclasses.replace(CONFIG, windows=(4, None)),
    'chinchilla': dataclasses.replace(CONFIG, positions='relative', mlp='gelu', tied_embedding=True),
    'relative': dataclasses.replace(CONFIG, positions='relative', attention_block=8, num_kv_heads=4),
    'qwen': dataclasses.replace(CONFIG, qkv_bias=True, qk_norm=True),
}


@functools.cache
def toy(kind: str) -> Decoder:
  return random_toy(KINDS[kind], seed=3)


@jax.jit
def append(model: Decoder, cache: KVCache, tokens_BT: Array) -> tuple[Array, KVCache]:
  """Logits of a block at the committed length, and the cache with the block committed."""
  width = tokens_BT.shape[1]
  positions_BT = cache.length_B[:, None] + jnp.arange(width)
  output = model(tokens_BT, positions_BT, cache.causal_mask(width), cache)
  return output.logits_BRV, output.cache.with_length(cache.length_B + width)


def close(actual, expected, tolerance: float = 1e-5):
  np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize('kind', KINDS)
def test_cached_equals_uncached(kind):
  """Fault 13: blocks of γ + 1 = 5 tokens, then of 1 and 3 at length 10, as one pass over all 15 tokens sees them."""
  model = toy(kind)
  expected_BTV = forward(model, TOKENS_BT)
  prefix = cache = model.init_cache(BATCH, SLOTS)
  for start in (0, 5, 10):
    prefix = cache
    logits, cache = append(model, prefix, TOKENS_BT[:, start:start + 5])
    close(logits, expected_BTV[:, start:start + 5])
  for width in (1, 3) if kind == 'rope' else (1,):
    logits, _ = append(model, prefix, TOKENS_BT[:, 10:10 + width])
    close(logits, expected_BTV[:, 10:10 + width])


def test_rows_of_different_lengths():
  """Fault 20: each row continues from its own length; what it held beyond is gone."""
  model, cache, starts = toy('blocks'), toy('blocks').init_cache(BATCH, SLOTS), (10, 4, 0)
  for start in (0, 5):
    _, cache = append(model, cache, TOKENS_BT[:, start:start + 5])
  block_BT = np.stack([TOKENS_BT[row, start:start + 5] for row, start in enumerate(starts)])
  logits, _ = append(model, cache.with_length(jnp.asarray(starts)), block_BT)
  expected_BTV = forward(model, TOKENS_BT)
  for row, start in enumerate(starts):
    close(logits[row], expected_BTV[row, start:start + 5])


def visible(model: Decoder, width: int) -> np.ndarray:
  """[T, T]: whether the logits of token t depend on token s, by derivatives along the embedding of s."""
  tokens_T = jnp.arange(width)  # all different, so that each has its own embedding

  def logits(shift_T: Array) -> Array:
    moved = model.first_layers(model.config.num_layers)
    moved.embed = nnx.Param(model.embed[...] * jnp.ones((VOCAB, 1)).at[:width, 0].add(shift_T))
    return forward(moved, tokens_T[None])[0]

  return np.any(np.asarray(jax.jacfwd(logits)(jnp.zeros(width))), axis=1)


@pytest.mark.parametrize('kind', ['rope', 'relative'])
def test_causality(kind):
  np.testing.assert_array_equal(visible(toy(kind), 9), np.tri(9, dtype=bool))


def test_window_reaches_back_as_far_as_it_says():
  model = random_toy(dataclasses.replace(CONFIG, num_layers=1, windows=(3,)))
  band = np.tri(6, dtype=int) - np.tri(6, k=-3, dtype=int)
  np.testing.assert_array_equal(visible(model, 6), band.astype(bool))


def test_window_mask():
  causal = KVCache.zeros(0, 1, 1, 6, 1, jnp.float32).with_length(jnp.asarray([2])).causal_mask(3)
  positions_BT, position_BS = jnp.asarray([[2, 3, 4]]), jnp.arange(6)[None]
  expected = ['011000', '001100', '000110']
  actual = window_mask(causal, positions_BT, position_BS, 2)
  np.testing.assert_array_equal(actual[0], [[c == '1' for c in row] for row in expected])
  np.testing.assert_array_equal(window_mask(causal, positions_BT, position_BS, None), causal)


@pytest.mark.parametrize('live', [1, 4, 9, 11])
def test_attention_in_blocks(live):
  """Blocks of 4 over 11 slots (the last overlaps) give the softmax over the live slots; the rest is never read."""
  rng = np.random.default_rng(live)
  q_BKGTH = rng.standard_normal((2, 2, 3, 2, 8)).astype(np.float32)
  k, v = (rng.standard_normal((2, 2, 11, 8)).astype(np.float32) for _ in range(2))
  bias = np.where(np.arange(11) < live, rng.standard_normal((2, 1, 1, 2, 11)), MASKED).astype(np.float32)
  whole = attend(q_BKGTH, k, v, bias, jnp.int32(live), None)
  k[:, :, -(-live // 4) * 4:] = np.nan
  close(attend(q_BKGTH, k, v, bias, jnp.int32(live), 4), whole)


def test_blocks_do_not_change_logits():
  close(forward(toy('blocks'), TOKENS_BT), forward(toy('rope'), TOKENS_BT))


def transformer_xl(attention: Attention, x_TD: np.ndarray) -> np.ndarray:
  """[T, D]: causal attention by Dai et al. (2019), equation 5, term by term in float64."""
  qkv_KXHD, out_DQ, relative_DNH, content_NH, position_NH = (np.asarray(weight[...], np.float64) for weight in (
      attention.qkv, attention.out, attention.relative, attention.content_bias, attention.position_bias))
  num_kv_heads, slices, head_dim, width = qkv_KXHD.shape
  out_DNH = out_DQ.reshape(width, -1, head_dim)
  frequency = 1 / 10_000 ** (np.arange(0, width, 2) / width)
  mixed_TD = np.zeros(x_TD.shape)
  for kv_head, group in np.ndindex(num_kv_heads, slices - 2):
    head = kv_head * (slices - 2) + group
    q_TH, k_TH, v_TH = (x_TD @ qkv_KXHD[kv_head, index].T for index in (group, -2, -1))
    for i in range(len(x_TD)):
      scores = []
      for j in range(i + 1):
        angle = (i - j) * frequency
        r_H = np.concatenate([np.sin(angle), np.cos(angle)]) @ relative_DNH[:, head]
        by_content = q_TH[i] @ k_TH[j] + content_NH[head] @ k_TH[j]  # (a) and (c)
        by_distance = q_TH[i] @ r_H + position_NH[head] @ r_H  # (b) and (d)
        scores.append((by_content + by_distance) / np.sqrt(head_dim))
      weights = np.exp(scores - np.max(scores))
      mixed_TD[i] += weights / weights.sum() @ v_TH[:i + 1] @ out_DNH[:, head].T
  return mixed_TD


@functools.partial(jax.jit, static_argnames='first')
def attended(model: Decoder, x_BTD: Array, first: int) -> Array:
  """The first layer's attention to vectors at the positions from `first` on."""
  batch, width = x_BTD.shape[:2]
  positions_BT = jnp.broadcast_to(first + jnp.arange(width), (batch, width))
  cache = model.init_cache(batch, SLOTS).mark_positions(positions_BT)
  return model.layers[0].attn(x_BTD, positions_BT, cache.causal_mask(width), None, cache, jnp.int32(width))[0]


@pytest.mark.parametrize('first', [0, 100])
@pytest.mark.parametrize('kind', ['chinchilla', 'relative'])
def test_relative_positions_by_the_paper(kind, first):
  x_BTD = np.random.default_rng(1).standard_normal((BATCH, WIDTH, CONFIG.width)).astype(np.float32)
  expected = [transformer_xl(toy(kind).layers[0].attn, x_TD.astype(np.float64)) for x_TD in x_BTD]
  assert np.abs(toy(kind).layers[0].attn.position_bias[...]).min() > 0, 'every term must count'
  close(attended(toy(kind), x_BTD, first), expected)


@jax.jit
def at_positions(model: Decoder, tokens_BT: Array, positions_BT: Array) -> Array:
  """Logits of tokens in slot order whose places in the text are given: each sees those not after it."""
  cache = model.init_cache(BATCH, SLOTS)
  mask_BTS = jnp.zeros((*tokens_BT.shape, SLOTS), bool)
  mask_BTS = mask_BTS.at[:, :, :WIDTH].set(positions_BT[:, None] <= positions_BT[..., None])
  return model(tokens_BT, positions_BT, mask_BTS, cache).logits_BRV


@pytest.mark.parametrize('kind', ['rope', 'windows'])
def test_only_distances_count(kind):
  """Logits stay when all positions shift, and do not when they stretch."""
  here_BTV = forward(toy(kind), TOKENS_BT)
  close(at_positions(toy(kind), TOKENS_BT, POSITIONS_BT + 100), here_BTV, 1e-4)
  assert np.abs(at_positions(toy(kind), TOKENS_BT, POSITIONS_BT * 2) - here_BTV).max() > 0.1


@pytest.mark.parametrize('kind', ['rope', 'windows'])
def test_position_and_slot_are_different_things(kind):
  """The same text laid into other slots gives each token the same logits."""
  order = np.random.default_rng(5).permutation(WIDTH)
  shuffled_BTV = at_positions(toy(kind), TOKENS_BT[:, order], POSITIONS_BT[:, order])
  close(shuffled_BTV, forward(toy(kind), TOKENS_BT)[:, order])


@jax.jit
def some_rows(model: Decoder, rows_BR: Array) -> Output:
  cache = model.init_cache(BATCH, SLOTS)
  return model(TOKENS_BT, POSITIONS_BT, cache.causal_mask(WIDTH), cache, rows_BR)


def test_rows_that_need_logits():
  """Fault 48: the asked rows only, and they equal those of the full computation."""
  model, rows_BR = toy('rope'), np.array([[14, 0], [3, 3], [8, 9]])
  output = some_rows(model, rows_BR)
  expected_BRV = np.take_along_axis(np.asarray(forward(model, TOKENS_BT)), rows_BR[..., None], axis=1)
  close(output.logits_BRV, expected_BRV)
  close(model.logits(output.hidden_BTD)[0, 14], expected_BRV[0, 0])
  assert output.logits_BRV.dtype == jnp.float32
  none = jax.eval_shape(some_rows, model, np.zeros((BATCH, 0), np.int32))
  assert none.logits_BRV.shape == (BATCH, 0, VOCAB)


def test_first_layers_share_every_array():
  model, part = target(), target().first_layers(1)
  assert part.config.num_layers == len(part.layers) == 1
  owned = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(model)}
  assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(part)} < owned
  close(forward(model.first_layers(2), TOKENS_BT), forward(model, TOKENS_BT), 0)
  assert np.abs(forward(part, TOKENS_BT) - forward(model, TOKENS_BT)).max() > 0.1
