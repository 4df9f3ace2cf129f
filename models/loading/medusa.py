"""Medusa heads as they are published, and ours in the same layout.

    config.json             medusa_num_heads, medusa_num_layers, base_model_name_or_path
    medusa_lm_head.pt       or .bin or .safetensors: the heads alone. Those trained together with their model lie
                            among its tensors, in model.safetensors or pytorch_model.bin

Head k of L residual blocks is `k.j.linear.weight` and `k.j.linear.bias`, j = 0 .. L - 1, and `k.L.weight` if it has an
LM head of its own; among the tensors of a model the names begin with `medusa_head.`. How many heads and blocks there
are is read off the names: published configs name fewer heads than their files hold. Ours may guess U of V tokens, and
then hold the map that EAGLE heads have (`models.loading.draft_ids`).
"""

import json
import os
from pathlib import Path
import re

from flax import nnx
from jax.sharding import Mesh
import numpy as np

from models.abstract import abstract_module
from models.config import MedusaConfig
from models.errors import InputError
from models.heads import MedusaHeads
from models.loading.draft_ids import IN_DRAFT, TO_TARGET, map_tensors, mapped_vocab, read_draft_ids
from models.loading.hf_config import Fields
from models.loading.load import float_dtype, place
from models.loading.name_maps import TensorFile
from models.loading.safetensors import SafetensorsDirectory, read_json, write_safetensors
from models.loading.torch_file import TorchFile
from models.sharding import sharding_of

ALONE = 'medusa_lm_head'
PREFIX = 'medusa_head.'
NAME = re.compile(r'(\d{1,3})\.(\d{1,3})\.(linear\.weight|linear\.bias|weight)')


def load_medusa(path: str | os.PathLike, width: int, vocab_size: int, dtype: str = 'float32',
                mesh: Mesh | None = None) -> MedusaHeads:
  """Reads heads for a target with these sizes; all tensors are checked before one is read.

  Args:
    path: a directory as above, or the file of heads itself.
    width, vocab_size: of the target.
    dtype: of the parameters, whatever the file holds.
    mesh: where the parameters go; None is the default device.

  Raises:
    InputError: one line that names the file and the tensor or field at fault.
  """
  source, config, names = checked_heads(path, width, vocab_size, dtype)
  ids = read_draft_ids(source, config.draft_vocab, vocab_size)
  graph, leaves = abstract_module(lambda: MedusaHeads(config, nnx.Rngs(0)))
  for param_path, leaf in leaves.items():
    parameter = source.read(names[param_path]).astype(leaf.dtype) if param_path in names else ids
    sharding = sharding_of(mesh)(param_path, parameter.shape) if mesh is not None else None
    leaves[param_path] = leaf.replace(place(parameter, sharding))
  return nnx.merge(graph, nnx.from_flat_state(leaves.items()))


def checked_heads(path: str | os.PathLike, width: int, vocab_size: int,
                  dtype: str = 'float32') -> tuple[TensorFile, MedusaConfig, dict[tuple, str]]:
  """The file of `load_medusa`, the shapes of its heads, and which tensor each parameter is; no tensor is read.

  Raises:
    InputError: see `load_medusa`.
  """
  path = Path(path)
  source = open_heads(path)
  prefix, config = _read_shape(source, width, vocab_size, float_dtype(dtype))
  base = _check_config(path, config) if path.is_dir() else ''
  _, leaves = abstract_module(lambda: MedusaHeads(config, nnx.Rngs(0)))
  names = {param_path: prefix + tensor_name(param_path, config.num_layers) for param_path in leaves
           if param_path != ('draft_ids',)}
  _check_tensors(source, prefix, {name: leaves[param_path].shape for param_path, name in names.items()}, base)
  return source, config, names


def save_medusa(heads: MedusaHeads, directory: str | os.PathLike, base_model: str = ''):
  """Writes the heads alone, as safetensors, and their config.json.

  Raises:
    InputError: if the directory cannot be written.
  """
  directory, config = Path(directory), heads.config
  tensors = {tensor_name(path, config.num_layers): np.asarray(leaf[...])
             for path, leaf in nnx.to_flat_state(nnx.state(heads, nnx.Param))}
  if heads.draft_ids is not None:
    tensors |= map_tensors(np.asarray(heads.draft_ids[...]), config.vocab_size)
  fields = dict(medusa_num_heads=config.num_heads, medusa_num_layers=config.num_layers,
                base_model_name_or_path=base_model)
  try:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / 'config.json').write_text(json.dumps(fields, indent=2) + '\n')
  except OSError as error:
    raise InputError(f'{directory} cannot be written: {error.strerror}') from None
  write_safetensors(directory / f'{ALONE}.safetensors', tensors)


