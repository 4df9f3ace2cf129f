"""EAGLE heads as they are published, and ours in the same layout.

    config.json             of a Llama of one layer; besides: bias (version 1), draft_vocab_size and, if it is not
                            hidden_size, target_hidden_size (version 3)
    model.safetensors       or pytorch_model.bin, whole or in parts

Version 1 (EAGLE-1 and EAGLE-2) calls its layer `layers.0` and projects by `fc`; version 3 calls it `midlayer`, and has
`norm` and `lm_head` of its own. A vocabulary of U of V tokens comes with a map (`models.loading.draft_ids`), ours in
version 1 too. `embed_tokens`, where it is there, repeats the target's embedding, or is read as the head's own.
"""

from collections.abc import Iterator
import dataclasses
import json
import os
from pathlib import Path

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from models.abstract import abstract_module
from models.config import EagleConfig
from models.decoder import Decoder
from models.eagle import EagleHead
from models.errors import InputError
from models.kv_heads import repeat_kv_heads, with_repeats
from models.loading.draft_ids import IN_DRAFT, TO_TARGET, map_tensors, read_draft_ids
from models.loading.export import hf_config as to_hf_config
from models.loading.hf_config import Fields, decoder_config
from models.loading.load import float_dtype, place
from models.loading.name_maps import BUFFERS, Assignment, Rule, TensorFile, fused_qkv, gate_and_up, refuse
from models.loading.safetensors import SafetensorsDirectory, read_json, write_safetensors
from models.loading.torch_file import TorchFile
from models.sharding import sharding_of

LAYER = {1: 'layers.0', 3: 'midlayer'}
EMBEDDING = 'embed_tokens.weight'
ENTERED = 'eagle_aux_hidden_state_layer_ids'
RULES = {rule.path: rule for rule in (
    Rule('fc', ('fc.weight',), (), columns=1),
    Rule('fc_bias', ('fc.bias',), ()),
    Rule('layer.attn.qkv', tuple(f'{{}}.self_attn.{part}_proj.weight' for part in 'qkv'), (), fused_qkv, columns=1),
    Rule('layer.attn.qkv_bias', tuple(f'{{}}.self_attn.{part}_proj.bias' for part in 'qkv'), (), fused_qkv),
    Rule('layer.attn.q_norm', ('{}.self_attn.q_norm.weight',), ()),
    Rule('layer.attn.k_norm', ('{}.self_attn.k_norm.weight',), ()),
    Rule('layer.attn.out', ('{}.self_attn.o_proj.weight',), (), columns=1),
    Rule('layer.mlp_norm', ('{}.post_attention_layernorm.weight',), ()),
    Rule('layer.mlp.up', ('{}.mlp.gate_proj.weight', '{}.mlp.up_proj.weight'), (), gate_and_up, columns=1),
    Rule('layer.mlp.down', ('{}.mlp.down_proj.weight',), (), columns=1),
    Rule('embed', (EMBEDDING,), (), columns=1),
    Rule('embed_norm', ('{}.input_layernorm.weight',), ()),
    Rule('hidden_norm', ('{}.hidden_norm.weight',), ()),
    Rule('final_norm', ('norm.weight',), ()),
    Rule('head', ('lm_head.weight',), (), columns=1),
)}


def load_eagle(path: str | os.PathLike, target: Decoder, dtype: str = 'float32', mesh: Mesh | None = None,
               **decoder_changes) -> EagleHead:
  """Reads the head made for a target; all tensors are checked before one is read.

  Args:
    path: a directory as above.
    target: its sizes must fit, and its embedding is borrowed.
    dtype: of the parameters, whatever the file holds.
    mesh: where the parameters go; None is the default device.
    **decoder_changes: fields of `DecoderConfig` to replace; `attention_block` and `split` are the target's.

  Raises:
    InputError: one line that names the file and the tensor or field at fault.
  """
  source, config, plan = checked_head(path, target, dtype, **decoder_changes)
  ids = read_draft_ids(source, config.draft_vocab, config.decoder.vocab_size)
  decoder, times = with_repeats(config.decoder, mesh)
  graph, leaves = abstract_module(lambda: EagleHead(dataclasses.replace(config, decoder=decoder), nnx.Rngs(0)))
  put = lambda path, x: place(x, None if mesh is None else sharding_of(mesh, decoder.split)(path, x.shape))
  for param_path, assignment in plan.items():
    parameter = repeat_kv_heads(param_path, assignment.read(source, np.dtype(config.decoder.dtype)), times)
    leaves[param_path] = leaves[param_path].replace(put(param_path, parameter))
  if ids is not None:
    leaves['draft_ids',] = leaves['draft_ids',].replace(put(('draft_ids',), ids))
  return nnx.merge(graph, nnx.from_flat_state(leaves.items()))


