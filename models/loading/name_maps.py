"""Which tensors of a checkpoint make up which parameter, as one table for reading and for writing.

Every tensor of a checkpoint is a view of one of our parameters: `views` slices and transposes a parameter into
them, so that loading assigns to the views and exporting copies out of them.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import math
import re
from typing import Protocol

import numpy as np

from models.config import DecoderConfig, EncDecConfig
from models.errors import InputError


class TensorFile(Protocol):
  """A checkpoint, read one tensor at a time.

  Attributes:
    path: for messages.
    shapes: tensor name -> shape.
  """

  path: object
  shapes: dict[str, tuple[int, ...]]

  def is_float(self, name: str) -> bool:
    ...

  def problem(self, name: str) -> str | None:
    """Why the tensor cannot be read, or None."""
    ...

  def read(self, name: str) -> np.ndarray:
    ...


def fused_qkv(weight_KXHD: np.ndarray) -> tuple[np.ndarray, ...]:
  """Of the weight [K, G + 2, H, D] or the bias [K, G + 2, H]."""
  return weight_KXHD[:, :-2], weight_KXHD[:, -2], weight_KXHD[:, -1]


def gate_and_up(weight_2FD: np.ndarray) -> tuple[np.ndarray, ...]:
  return weight_2FD[0], weight_2FD[1]


def itself(weight: np.ndarray) -> tuple[np.ndarray, ...]:
  return (weight,)


def transposed(weight_NX: np.ndarray) -> tuple[np.ndarray, ...]:
  return (weight_NX.T,)


def two_parts(weight_K2HD: np.ndarray) -> tuple[np.ndarray, ...]:
  return weight_K2HD[:, 0], weight_K2HD[:, 1]


@dataclasses.dataclass(frozen=True)
class Rule:
  """How one parameter is laid out in a checkpoint.

  Attributes:
    path: of our parameter; `{}` stands for the layer.
    hf, gguf: names of its tensors in either format.
    views: parameter -> one view per tensor.
    columns: how many trailing axes of a view are flattened into the tensor's columns; 0 makes it a vector.
  """

  path: str
  hf: tuple[str, ...]
  gguf: tuple[str, ...] = ()
  views: Callable[[np.ndarray], tuple[np.ndarray, ...]] = itself
  columns: int = 0

  def names(self, style: str, layer: int | None) -> tuple[str, ...]:
    return tuple(name.format(layer) for name in getattr(self, style))

  def shape(self, view: np.ndarray) -> tuple[int, ...]:
    """Of the tensor that `view` stands for."""
    split = view.ndim - self.columns
    rows, columns = math.prod(view.shape[:split]), math.prod(view.shape[split:])
    return (rows, columns) if self.columns else (rows,)


RULES = (
    Rule('embed', ('model.embed_tokens.weight',), ('token_embd.weight',), columns=1),
    Rule('layers.{}.attn_norm', ('model.layers.{}.input_layernorm.weight',), ('blk.{}.attn_norm.weight',)),
    Rule('layers.{}.attn.qkv',
         tuple(f'model.layers.{{}}.self_attn.{part}_proj.weight' for part in 'qkv'),
         tuple(f'blk.{{}}.attn_{part}.weight' for part in 'qkv'), fused_qkv, columns=1),
    Rule('layers.{}.attn.qkv_bias',
         tuple(f'model.layers.{{}}.self_attn.{part}_proj.bias' for part in 'qkv'),
         tuple(f'blk.{{}}.attn_{part}.bias' for part in 'qkv'), fused_qkv),
    Rule('layers.{}.attn.q_norm', ('model.layers.{}.self_attn.q_norm.weight',), ('blk.{}.attn_q_norm.weight',)),
    Rule('layers.{}.attn.k_norm', ('model.layers.{}.self_attn.k_norm.weight',), ('blk.{}.attn_k_norm.weight',)),
    Rule('layers.{}.attn.out',
         ('model.layers.{}.self_attn.o_proj.weight',), ('blk.{}.attn_output.weight',), columns=1),
    Rule('layers.{}.mlp_norm', ('model.layers.{}.post_attention_layernorm.weight',), ('blk.{}.ffn_norm.weight',)),
    Rule('layers.{}.mlp.up',
         ('model.layers.{}.mlp.gate_proj.weight', 'model.layers.{}.mlp.up_proj.weight'),
         ('blk.{}.ffn_gate.weight', 'blk.{}.ffn_up.weight'), gate_and_up, columns=1),
    Rule('layers.{}.mlp.down',
         ('model.layers.{}.mlp.down_proj.weight',), ('blk.{}.ffn_down.weight',), columns=1),
    Rule('final_norm', ('model.norm.weight',), ('output_norm.weight',)),
    Rule('head', ('lm_head.weight',), ('output.weight',), columns=1),
)
BY_PATH = {rule.path: rule for rule in RULES}


def _t5_rules(mlp: str) -> dict[str, Rule]:
  ups = ('wi_0', 'wi_1') if mlp == 'geglu' else ('wi',)
  rules = [Rule('embed', ('shared.weight',), columns=1), BY_PATH['head']]
  for side, mlp_layer in (('encoder', 1), ('decoder', 2)):
    block, ours = f'{side}.block.{{}}.layer', f'{side}.layers.{{}}'
    attention, dense = f'{block}.0.SelfAttention', f'{block}.{mlp_layer}.DenseReluDense'
    rules += [
        Rule(f'{side}.distance_bias', (f'{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight',),
             views=transposed, columns=1),
        Rule(f'{side}.final_norm', (f'{side}.final_layer_norm.weight',)),
        Rule(f'{ours}.attn_norm', (f'{block}.0.layer_norm.weight',)),
        Rule(f'{ours}.attn.qkv', tuple(f'{attention}.{part}.weight' for part in 'qkv'), views=fused_qkv, columns=1),
        Rule(f'{ours}.attn.out', (f'{attention}.o.weight',), columns=1),
        Rule(f'{ours}.mlp_norm', (f'{block}.{mlp_layer}.layer_norm.weight',)),
        Rule(f'{ours}.mlp.up', tuple(f'{dense}.{up}.weight' for up in ups),
             views=gate_and_up if len(ups) == 2 else itself, columns=1),
        Rule(f'{ours}.mlp.down', (f'{dense}.wo.weight',), columns=1)]
  cross, ours = 'decoder.block.{}.layer.1', 'decoder.layers.{}'
  rules += [
      Rule(f'{ours}.cross_norm', (f'{cross}.layer_norm.weight',)),
      Rule(f'{ours}.cross.query', (f'{cross}.EncDecAttention.q.weight',), columns=1),
      Rule(f'{ours}.cross.source_kv', tuple(f'{cross}.EncDecAttention.{part}.weight' for part in 'kv'), views=two_parts,
           columns=1),
      Rule(f'{ours}.cross.out', (f'{cross}.EncDecAttention.o.weight',), columns=1)]
  return {rule.path: rule for rule in rules}


T5_BY_PATH = {mlp: _t5_rules(mlp) for mlp in ('relu', 'geglu')}
# No parameters; the last is in the first T5 checkpoints, and was never read.
BUFFERS = re.compile(r'rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$|^rope_freqs\.weight$|'
                     r'\.EncDecAttention\.relative_attention_bias\.weight$')
TIED_HEAD = {'hf': ('model.embed_tokens.weight', 'lm_head.weight'), 'gguf': ('token_embd.weight', 'output.weight')}


def rules_of(config: DecoderConfig | EncDecConfig) -> Mapping[str, Rule]:
  return T5_BY_PATH[config.mlp] if isinstance(config, EncDecConfig) else BY_PATH


def copies_of(config: DecoderConfig | EncDecConfig, style: str) -> dict[str, str]:
  """Tensors that a checkpoint need not have -> the one that they are a copy of."""
  if isinstance(config, EncDecConfig):
    names = ['encoder.embed_tokens.weight', 'decoder.embed_tokens.weight']
    return dict.fromkeys(names + ['lm_head.weight'] * config.tied_embedding, 'shared.weight')
  embedding, head = TIED_HEAD[style]
  return {head: embedding} if config.tied_embedding else {}


def rule_of(path: tuple, rules: Mapping[str, Rule] = BY_PATH) -> tuple[Rule, int | None]:
  """The rule of a parameter such as ('layers', 3, 'attn', 'qkv'), and its layer.

  Raises:
    InputError: if no checkpoint format has such a parameter.
  """
  layer = next((part for part in path if isinstance(part, int)), None)
  name = '.'.join('{}' if isinstance(part, int) else part for part in path)
  if name not in rules:
    raise InputError(f'parameter {name.format(layer)!r} has no counterpart in checkpoint files: '
                     "only models with rotary positions and mlp='swiglu' are read and written")
  return rules[name], layer


@dataclasses.dataclass(frozen=True)
class Assignment:
  """One parameter and the tensors it is read from."""

  rule: Rule
  names: tuple[str, ...]
  shape: tuple[int, ...]

  def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and expected shapes of the tensors."""
    blank = np.broadcast_to(np.zeros((), np.int8), self.shape)
    for name, view in zip(self.names, self.rule.views(blank), strict=True):
      yield name, self.rule.shape(view)

  def read(self, source: TensorFile, dtype: np.dtype) -> np.ndarray:
    """The parameter; each tensor is cast once, on its way into it."""
    parameter = np.empty(self.shape, dtype)
    for name, view in zip(self.names, self.rule.views(parameter), strict=True):
      view[...] = source.read(name).reshape(view.shape)
    return parameter


