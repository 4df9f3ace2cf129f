"""config.json -> `DecoderConfig`, for the Llama family as Hugging Face writes it."""

import math
import os
from pathlib import Path
from typing import Any

from models.config import DecoderConfig, RopeScaling
from models.errors import InputError
from models.loading.safetensors import read_json

FAMILIES = ('llama', 'mistral', 'qwen2', 'qwen3')
REFUSED_IF_SET = ('attention_bias', 'mlp_bias', 'quantization_config')
MOST_LAYERS = 10_000
_REQUIRED = object()


class Fields:
  """The fields of a JSON object, with a message that names file and field when one is missing or of a wrong type."""

  def __init__(self, path: Path, fields: dict, prefix: str = ''):
    self.path, self.fields, self.prefix = path, fields, prefix

  def get(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
    """The field; its default if it is absent or null."""
    value = self.fields.get(name)
    if value is None:
      if default is _REQUIRED:
        raise InputError(f"{self.path} has no field '{self.prefix}{name}'")
      return default
    if kind is float and type(value) is int:
      value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
      raise InputError(f"{self.path}: field '{self.prefix}{name}' should be of type {kind.__name__}, not {value!r}")
    return value

  def size(self, name: str, default: Any = _REQUIRED, most: int = 2**31 - 1) -> int:
    """An integer in 1..most."""
    value = self.get(name, int, default)
    if value is not None and not 1 <= value <= most:
      raise InputError(f"{self.path}: field '{self.prefix}{name}' should lie in 1..{most}, not {value}")
    return value

  def sub(self, name: str) -> 'Fields':
    return Fields(self.path, self.get(name, dict, {}), f'{self.prefix}{name}.')

  def fail(self, name: str, hint: str) -> InputError:
    value = self.fields.get(name)
    return InputError(f"{self.path}: '{self.prefix}{name}' is {value!r}, which is not supported: {hint}")


def decoder_config(directory: str | os.PathLike) -> DecoderConfig:
  """The config.json of a directory as a `DecoderConfig`. Its torch_dtype is not followed.

  Raises:
    InputError: if a field is missing, malformed, or asks for something that is not implemented.
  """
  path = Path(directory) / 'config.json'
  fields = Fields(path, read_json(path))
  family = fields.get('model_type', str)
  if family not in FAMILIES:
    raise fields.fail('model_type', f'use one of {", ".join((*FAMILIES, "t5"))}')
  _refuse_unsupported(fields)
  num_heads, width = fields.size('num_attention_heads'), fields.size('hidden_size')
  num_layers = fields.size('num_hidden_layers', most=MOST_LAYERS)
  return DecoderConfig(
      vocab_size=fields.size('vocab_size'), width=width, num_layers=num_layers, num_heads=num_heads,
      num_kv_heads=_num_kv_heads(fields, family, num_heads), head_dim=_head_dim(fields, family, width, num_heads),
      ff_width=fields.size('intermediate_size'), max_positions=fields.size('max_position_embeddings'),
      norm_eps=fields.get('rms_norm_eps', float), tied_embedding=fields.get('tie_word_embeddings', bool, False),
      qkv_bias=family == 'qwen2', qk_norm=family == 'qwen3', windows=_windows(fields, family, num_layers),
      rope_theta=_rope(fields).get('rope_theta', float, fields.get('rope_theta', float, 10_000.0)),
      rope_scaling=_rope_scaling(fields))


def _refuse_unsupported(fields: Fields):
  for name in REFUSED_IF_SET:
    if fields.fields.get(name):
      raise fields.fail(name, 'only models without it are')
  if fields.get('hidden_act', str, 'silu') not in ('silu', 'swish'):
    raise fields.fail('hidden_act', "only 'silu' is")
  for where in (fields, _rope(fields)):
    if where.get('partial_rotary_factor', float, 1.0) != 1.0:
      raise where.fail('partial_rotary_factor', 'only whole heads are rotated')


def _num_kv_heads(fields: Fields, family: str, num_heads: int) -> int:
  if family != 'llama' and 'num_key_value_heads' not in fields.fields:
    return fields.size('num_key_value_heads')  # other families default to a number: better said than guessed
  return fields.size('num_key_value_heads', num_heads)


def _head_dim(fields: Fields, family: str, width: int, num_heads: int) -> int:
  head_dim = fields.size('head_dim', 128 if family == 'qwen3' else None)
  if head_dim is None and width % num_heads:
    raise InputError(f'{fields.path}: hidden_size={width} is no multiple of num_attention_heads={num_heads}')
  return head_dim or width // num_heads


def _windows(fields: Fields, family: str, num_layers: int) -> tuple[int | None, ...]:
  """Mistral slides in every layer; Qwen from `max_window_layers` on, if at all, or as `layer_types` says."""
  if family == 'llama':
    return ()
  if family == 'mistral':
    window = fields.size('sliding_window', None if 'sliding_window' in fields.fields else 4096)
    types = ['full_attention' if window is None else 'sliding_attention'] * num_layers
    if fields.get('layer_types', list, types) != types:
      raise fields.fail('layer_types', 'Mistral layers are all alike')
  else:
    window = fields.size('sliding_window', 4096) if fields.get('use_sliding_window', bool, False) else None
    first = fields.get('max_window_layers', int, 28) if window else num_layers
    types = fields.get('layer_types', list, [
        'full_attention' if layer < first else 'sliding_attention' for layer in range(num_layers)])
  if len(types) != num_layers or not set(types) <= {'full_attention', 'sliding_attention'}:
    raise fields.fail('layer_types', f"name each of the {num_layers} layers 'full_attention' or 'sliding_attention'")
  if 'sliding_attention' not in types:
    return ()
  if window is None:
    raise fields.fail('layer_types', "'sliding_attention' needs 'sliding_window' (and 'use_sliding_window')")
  return tuple(window if kind == 'sliding_attention' else None for kind in types)


def _rope(fields: Fields) -> Fields:
  """The rotary settings: `rope_parameters` (transformers 5) or `rope_scaling`."""
  return fields.sub('rope_parameters' if fields.fields.get('rope_parameters') else 'rope_scaling')


def _rope_scaling(fields: Fields) -> RopeScaling | None:
  rope = _rope(fields)
  named = 'rope_type' if 'rope_type' in rope.fields else 'type'
  kind = rope.get(named, str, 'default')
  if kind == 'default':
    if rope.fields.keys() - {'rope_type', 'type', 'rope_theta', 'partial_rotary_factor'}:
      raise InputError(f"{fields.path}: '{rope.prefix}rope_type' is 'default', which takes no scaling: name a type "
                       f'for {sorted(rope.fields)}')
    return None
  if kind not in ('linear', 'llama3', 'yarn'):
    raise rope.fail(named, "use 'default', 'linear', 'llama3' or 'yarn'")
  factor = rope.get('factor', float)
  if factor < 1:
    raise rope.fail('factor', 'it must be at least 1')
  if kind == 'linear':
    return RopeScaling('linear', factor)
  original = rope.size('original_max_position_embeddings', fields.size('max_position_embeddings'))
  original = fields.size('original_max_position_embeddings', original)
  if kind == 'llama3':
    low, high = rope.get('low_freq_factor', float), rope.get('high_freq_factor', float)
    if not 0 < low < high:
      raise rope.fail('low_freq_factor', f'it must lie between 0 and high_freq_factor, {high}')
    return RopeScaling('llama3', factor, original, low_freq_factor=low, high_freq_factor=high)
  return RopeScaling(
      'yarn', factor, original, beta_fast=rope.get('beta_fast', float, 0.0) or 32.0,
      beta_slow=rope.get('beta_slow', float, 0.0) or 1.0, attention_factor=_yarn_attention_factor(rope, factor),
      truncate=rope.get('truncate', bool, True))


def _yarn_attention_factor(rope: Fields, factor: float) -> float | None:
  """DeepSeek's `mscale` and `mscale_all_dim` give a ratio; both must be there to count."""
  explicit = rope.get('attention_factor', float, None)
  above, below = rope.get('mscale', float, 0.0), rope.get('mscale_all_dim', float, 0.0)
  if explicit is not None or not (above and below):
    return explicit
  if factor <= 1:
    return 1.0
  return (0.1 * above * math.log(factor) + 1.0) / (0.1 * below * math.log(factor) + 1.0)