def checked_head(path: str | os.PathLike, target: Decoder, dtype: str = 'float32',
                 **decoder_changes) -> tuple[TensorFile, EagleConfig, dict[tuple, Assignment]]:
  """The file of `load_eagle`, the shapes of its head, and where each parameter is; only `embed_tokens` is read.

  Not even that, if the target is shapes alone: a table with the target's shape is then taken for the target's.

  Raises:
    InputError: see `load_eagle`.
  """
  path = Path(path)
  source = open_head(path)
  config = read_config(path, source, target)
  changes = dict(dtype=float_dtype(dtype), attention_block=target.config.attention_block, split=target.config.split)
  config = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, **changes | decoder_changes))
  return source, config, _plan(source, config)


def save_eagle(head: EagleHead, directory: str | os.PathLike, taps: tuple[int, ...] = ()):
  """Writes config.json and model.safetensors, in the dtype of the parameters.

  Args:
    head: the head.
    directory: made if need be.
    taps: layers of the target that it reads, to be named in config.json.

  Raises:
    InputError: if the directory cannot be written, or the layout has no such head.
  """
  directory, config = Path(directory), head.config
  tensors = {}
  for path, leaf in nnx.to_flat_state(nnx.state(head, nnx.Param)):
    rule = RULES['.'.join(path)]
    views = rule.views(np.asarray(leaf[...]))
    for name, view in zip(rule.names('hf', LAYER[config.version]), views, strict=True):
      tensors[name] = np.ascontiguousarray(view).reshape(rule.shape(view))
  if head.draft_ids is not None:
    tensors |= map_tensors(np.asarray(head.draft_ids[...]), config.decoder.vocab_size)
  fields = to_hf_config(config.decoder) | dict(draft_vocab_size=config.vocab)
  if config.version == 1:
    fields['bias'] = config.fc_bias
  else:
    fields |= dict(architectures=['LlamaForCausalLMEagle3'], target_hidden_size=config.features // config.num_taps)
  if taps:
    fields['eagle_config'] = {ENTERED: [tap + 1 for tap in taps]}
  try:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / 'config.json').write_text(json.dumps(fields, indent=2) + '\n')
  except OSError as error:
    raise InputError(f'{directory} cannot be written: {error.strerror}') from None
  write_safetensors(directory / 'model.safetensors', tensors)


def open_head(path: Path) -> TensorFile:
  """The weights in a directory.

  Raises:
    InputError: if there are none.
  """
  if not path.is_dir():
    raise InputError(f'{path} is no directory with config.json and model.safetensors or pytorch_model.bin')
  for name, kind in (('model.safetensors', SafetensorsDirectory), ('pytorch_model.bin', TorchFile)):
    if any((path / f'{name}{end}').is_file() for end in ('', '.index.json')):
      return kind(path)
  raise InputError(f'{path} has neither model.safetensors nor pytorch_model.bin')


def read_taps(path: str | os.PathLike, num_layers: int) -> tuple[int, ...]:
  """Which layers of a target of `num_layers` the head reads: `taps` of the target's config, none for version 1.

  Configs that name layers count what enters them, so that layer i there is the output of layer i - 1 here.

  Raises:
    InputError: layers that the target does not have.
  """
  path = Path(path)
  if _version(open_head(path)) == 1:
    return ()
  named = _named_taps(Fields(path / 'config.json', read_json(path / 'config.json')))
  taps = tuple(EagleConfig.published_taps(num_layers)) if named is None else named
  if len(set(taps)) != 3 or min(taps) < 0 or max(taps) >= num_layers:
    raise InputError(f'{path}: the head reads the outputs of layers {taps}, and the target has {num_layers} layers: '
                     'use the head of this target')
  return taps


def _named_taps(config: Fields) -> tuple[int, ...] | None:
  fields = config.sub('eagle_config')
  if ENTERED not in fields.fields:
    return None
  entered = fields.get(ENTERED, list)
  if not all(type(layer) is int for layer in entered):
    raise fields.fail(ENTERED, 'a list of layers is')
  return tuple(sorted(layer - 1 for layer in entered))