def split(path: tuple, parameter: np.ndarray, style: str) -> Iterator[tuple[str, np.ndarray]]:
  """The tensors of one parameter: the inverse of `Assignment.read`."""
  rule, layer = rule_of(path)
  for name, view in zip(rule.names(style, layer), rule.views(parameter), strict=True):
    yield name, np.ascontiguousarray(view).reshape(rule.shape(view))


def assign(source: TensorFile, style: str, config: DecoderConfig | EncDecConfig,
           shapes: dict[tuple, tuple[int, ...]]) -> dict[tuple, Assignment]:
  """Parameter path -> where it is read from, once every tensor of the checkpoint is accounted for.

  Args:
    source: the checkpoint.
    style: 'hf' or 'gguf'.
    config: of the model.
    shapes: parameter path -> shape, of the whole model.

  Raises:
    InputError: one line about all tensors that are missing, of a wrong shape, unreadable or unexpected.
  """
  plan = {}
  for path, shape in shapes.items():
    rule, layer = rule_of(path, rules_of(config))
    plan[path] = Assignment(rule, rule.names(style, layer), shape)
  wanted = {name: shape for assignment in plan.values() for name, shape in assignment.tensors()}
  problems = list(_problems(source, wanted))
  copies = copies_of(config, style)
  for copy, original in copies.items():
    if copy in source.shapes and original in source.shapes and not problems:
      problems += _untied(source, original, copy)
  known = wanted.keys() | copies.keys()
  problems += [f'{name!r} is not part of the model' for name in source.shapes
               if name not in known and not BUFFERS.search(name) and source.is_float(name)]
  refuse(source, problems)
  return plan


def refuse(source: TensorFile, problems: list[str]) -> None:
  """Raises InputError if there is a problem: one line with the first three."""
  if problems:
    more = f'; and {len(problems) - 3} more' if len(problems) > 3 else ''
    raise InputError(f'{source.path} does not match its configuration ({len(problems)} tensors): '
                     f'{"; ".join(problems[:3])}{more}')


def _problems(source: TensorFile, wanted: dict[str, tuple[int, ...]]) -> Iterator[str]:
  for name, shape in wanted.items():
    if name not in source.shapes:
      yield f'{name!r} is missing'
    elif source.shapes[name] != shape:
      yield f'{name!r} has shape {source.shapes[name]}, not {shape}'
    elif problem := source.problem(name):
      yield f'{name!r}: {problem}'


def _untied(source: TensorFile, embedding: str, head: str) -> list[str]:
  if source.shapes[embedding] == source.shapes[head] and np.array_equal(source.read(embedding), source.read(head)):
    return []
  return [f'{head!r} differs from {embedding!r}, though the embedding is tied']
