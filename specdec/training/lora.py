"""Low-rank adapters (Hu et al., 2022, LoRA): W + α/r B A, of which A and B are trained and W is not.

The product is formed and added to the weight before each pass, so that any model runs adapted, and the model that is
merged at the end is the one that was trained. The gradient of a weight is formed with it and kept for a moment only:
what is spared are masters, moments and sums of gradients.
"""

from collections.abc import Iterator

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import NamedSharding

from models.sequence import Stack
from models.sharding import PARAMETERS, spec

ADAPTED = ('qkv', 'out', 'up', 'down', 'head')  # all products of the layers, and an LM head that is no embedding
Adapter = dict[str, dict[str, Array]]  # by the weight's name: 'a' [(L,) R, inputs], 'b' [(L,) outputs ..., R]


def new_adapter(base: Stack, rank: int, key: Array) -> Adapter:
  """A is drawn as new weights are, B is 0, so that nothing changes at first; each where its weight lies on the mesh.

  What a weight holds fused, queries, keys and values or gate and up, shares A.
  """
  adapter = {}
  for number, (path, weight) in enumerate(_weights(base)):
    dims, layers, inputs = PARAMETERS[path[-1]], _layers(path, weight), weight.shape[-1]
    a = jax.random.normal(jax.random.fold_in(key, number), (*layers, rank, inputs), jnp.float32) * inputs ** -0.5
    b = jnp.zeros((*weight.shape[:-1], rank), jnp.float32)
    adapter[_name(path)] = {'a': _put(a, f'R{dims[-1]}'), 'b': _put(b, f'{dims[:-1]}R')}
  return adapter


def adapted(base: Stack, adapter: Adapter, scale: float) -> Stack:
  """The model with `scale` B A added to its weights, in the dtype of the adapter, which its passes then compute in.

  Args:
    base: in any dtype.
    adapter: of this model.
    scale: α / r.
  """
  dtype = jax.tree.leaves(adapter)[0].dtype
  graph, state = nnx.split(base)
  leaves = []
  for path, leaf in nnx.to_flat_state(state):
    value = leaf.get_value()
    if part := adapter.get(_name(path)):
      equation = 'L...R,LRI->L...I' if _layers(path, value) else '...R,RI->...I'
      value = value + scale * jnp.einsum(equation, part['b'], part['a'], preferred_element_type=jnp.float32)
    leaves.append((path, leaf.replace(value.astype(dtype))))
  return nnx.merge(graph, nnx.from_flat_state(leaves))


def _weights(base: Stack) -> Iterator[tuple[tuple, Array]]:
  for path, leaf in nnx.to_flat_state(nnx.state(base, nnx.Param)):
    if path[-1] in ADAPTED:
      yield path, leaf.get_value()


def _layers(path: tuple, weight: Array) -> tuple[int, ...]:
  """(L,) of the weights of layers, which are stacked."""
  return weight.shape[:1] if path[0] == 'layers' else ()


def _name(path: tuple) -> str:
  return '.'.join(map(str, path))


def _put(x: Array, dims: str) -> Array:
  mesh = jax.sharding.get_mesh()
  return x if mesh.empty else jax.device_put(x, NamedSharding(mesh, spec(dims, x.shape, mesh)))
