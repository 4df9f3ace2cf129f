"""Draft models that say U of the target's V tokens and borrow what they share with it.

    config.json           of a Llama, with draft_vocab_size; `borrows` names what comes from the target
    model.safetensors     layers and final norm as Hugging Face names them; d2t, t2d (`models.loading.draft_ids`);
                          lm_head.weight [U, D], unless it is borrowed: then it is the target's rows of these tokens

The embedding is always the target's, so that such a draft is as wide as the target.
"""

import dataclasses
import json
import os
from pathlib import Path

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from models.abstract import abstract_decoder
from models.config import DecoderConfig
from models.decoder import Decoder
from models.errors import InputError
from models.kv_heads import repeat_kv_heads, with_repeats
from models.loading import name_maps
from models.loading.draft_ids import map_tensors, mapped_vocab, read_draft_ids
from models.loading.export import hf_config as to_hf_config
from models.loading.hf_config import decoder_config
from models.loading.load import float_dtype, place
from models.loading.name_maps import TensorFile
from models.loading.safetensors import SafetensorsDirectory, read_json, write_safetensors
from models.sharding import constrain, sharding_of

CONFIG, VOCAB, BORROWS = 'config.json', 'draft_vocab_size', 'borrows'
EMBED, HEAD = ('embed',), ('head',)


def is_reduced(path: str | os.PathLike) -> bool:
  """Whether a directory holds such a draft."""
  file = Path(path) / CONFIG
  return file.is_file() and BORROWS in read_json(file)


def save_reduced(draft: Decoder, ids_U: np.ndarray, directory: str | os.PathLike, borrows_head: bool):
  """Writes all but what is borrowed, in the dtype of the parameters.

  Raises:
    InputError: if the directory cannot be written, or no Hugging Face family has such a model.
  """
  directory, borrowed = Path(directory), [EMBED, HEAD] if borrows_head else [EMBED]
  tensors = map_tensors(np.asarray(ids_U), draft.config.vocab_size)
  for path, leaf in nnx.to_flat_state(nnx.state(draft, nnx.Param)):
    if path not in borrowed:
      tensors |= dict(name_maps.split(path, np.asarray(leaf[...]), 'hf'))
  fields = to_hf_config(dataclasses.replace(draft.config, tied_embedding=False))
  fields |= {VOCAB: len(ids_U), BORROWS: [path[0] for path in borrowed]}
  try:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(fields, indent=2) + '\n')
  except OSError as error:
    raise InputError(f'{directory} cannot be written: {error.strerror}') from None
  write_safetensors(directory / 'model.safetensors', tensors)


def load_reduced(path: str | os.PathLike, target: Decoder, dtype: str = 'float32', mesh: Mesh | None = None,
                 **config_changes) -> tuple[Decoder, np.ndarray]:
  """The draft made for a target, its LM head of U rows, and the target's ids of these, ascending; all is checked first.

  Args:
    path: for which `is_reduced` holds.
    target: whose embedding, and LM head perhaps, it borrows.
    dtype: of the parameters, whatever the file holds; what is borrowed keeps its own.
    mesh: where the parameters go; None is the default device.
    **config_changes: fields of `DecoderConfig` to replace.

  Raises:
    InputError: one line that names the file and the tensor or field at fault.
  """
  source, config, plan = checked_draft(path, target, dtype, **config_changes)
  ids_U = read_draft_ids(source, num_drafted(source, config), config.vocab_size)
  placed, times = with_repeats(config, mesh)
  graph, leaves = abstract_decoder(placed)
  for param_path, assignment in plan.items():
    parameter = repeat_kv_heads(param_path, assignment.read(source, np.dtype(config.dtype)), times)
    sharding = None if mesh is None else sharding_of(mesh, config.split)(param_path, parameter.shape)
    leaves[param_path] = leaves[param_path].replace(place(parameter, sharding))
  leaves[EMBED] = target.embed
  if HEAD not in plan:
    leaves[HEAD] = nnx.Param(head_rows(target, ids_U, config.split))
  return nnx.merge(graph, nnx.from_flat_state(leaves.items())), ids_U


def head_rows(target: Decoder, ids_U: np.ndarray | jax.Array, split: bool = True) -> jax.Array:
  """[U, D]: the LM head of a model, of these tokens."""
  rows_of = jax.jit(lambda head_VD, ids_U: constrain(jnp.take(head_VD, ids_U, axis=0), 'VD', split))
  return rows_of(target.lm_head, ids_U)


def checked_draft(path: str | os.PathLike, target: Decoder, dtype: str = 'float32',
                  **config_changes) -> tuple[TensorFile, DecoderConfig, dict[tuple, name_maps.Assignment]]:
  """The file of `load_reduced`, the draft's config, and where each parameter is; no tensor is read.

  What is borrowed is nowhere: the LM head is, unless it is among the parameters.

  Raises:
    InputError: see `load_reduced`.
  """
  path = Path(path)
  source, config, theirs = SafetensorsDirectory(path), decoder_config(path), target.config
  if (config.vocab_size, config.width) != (theirs.vocab_size, theirs.width):
    raise InputError(f'{path / CONFIG}: the draft is made for a target with {config.vocab_size} tokens and vectors of '
                     f'{config.width}, this one has {theirs.vocab_size} and {theirs.width}: use a draft of this target')
  config = dataclasses.replace(config, tied_embedding=False, dtype=float_dtype(dtype), **config_changes)
  shapes = {param_path: leaf.shape for param_path, leaf in abstract_decoder(config)[1].items() if param_path != EMBED}
  shapes[HEAD] = (num_drafted(source, config), config.width)
  if 'head' in read_json(path / CONFIG)[BORROWS]:
    del shapes[HEAD]
  return source, config, name_maps.assign(source, 'hf', config, shapes)


def num_drafted(source: TensorFile, config: DecoderConfig) -> int:
  """U."""
  return mapped_vocab(source) or config.vocab_size
