"""From files to a `Decoder` or an `EncDec`, parameter by parameter."""

from collections.abc import Iterator
import contextlib
import dataclasses
import os
from pathlib import Path

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from models.abstract import AnyConfig, AnyModel, abstract_decoder
from models.errors import InputError
from models.kv_heads import repeat_kv_heads, with_repeats
from models.loading import gguf, hf_config, name_maps, orbax, safetensors, t5_config
from models.sharding import sharding_of


def load_decoder(path: str | os.PathLike, dtype: str = 'float32', mesh: Mesh | None = None,
                 **config_changes) -> tuple[AnyModel, AnyConfig]:
  """Reads a model from a Hugging Face directory, a GGUF file or a checkpoint of ours (`models.loading.orbax`).

  Everything is checked before anything is built. One parameter at a time is read, cast and placed: on the host
  no second copy of the model ever exists.

  Args:
    path: a directory with config.json and *.safetensors, a .gguf file, or a directory that `launch.convert` wrote.
    dtype: of the parameters, whatever the files hold.
    mesh: where the parameters go, each device getting its slice; None is the default device. On a mesh kv heads are
      repeated if that spreads them evenly, and the config says so.
    **config_changes: fields of the config to replace.

  Raises:
    InputError: one line that names the file and the field or tensor at fault.
  """
  changes = {'dtype': float_dtype(dtype)} | config_changes
  if orbax.is_checkpoint(path):
    decoder = orbax.load_decoder(path, dataclasses.replace(orbax.read_config(path), **changes), mesh)
    return decoder, decoder.config
  with open_checkpoint(path) as (source, style, config):
    config = dataclasses.replace(config, **changes)
    placed, times = with_repeats(config, mesh)
    graph, leaves = abstract_decoder(placed)
    for param_path, parameter in read_parameters(source, style, config):
      parameter = repeat_kv_heads(param_path, parameter, times)
      sharding = sharding_of(mesh, config.split)(param_path, parameter.shape) if mesh is not None else None
      leaves[param_path] = leaves[param_path].replace(place(parameter, sharding))
    return nnx.merge(graph, nnx.from_flat_state(leaves.items())), placed


def read_parameters(source: name_maps.TensorFile, style: str,
                    config: AnyConfig) -> Iterator[tuple[tuple, np.ndarray]]:
  """Path and value of every parameter, read one at a time, after all of them have been checked in this call."""
  _, leaves = abstract_decoder(config)
  plan = name_maps.assign(source, style, config, {path: leaf.shape for path, leaf in leaves.items()})
  return ((path, assignment.read(source, np.dtype(leaves[path].dtype))) for path, assignment in plan.items())


@contextlib.contextmanager
def open_checkpoint(path: str | os.PathLike):
  """Yields the open files, the style of their names ('hf' or 'gguf') and the config."""
  path = Path(path)
  if path.is_file() and path.suffix == '.gguf':
    with gguf.GgufFile(path) as file:
      yield file, 'gguf', gguf.decoder_config(file)
  elif path.is_dir() and t5_config.is_t5(path):
    source = safetensors.SafetensorsDirectory(path)
    yield source, 'hf', t5_config.encdec_config(path, own_head='lm_head.weight' in source.shapes)
  elif path.is_dir():
    config = hf_config.decoder_config(path)
    yield safetensors.SafetensorsDirectory(path), 'hf', config
  elif path.exists():
    raise InputError(f'{path} is neither a .gguf file nor a directory with config.json and *.safetensors')
  else:
    raise InputError(f'{path} does not exist')


def float_dtype(dtype: str) -> str:
  """The name of a floating-point type.

  Raises:
    InputError: if it is none.
  """
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
