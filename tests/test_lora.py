"""Low-rank adapters: zeros change nothing, the product is the product, each part lies where its weight lies."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.mesh import make_mesh
from models.sequence import Stack, stack, unstack
from models.sharding import shardings
from specdec.training.lora import ADAPTED, Adapter, adapted, new_adapter
from tests.toys import CONFIG, forward, random_toy

RANK, SCALE = 3, 0.5
TOKENS = jnp.arange(1, 21).reshape(2, 10)
PER_LAYER = ('qkv', 'out', 'up', 'down')


def base(**changes) -> Stack:
  return stack(random_toy(dataclasses.replace(CONFIG, **changes)))


def filled(stacked: Stack, seed: int = 0) -> Adapter:
  """Nothing in it is zero."""
  noise = np.random.default_rng(seed)
  return jax.tree.map(lambda x: jnp.asarray(noise.standard_normal(x.shape, np.float32) * 0.2),
                      new_adapter(stacked, RANK, jax.random.key(seed)))


def weights(stacked: Stack) -> dict[str, np.ndarray]:
  return {'.'.join(path): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(stacked))}


@pytest.mark.parametrize('tied', [False, True])
def test_what_is_adapted(tied):
  """Every product of the layers, and an LM head that is not the embedding; zeros change nothing, bit for bit."""
  stacked = base(tied_embedding=tied)
  adapter = new_adapter(stacked, RANK, jax.random.key(0))
  assert {name.rpartition('.')[2] for name in adapter} == set(ADAPTED if not tied else PER_LAYER)
  before, after = weights(stacked), weights(adapted(stacked, adapter, SCALE))
  assert before.keys() == after.keys()
  for name, value in before.items():
    np.testing.assert_array_equal(after[name], value)
  assert all((part['a'] != 0).all() and (part['b'] == 0).all() for part in adapter.values())


def test_a_pass_adds_the_low_rank_product():
  """In float64, layer by layer: W' x = W x + scale B (A x). Norms and the embedding stay."""
  stacked = base()
  adapter = filled(stacked)
  before, after = weights(stacked), weights(adapted(stacked, adapter, SCALE))
  for name, value in before.items():
    if name not in adapter:
      np.testing.assert_array_equal(after[name], value)
      continue
    as_layers = lambda x, name=name: np.float64(x if name.startswith('layers') else x[None])
    old, new, a, b = map(as_layers, (value, after[name], adapter[name]['a'], adapter[name]['b']))
    x_D = np.random.default_rng(1).standard_normal(old.shape[-1])
    for layer in range(len(old)):
      rows = b[layer].reshape(-1, RANK) @ (a[layer] @ x_D)
      expected = old[layer].reshape(-1, len(x_D)) @ x_D + SCALE * rows
      np.testing.assert_allclose(new[layer].reshape(-1, len(x_D)) @ x_D, expected, atol=1e-5)
      assert np.abs(rows).max() > 0.1


def test_merged_is_adapted():
  """What is saved says what an adapted pass says; scanned and unrolled layers round differently."""
  stacked = base()
  logits = jax.jit(lambda model: model.logits(model(TOKENS).hidden_BTD))
  expected = jax.jit(lambda adapter: logits(adapted(stacked, adapter, SCALE)))(filled(stacked))
  merged, size = unstack(adapted(stacked, filled(stacked), SCALE)), np.abs(expected).max()
  np.testing.assert_allclose(logits(stack(merged)), expected, rtol=0, atol=1e-6 * size)
  np.testing.assert_allclose(forward(merged, TOKENS), expected, rtol=0, atol=5e-6 * size)
  assert np.abs(forward(unstack(stacked), TOKENS) - expected).max() > 0.1 * size


def test_gradients_reach_the_adapter_alone():
  stacked = base()
  loss = lambda adapter: jnp.sum(jnp.square(adapted(stacked, adapter, SCALE)(TOKENS).hidden_BTD))
  grads = jax.jit(jax.grad(loss))(new_adapter(stacked, RANK, jax.random.key(0)))
  head = grads.pop('head')
  assert not np.any(head['b'])
  for part in grads.values():
    assert not np.any(part['a']) and np.any(part['b'])  # A has none as long as B is 0


def test_dtype_is_that_of_the_adapter():
  stacked = base()
  low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), filled(stacked))
  model = adapted(stacked, low, SCALE)
  assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}


def test_on_a_mesh():
  """A lies as the inputs of its weight, B as the outputs."""
  mesh = make_mesh(4, 2)
  with jax.set_mesh(mesh):
    stacked = base()
    graph, state = nnx.split(stacked)
    placed = nnx.merge(graph, jax.device_put(state, shardings(state, mesh)))
    adapter = new_adapter(placed, RANK, jax.random.key(0))
    shapes = {name: {part: x.sharding.shard_shape(x.shape) for part, x in parts.items()}
              for name, parts in adapter.items()}
    layers, width, mixed = CONFIG.num_layers, CONFIG.width, CONFIG.num_heads * CONFIG.head_dim
    assert shapes['layers.attn.out'] == {'a': (layers, RANK, mixed // 2), 'b': (layers, width, RANK)}
    assert shapes['layers.mlp.up'] == {'a': (layers, RANK, width), 'b': (layers, 2, CONFIG.ff_width // 2, RANK)}
    assert shapes['layers.mlp.down'] == {'a': (layers, RANK, CONFIG.ff_width // 2), 'b': (layers, width, RANK)}
    assert shapes['head'] == {'a': (RANK, width), 'b': (CONFIG.vocab_size // 2, RANK)}
    assert shapes['layers.attn.qkv']['b'][1] == CONFIG.num_kv_heads // 2
