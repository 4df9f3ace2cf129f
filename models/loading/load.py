"""From files to a `Decoder`, parameter by parameter."""

from collections.abc import Callable
import contextlib
import dataclasses
import os
from pathlib import Path

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from models.config import DecoderConfig
from models.decoder import Decoder
from models.errors import InputError
from models.loading import gguf, hf_config, name_maps, safetensors

ShardingOf = Callable[[tuple, tuple[int, ...]], jax.sharding.Sharding | None]


def load_decoder(path: str | os.PathLike, dtype: str = 'float32', sharding_of: ShardingOf | None = None,
                 **config_changes) -> tuple[Decoder, DecoderConfig]:
  """Reads a model from a Hugging Face directory or a GGUF file.

  Everything is checked before anything is built. One parameter at a time is read, cast and placed: on the host
  no second copy of the model ever exists.

  Args:
    path: a directory with config.json and *.safetensors, or a .gguf file.
    dtype: of the parameters, whatever the files hold.
    sharding_of: (parameter path, shape) -> sharding, or None for the default device; for example
      ('layers', 3, 'attn', 'qkv').
    **config_changes: fields of `DecoderConfig` to replace.

  Raises:
    InputError: one line that names the file and the field or tensor at fault.
  """
  with open_checkpoint(path) as (source, style, config):
    config = dataclasses.replace(config, **{'dtype': _float_dtype(dtype)} | config_changes)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    leaves = dict(nnx.to_flat_state(abstract))
    plan = name_maps.assign(source, style, config, {path: leaf.shape for path, leaf in leaves.items()})
    for param_path, assignment in plan.items():
      parameter = assignment.read(source, np.dtype(leaves[param_path].dtype))
      sharding = sharding_of(param_path, parameter.shape) if sharding_of else None
      leaves[param_path] = leaves[param_path].replace(place(parameter, sharding))
    return nnx.merge(graph, nnx.from_flat_state(leaves.items())), config


@contextlib.contextmanager
def open_checkpoint(path: str | os.PathLike):
  """Yields the open files, the style of their names ('hf' or 'gguf') and the `DecoderConfig`."""
  path = Path(path)
  if path.is_file() and path.suffix == '.gguf':
    with gguf.GgufFile(path) as file:
      yield file, 'gguf', gguf.decoder_config(file)
  elif path.is_dir():
    config = hf_config.decoder_config(path)
    yield safetensors.SafetensorsDirectory(path), 'hf', config
  elif path.exists():
    raise InputError(f'{path} is neither a .gguf file nor a directory with config.json and *.safetensors')
  else:
    raise InputError(f'{path} does not exist')


def _float_dtype(dtype: str) -> str:
  try:
    is_float = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
  except TypeError:
    is_float = False
  if not is_float:
    raise InputError(f"dtype={dtype!r} is not a floating-point type: use 'float32', 'bfloat16' or 'float16'")
  return jnp.dtype(dtype).name


def place(parameter: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
  """Puts a parameter on its devices; with a sharding each device gets its slice only."""
  if sharding is None:
    return jnp.asarray(parameter)
  return jax.make_array_from_callback(parameter.shape, sharding, lambda index: parameter[index])
