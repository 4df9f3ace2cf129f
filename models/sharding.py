"""Which dimension of an array lies over which axis of the mesh: one table for weights, caches and activations.

Megatron's layout (Shoeybi et al., 2019): heads, the hidden units of the MLP and the vocabulary lie over `model`, so
that a layer needs two all-reduces per pass; rows of the batch are split over `data`. Whatever else the loop carries is
whole on every device.
"""

from collections.abc import Callable
from typing import Any

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from models.config import DecoderConfig
from models.errors import InputError

DATA, MODEL = 'data', 'model'
# Dimensions that are not named here are never split.
AXES = {'B': DATA, 'V': MODEL, 'N': MODEL, 'K': MODEL, 'F': MODEL, 'Q': MODEL}
WHOLE_IF_UNEVEN = 'BKNQ'  # rows and heads that the axis does not divide lie whole on every device
PARAMETERS = {
    'embed': 'VD', 'head': 'VD', 'final_norm': 'D', 'attn_norm': 'D', 'mlp_norm': 'D',
    'qkv': 'KXHD', 'qkv_bias': 'KXH', 'q_norm': 'H', 'k_norm': 'H', 'out': 'DQ',
    'relative': 'DNH', 'content_bias': 'NH', 'position_bias': 'NH', 'up': 'FD', 'down': 'DF',
    'query': 'KHD', 'source_kv': 'KXHD', 'cross_norm': 'D', 'distance_bias': 'NX',
    'residual': 'FD', 'residual_bias': 'F',
    'fc': 'FX', 'fc_bias': 'F', 'embed_norm': 'D', 'hidden_norm': 'D', 'draft_ids': 'U',
}


def spec(dims: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, split: bool = True) -> PartitionSpec:
  """How an array with these dimensions lies on the mesh; leading dimensions without a letter are whole.

  Of a model that is not `split` (`DecoderConfig.split`) nothing lies over the axis `model`.

  Raises:
    InputError: if an axis does not divide a dimension that is split over it.
    ValueError: if two dimensions are split over one axis.
  """
  axes: list[str | None] = [None] * (len(shape) - len(dims))
  for letter, size in zip(dims, shape[len(axes):], strict=True):
    axis = AXES.get(letter)
    if not split and axis == MODEL:
      axis = None
    parts = mesh.shape.get(axis, 1) if axis else 1
    if size % parts and letter not in WHOLE_IF_UNEVEN:
      raise InputError(f'mesh.{axis}={parts} does not divide the {size} of dimension {letter} of {dims}{shape}: '
                       f'choose a divisor of {size}')
    axes.append(axis if parts > 1 and size % parts == 0 else None)
  used = [axis for axis in axes if axis]
  if len(used) != len(set(used)):
    raise ValueError(f'{dims} is split twice over one axis: {axes}')
  return PartitionSpec(*axes)


def constrain(x: Array, dims: str, split: bool = True) -> Array:
  """Lays `x` out as the table says; without a mesh (`jax.set_mesh`) nothing happens."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, spec(dims, x.shape, mesh, split))


def whole(tree: Any) -> Any:
  """Every array of `tree` whole on every device; without a mesh nothing happens."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return tree
  return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


def put_whole(tree: Any) -> Any:
  """Moves host arrays to every device of the mesh, or to the default device without one."""
  if jax.sharding.get_abstract_mesh().empty:
    return jax.device_put(tree)
  return jax.device_put(tree, NamedSharding(jax.sharding.get_mesh(), PartitionSpec()))


def gather_last(x: Array) -> Array:
  """Every device's part of the last dimension on every device.

  The parts are gathered along a leading dimension: along the last one XLA:TPU transposes the whole result, twice.
  """
  mesh = jax.sharding.get_abstract_mesh()
  parts = 1 if mesh.empty else mesh.shape[MODEL]
  if parts == 1:
    return whole(x)
  x = x.reshape(*x.shape[:-1], parts, x.shape[-1] // parts)
  x = jax.lax.with_sharding_constraint(jnp.moveaxis(x, -2, 0), PartitionSpec(MODEL))
  x = jax.lax.optimization_barrier(whole(x))
  return whole(jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], parts * x.shape[-1]))


def sharding_of(mesh: Mesh, split: bool = True) -> Callable[[tuple, tuple[int, ...]], NamedSharding]:
  """Of a parameter, by its path and shape."""
  return lambda path, shape: NamedSharding(mesh, spec(PARAMETERS[path[-1]], shape, mesh, split))


def shardings(state: nnx.State, mesh: Mesh, split: bool = True) -> nnx.State:
  """The sharding of every parameter of a model's state (of arrays or of shapes)."""
  place = sharding_of(mesh, split)
  return nnx.from_flat_state(
      [(path, leaf.replace(place(path, leaf.get_value().shape))) for path, leaf in nnx.to_flat_state(state)])


def kv_repeats(config: DecoderConfig, parts: int) -> int:
  """How often each kv head must be repeated for `parts` devices to hold equally many; 1 if no number helps."""
  for times in range(1, config.group_size + 1):
    if config.group_size % times == 0 and config.num_kv_heads * times % parts == 0:
      return times
  return 1
