"""Whole rows through stacked layers: the same function as the decoder on an empty cache."""

import dataclasses
import functools

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import pytest

from launch.mesh import make_mesh
from models.decoder import Decoder
from models.errors import InputError
from models.sequence import Stack, Vectors, row_mask, stack, unstack
from models.sharding import shardings
from tests.toys import CONFIG, VOCAB, forward, random_toy

BATCH, WIDTH = 3, 15
TOKENS_BT = np.random.default_rng(0).integers(0, VOCAB, (BATCH, WIDTH))
KINDS = {
    'rope': CONFIG,
    'windows': dataclasses.replace(CONFIG, windows=(4, 4)),
    'chinchilla': dataclasses.replace(CONFIG, positions='relative', mlp='gelu', tied_embedding=True),
    'relative': dataclasses.replace(CONFIG, positions='relative', attention_block=8, num_kv_heads=4),
    'qwen': dataclasses.replace(CONFIG, qkv_bias=True, qk_norm=True),
}


@functools.cache
def toy(kind: str) -> Decoder:
  return random_toy(KINDS[kind], seed=3)


@functools.partial(jax.jit, static_argnames='remat')
def logits_of(stacked: Stack, tokens_BT: Array, positions_BT: Array | None = None, segments_BT: Array | None = None,
              remat: bool = False) -> Array:
  return stacked.logits(stacked(tokens_BT, positions_BT, segments_BT, remat).hidden_BTD)


def close(actual, expected, tolerance: float = 1e-5):
  np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize('kind', KINDS)
def test_it_is_the_decoder(kind):
  close(logits_of(stack(toy(kind)), TOKENS_BT), forward(toy(kind), TOKENS_BT))


@pytest.mark.parametrize('kind', KINDS)
def test_documents_of_a_row_do_not_see_each_other(kind):
  """A row packed of three texts gives each what it gets alone."""
  lengths = (4, 8, 3)
  segments_BT = np.repeat(np.arange(1, 4), lengths)[None].repeat(BATCH, axis=0)
  positions_BT = np.concatenate([np.arange(length) for length in lengths])[None].repeat(BATCH, axis=0)
  packed = np.asarray(logits_of(stack(toy(kind)), TOKENS_BT, positions_BT, segments_BT))
  start = 0
  for length in lengths:
    part = slice(start, start + length)
    close(packed[:, part], forward(toy(kind), TOKENS_BT[:, part]))
    start += length


def test_row_mask():
  """Rows are queries: two documents of three tokens, a window of two."""
  positions_BT, segments_BT = np.array([[0, 1, 2, 0, 1, 2]]), np.array([[1, 1, 1, 2, 2, 2]])
  whole = ['100000', '110000', '111000', '000100', '000110', '000111']
  windowed = ['100000', '110000', '011000', '000100', '000110', '000011']
  for window, expected in ((None, whole), (2, windowed)):
    actual = row_mask(positions_BT, segments_BT, window)
    np.testing.assert_array_equal(actual[0], [[c == '1' for c in row] for row in expected])


@pytest.mark.parametrize('kind', [
    pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ('rope', 'chinchilla'))) for kind in KINDS])
def test_remat_changes_no_gradient(kind):
  stacked, weight_BTV = stack(toy(kind)), np.random.default_rng(1).standard_normal((BATCH, WIDTH, VOCAB))
  loss = lambda stacked, remat: jnp.mean(logits_of(stacked, TOKENS_BT, remat=remat) * weight_BTV)
  kept, again = (jax.grad(loss)(stacked, remat) for remat in (False, True))
  for ours, theirs in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
    assert np.any(ours)
    close(ours, theirs)


def test_gradients_are_the_decoders():
  """Of layers as of what all share; the stacked ones in the order of the layers."""
  model = toy('qwen')
  of_list = jax.grad(lambda model: jnp.mean(forward(model, TOKENS_BT) ** 2))(model)
  of_stack = jax.grad(lambda stacked: jnp.mean(logits_of(stacked, TOKENS_BT) ** 2))(stack(model))
  for ours, theirs in zip(jax.tree.leaves(unstack(of_stack)), jax.tree.leaves(of_list), strict=True):
    close(ours, theirs)


def test_layers_stay_in_order():
  """Twelve: sorted as strings, 10 and 11 come before 2."""
  deep = random_toy(dataclasses.replace(CONFIG, num_layers=12))
  stacked = stack(deep)
  for number in range(12):
    np.testing.assert_array_equal(stacked.layers.mlp.down[number], deep.layers[number].mlp.down[...])
  again = unstack(stacked)
  assert again.config == deep.config and jax.tree.structure(again) == jax.tree.structure(deep)
  for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(deep), strict=True):
    np.testing.assert_array_equal(ours, theirs)
  close(forward(again, TOKENS_BT), logits_of(stacked, TOKENS_BT), 1e-4)


@jax.jit
def vectors(stacked: Stack) -> Vectors:
  return stacked(TOKENS_BT)


@pytest.mark.parametrize('taps', [(), (0,), (0, 2)])
def test_taps_and_last_vectors(taps):
  model = random_toy(dataclasses.replace(CONFIG, num_layers=3, taps=taps), seed=2)
  cache = model.init_cache(BATCH, WIDTH)
  positions_BT = np.broadcast_to(np.arange(WIDTH), (BATCH, WIDTH))
  expected, actual = jax.jit(model)(TOKENS_BT, positions_BT, cache.causal_mask(WIDTH), cache), vectors(stack(model))
  close(actual.hidden_BTD, expected.hidden_BTD)
  assert (actual.taps_BTF is None) == (expected.taps_BTF is None)
  if taps:
    close(actual.taps_BTF, expected.taps_BTF, 1e-4)


def test_windows_that_differ():
  model = random_toy(dataclasses.replace(CONFIG, windows=(4, None)))
  with pytest.raises(InputError, match='give every layer the same window'):
    stack(model)


@pytest.mark.parametrize('kind', ['rope', 'chinchilla'])
@pytest.mark.parametrize('data, parts', [(2, 4), (8, 1)])
def test_on_a_mesh(kind, data, parts):
  """Rows over `data`, heads and hidden units over `model`: logits and gradients are those of one device."""
  config = dataclasses.replace(KINDS[kind], num_heads=4, num_kv_heads=4, head_dim=8)
  stacked = stack(random_toy(config, seed=4))
  tokens_BT = np.random.default_rng(2).integers(0, VOCAB, (8, WIDTH))
  loss = lambda stacked: jnp.mean(jax.nn.log_softmax(logits_of(stacked, tokens_BT))[..., 3])
  value, grads = jax.value_and_grad(loss)(stacked)
  mesh = make_mesh(data, parts)
  graph, state = nnx.split(stacked)
  spread = nnx.merge(graph, jax.device_put(state, shardings(state, mesh)))
  with jax.set_mesh(mesh):
    assert spread.layers.mlp.down[...].addressable_shards[0].data.shape == (2, 32, 64 // parts)
    on_mesh, grads_on_mesh = jax.jit(jax.value_and_grad(loss))(spread)
  close(on_mesh, value)
  for ours, theirs in zip(jax.tree.leaves(grads_on_mesh), jax.tree.leaves(grads), strict=True):
    close(ours, theirs)