def tensor_name(path: tuple, num_layers: int) -> str:
  """Of a parameter such as ('heads', 2, 'blocks', 0, 'residual')."""
  if path[-1] == 'head':
    return f'{path[1]}.{num_layers}.weight'
  return f'{path[1]}.{path[3]}.linear.' + {'residual': 'weight', 'residual_bias': 'bias'}[path[-1]]


def open_heads(path: Path) -> TensorFile:
  """The file of heads in a directory, or the one named.

  Raises:
    InputError: if there is none.
  """
  if not path.exists():
    raise InputError(f'{path} does not exist')
  if path.is_file():
    return SafetensorsDirectory(path) if path.suffix == '.safetensors' else TorchFile(path)
  for suffix in ('.safetensors', '.pt', '.bin'):
    if (path / (ALONE + suffix)).is_file():
      return open_heads(path / (ALONE + suffix))
  if any((path / f'model.safetensors{end}').is_file() for end in ('', '.index.json')):
    return SafetensorsDirectory(path)
  if any((path / f'pytorch_model.bin{end}').is_file() for end in ('', '.index.json')):
    return TorchFile(path)
  raise InputError(f'{path} has no {ALONE}.safetensors, .pt or .bin, and no model with heads among its tensors')


def _read_shape(source: TensorFile, width: int, vocab_size: int, dtype: str) -> tuple[str, MedusaConfig]:
  """The prefix of the names, and what they say about the heads."""
  prefix = PREFIX if any(name.startswith(PREFIX) for name in source.shapes) else ''
  parts = [match.groups() for name in source.shapes
           if name.startswith(prefix) and (match := NAME.fullmatch(name.removeprefix(prefix)))]
  if not parts:
    raise InputError(f"{source.path} holds no medusa heads: no tensor is called '{PREFIX}0.0.linear.weight' or "
                     "'0.0.linear.weight'")
  num_heads = 1 + max(int(head) for head, _, _ in parts)
  num_layers = 1 + max((int(layer) for _, layer, kind in parts if kind.startswith('linear')), default=0)
  with_head = {int(head) for head, _, kind in parts if kind == 'weight'}
  if with_head and len(with_head) < num_heads:
    without = min(set(range(num_heads)) - with_head)
    raise InputError(f'{source.path} mixes two layouts: head {min(with_head)} has an LM head of its own, head '
                     f'{without} has none')
  return prefix, MedusaConfig(num_heads, width, vocab_size, num_layers, bool(with_head), dtype, mapped_vocab(source))


def _check_config(directory: Path, config: MedusaConfig) -> str:
  """Compares config.json with the file; returns the name of the model that the heads were made for."""
  path = directory / 'config.json'
  if not path.is_file():
    return ''
  fields = Fields(path, read_json(path))
  num_heads = fields.size('medusa_num_heads', config.num_heads)
  num_layers = fields.size('medusa_num_layers', config.num_layers)
  if num_heads > config.num_heads:
    raise InputError(f'{path} names medusa_num_heads={num_heads}, and {directory} holds {config.num_heads}')
  if num_layers != config.num_layers:
    raise InputError(f'{path} names medusa_num_layers={num_layers}, and the heads in {directory} have '
                     f'{config.num_layers}')
  return fields.get('base_model_name_or_path', str, '')


def _check_tensors(source: TensorFile, prefix: str, wanted: dict[str, tuple[int, ...]], base: str):
  """Every tensor is there with its shape, and none besides."""
  problems = []
  for name, shape in wanted.items():
    if name not in source.shapes:
      problems.append(f'{name!r} is missing')
    elif source.shapes[name] != shape:
      problems.append(f'{name!r} has shape {source.shapes[name]}, not {shape}')
    elif not source.is_float(name) or source.problem(name):
      problems.append(f'{name!r} has no floating-point type that is supported')
  problems += [f'{name!r} is not part of a head' for name in source.shapes
               if name.startswith(prefix) and name not in (*wanted, TO_TARGET, IN_DRAFT)]
  if problems:
    more = f'; and {len(problems) - 3} more' if len(problems) > 3 else ''
    made_for = f' (heads made for {base!r})' if base else ''
    raise InputError(f'{source.path} does not fit the target{made_for}: {"; ".join(problems[:3])}{more}')
