"""Fewer kv heads than devices: each is repeated, so that a mesh axis divides them.

What the model computes stays the same; its cache grows.
"""

import dataclasses

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from models.config import DecoderConfig, EncDecConfig
from models.sharding import MODEL, kv_repeats

FUSED = ('qkv', 'qkv_bias')  # the parameters that hold kv heads


def with_repeats(config: DecoderConfig | EncDecConfig,
                 mesh: jax.sharding.Mesh | None) -> tuple[DecoderConfig | EncDecConfig, int]:
  """The config of the model as it lies on the mesh, and how often each kv head is repeated in it.

  Where no number helps (`kv_repeats`), or nothing is split, the model stays as it is, with its attention whole on every
  device.
  """
  times = kv_repeats(config, mesh.shape.get(MODEL, 1)) if mesh is not None and config.split else 1
  if times == 1:
    return config, 1
  return dataclasses.replace(config, num_kv_heads=config.num_kv_heads * times), times


def repeat_kv_heads(path: tuple, parameter: Array | np.ndarray, times: int) -> Array | np.ndarray:
  """[K, G + 2, ...] -> [K * times, G / times + 2, ...] of `qkv` and its bias; any other parameter as it is.

  Query heads keep their order: the G of a kv head go to its copies in turn, G / times each.
  """
  if times == 1 or path[-1] not in FUSED:
    return parameter
  xp = np if isinstance(parameter, np.ndarray) else jnp
  heads, slices, *rest = parameter.shape
  queries = parameter[:, :-2].reshape(heads * times, (slices - 2) // times, *rest)
  return xp.concatenate([queries, xp.repeat(parameter[:, -2:], times, axis=0)], axis=1)