def _version(source: TensorFile) -> int:
  for version, layer in LAYER.items():
    if any(name.startswith(f'{layer}.') for name in source.shapes):
      return version
  raise InputError(f"{source.path} holds no EAGLE head: no tensor's name begins with 'layers.0.' or 'midlayer.'")


def read_config(path: Path, source: TensorFile, target: Decoder) -> EagleConfig:
  """What config.json and the tensors say, once it fits the target.

  Raises:
    InputError: if it does not.
  """
  version, file = _version(source), path / 'config.json'
  fields, decoder = Fields(file, read_json(file)), decoder_config(path)
  decoder = dataclasses.replace(decoder, num_layers=1, windows=decoder.windows[:1], tied_embedding=False)
  theirs, its = target.config, fields.size('target_hidden_size', decoder.width)
  if (decoder.vocab_size, its) != (theirs.vocab_size, theirs.width):
    raise InputError(f'{file}: the head is made for a target with {decoder.vocab_size} tokens and vectors of {its}, '
                     f'this one has {theirs.vocab_size} and {theirs.width}: use the head of this target')
  taps = _named_taps(fields)
  if taps and theirs.taps and taps != tuple(sorted(theirs.taps)):
    raise InputError(f'{file}: the head reads the outputs of layers {taps} of the target, not {theirs.taps}: set '
                     f'drafter.taps={taps}')
  has_bias = 'fc.bias' in source.shapes
  if fields.get('bias', bool, has_bias) != has_bias:
    raise fields.fail('bias', f"{source.path} has {'a' if has_bias else 'no'} tensor 'fc.bias'")
  vocab = fields.size('draft_vocab_size', source.shapes.get(TO_TARGET, (decoder.vocab_size,))[0])
  return EagleConfig(
      decoder, version, draft_vocab=vocab if vocab != decoder.vocab_size else None, fc_bias=has_bias,
      target_width=its, num_taps=_num_taps(source, its) if version == 3 else 3,
      own_embedding=_own_embedding(source, decoder.width, target))


def _num_taps(source: TensorFile, width: int) -> int:
  """How many vectors of this width `fc` reads, or what is usual."""
  inputs = source.shapes.get('fc.weight', (0, 0))[-1]
  return inputs // width if inputs and inputs % width == 0 else 3


def _own_embedding(source: TensorFile, width: int, target: Decoder) -> bool:
  """Whether the head embeds tokens by another table than the target."""
  if EMBEDDING not in source.shapes:
    return width != target.config.width  # then its own is missing, which is said with all that is
  embed_VD = target.embed.get_value()
  if source.shapes[EMBEDDING] != embed_VD.shape or source.problem(EMBEDDING):
    return True
  if isinstance(embed_VD, jax.ShapeDtypeStruct):
    return False
  mine = place(source.read(EMBEDDING).astype(embed_VD.dtype), embed_VD.sharding)
  return not bool(jnp.array_equal(mine, embed_VD))


def _plan(source: TensorFile, config: EagleConfig) -> dict[tuple, Assignment]:
  """Parameter path -> where it is read from, once every tensor is accounted for."""
  abstract = nnx.eval_shape(lambda: EagleHead(config, nnx.Rngs(0)))
  plan = {}
  for path, leaf in nnx.to_flat_state(nnx.state(abstract, nnx.Param)):
    rule = RULES['.'.join(path)]
    plan[path] = Assignment(rule, rule.names('hf', LAYER[config.version]), leaf.shape)
  wanted = {name: shape for assignment in plan.values() for name, shape in assignment.tensors()}
  refuse(source, list(_problems(source, wanted)))
  return plan


def _problems(source: TensorFile, wanted: dict[str, tuple[int, ...]]) -> Iterator[str]:
  for name, shape in wanted.items():
    if name not in source.shapes:
      yield f'{name!r} is missing'
    elif source.shapes[name] != shape:
      yield f'{name!r} has shape {source.shapes[name]}, not {shape}'
    elif not source.is_float(name) or source.problem(name):
      yield f'{name!r} has no floating-point type that is supported'
  for name in source.shapes:
    if name not in (*wanted, EMBEDDING, TO_TARGET, IN_DRAFT) and not BUFFERS.search(name):
      yield f'{name!r} is not part of a head'
