"""The inverse of loading: a `Decoder` as a Hugging Face directory, or as a float32 GGUF file."""

from collections.abc import Iterator
import dataclasses
import json
import math
import os
from pathlib import Path

from flax import nnx
import gguf as gguf_package
import jax
import numpy as np

from models.config import DecoderConfig, RopeScaling
from models.decoder import Decoder
from models.errors import InputError
from models.layers import rope_frequencies
from models.loading import name_maps
from models.loading.gguf import SCALARS, GgufFile, interleave

ARCHITECTURES = {
    'llama': 'LlamaForCausalLM', 'mistral': 'MistralForCausalLM', 'qwen2': 'Qwen2ForCausalLM',
    'qwen3': 'Qwen3ForCausalLM'}
DTYPES = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16', 'float64': 'F64'}


def export_hf(decoder: Decoder, directory: str | os.PathLike):
  """Writes config.json and model.safetensors, in the dtype of the parameters.

  Raises:
    InputError: if no Hugging Face family has such a model.
  """
  directory = Path(directory)
  config = hf_config(decoder.config)
  tensors = list(_parameters(decoder))
  header, end = {}, 0
  for path, parameter in tensors:
    itemsize = np.dtype(parameter.dtype).itemsize
    for name, shape in _names_and_shapes(path, parameter.shape, 'hf'):
      header[name] = {'dtype': DTYPES[np.dtype(parameter.dtype).name], 'shape': shape,
                      'data_offsets': [end, end + math.prod(shape) * itemsize]}
      end = header[name]['data_offsets'][1]
  directory.mkdir(parents=True, exist_ok=True)
  (directory / 'config.json').write_text(json.dumps(config, indent=2) + '\n')
  raw = json.dumps(header, separators=(',', ':')).encode()
  raw += b' ' * (-len(raw) % 8)
  with open(directory / 'model.safetensors', 'wb') as file:
    file.write(len(raw).to_bytes(8, 'little') + raw)
    for path, parameter in tensors:
      for _, tensor in name_maps.split(path, np.asarray(parameter), 'hf'):
        file.write(tensor.tobytes())


def _parameters(decoder: Decoder) -> Iterator[tuple[tuple, jax.Array]]:
  for path, leaf in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
    yield path, leaf[...]


def _names_and_shapes(path: tuple, shape: tuple[int, ...], style: str) -> Iterator[tuple[str, tuple[int, ...]]]:
  rule, layer = name_maps.rule_of(path)
  return name_maps.Assignment(rule, rule.names(style, layer), shape).tensors()


def _family(config: DecoderConfig) -> str:
  if (config.mlp, config.positions) != ('swiglu', 'rope'):
    raise InputError(f'only swiglu with rotary positions can be written, not {config.mlp} with '
                     f'{config.positions} positions')
  if config.qkv_bias and config.qk_norm:
    raise InputError('no model family has both qkv_bias and qk_norm')
  if config.qkv_bias or config.qk_norm:
    return 'qwen2' if config.qkv_bias else 'qwen3'
  if not any(config.windows):
    return 'llama'
  if len(set(config.windows)) > 1:
    raise InputError(f'no model family without qkv_bias or qk_norm has windows={config.windows}')
  return 'mistral'


def hf_config(config: DecoderConfig) -> dict:
  """The fields of config.json."""
  family = _family(config)
  windows = {window for window in config.windows if window}
  if len(windows) > 1:
    raise InputError(f'windows={config.windows}: all sliding windows must be of one size')
  fields = dict(
      architectures=[ARCHITECTURES[family]], model_type=family, hidden_act='silu', vocab_size=config.vocab_size,
      hidden_size=config.width, num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
      num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, intermediate_size=config.ff_width,
      max_position_embeddings=config.max_positions, rms_norm_eps=config.norm_eps, rope_theta=config.rope_theta,
      rope_scaling=_hf_rope_scaling(config.rope_scaling), tie_word_embeddings=config.tied_embedding,
      torch_dtype=config.dtype)
  if family != 'llama':
    fields['sliding_window'] = windows.pop() if windows else None
  if family in ('qwen2', 'qwen3'):
    fields |= dict(
        use_sliding_window=any(config.windows), max_window_layers=0,
        layer_types=['sliding_attention' if config.window(layer) else 'full_attention'
                     for layer in range(config.num_layers)])
  return fields


def _hf_rope_scaling(scaling: RopeScaling | None) -> dict | None:
  if scaling is None:
    return None
  fields = dict(rope_type=scaling.kind, factor=scaling.factor)
  if scaling.kind != 'linear':
    fields['original_max_position_embeddings'] = scaling.original_max_positions
  if scaling.kind == 'llama3':
    fields |= dict(low_freq_factor=scaling.low_freq_factor, high_freq_factor=scaling.high_freq_factor)
  if scaling.kind == 'yarn':
    fields |= dict(beta_fast=scaling.beta_fast, beta_slow=scaling.beta_slow, truncate=scaling.truncate)
    if scaling.attention_factor is not None:
      fields['attention_factor'] = scaling.attention_factor
  return fields


def export_gguf(decoder: Decoder, path: str | os.PathLike, tokenizer_source: str | os.PathLike):
  """Writes a float32 GGUF file for llama.cpp, with the tokenizer of another GGUF file.

  Raises:
    InputError: if GGUF cannot express the model.
  """
  config = decoder.config
  family = _family(config)
  if config.windows:
    raise InputError('llama.cpp ignores sliding windows of this family: export to GGUF without them')
  writer = gguf_package.GGUFWriter(path, family)
  _add_metadata(writer, config)
  with GgufFile(tokenizer_source) as source:
    _copy_tokenizer(writer, source)
  extra = _rope_tensors(writer, config)
  tensors = list(_parameters(decoder))
  for name, tensor in extra:
    writer.add_tensor_info(name, tensor.shape, tensor.dtype, tensor.nbytes)
  for param_path, parameter in tensors:
    for name, shape in _names_and_shapes(param_path, parameter.shape, 'gguf'):
      writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * math.prod(shape))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_ti_data_to_file()
  for _, tensor in extra:
    writer.write_tensor_data(tensor)
  for param_path, parameter in tensors:
    for name, tensor in name_maps.split(param_path, np.asarray(parameter, np.float32), 'gguf'):
      writer.write_tensor_data(_gguf_rows(config, family, name, tensor))
  writer.close()


def export_gguf_tokenizer(path: str | os.PathLike, source: GgufFile):
  """Writes a GGUF file that holds the tokenizer of another one, and no tensors."""
  writer = gguf_package.GGUFWriter(path, source.architecture)
  _copy_tokenizer(writer, source)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_ti_data_to_file()
  writer.close()


def _gguf_rows(config: DecoderConfig, family: str, name: str, tensor: np.ndarray) -> np.ndarray:
  heads = {'attn_q': config.num_heads, 'attn_k': config.num_kv_heads}.get(name.split('.')[-2])
  return interleave(tensor, heads) if heads and family == 'llama' else tensor


def _add_metadata(writer: gguf_package.GGUFWriter, config: DecoderConfig):
  writer.add_file_type(gguf_package.LlamaFileType.ALL_F32)
  writer.add_vocab_size(config.vocab_size)
  writer.add_block_count(config.num_layers)
  writer.add_context_length(config.max_positions)
  writer.add_embedding_length(config.width)
  writer.add_feed_forward_length(config.ff_width)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_value_length(config.head_dim)
  writer.add_layer_norm_rms_eps(config.norm_eps)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_rope_dimension_count(config.head_dim)


def _rope_tensors(writer: gguf_package.GGUFWriter, config: DecoderConfig) -> list[tuple[str, np.ndarray]]:
  """Writes the scaling as metadata; Llama 3's has none there and becomes a tensor of divisors."""
  scaling = config.rope_scaling
  if scaling is None:
    return []
  if scaling.kind == 'llama3':
    plain, _ = rope_frequencies(_without_scaling(config))
    scaled, _ = rope_frequencies(config)
    return [('rope_freqs.weight', (plain / scaled).astype(np.float32))]
  writer.add_rope_scaling_type(gguf_package.RopeScalingType(scaling.kind))
  writer.add_rope_scaling_factor(scaling.factor)
  if scaling.kind == 'yarn':
    _add_yarn(writer, scaling)
  return []


def _without_scaling(config: DecoderConfig) -> DecoderConfig:
  return dataclasses.replace(config, rope_scaling=None)


def _add_yarn(writer: gguf_package.GGUFWriter, scaling: RopeScaling):
  plain = RopeScaling('yarn', scaling.factor, scaling.original_max_positions)
  if scaling != plain:
    raise InputError(f'llama.cpp applies yarn with its default borders and factor only, not {scaling}')
  writer.add_rope_scaling_orig_ctx_len(scaling.original_max_positions)


def _copy_tokenizer(writer: gguf_package.GGUFWriter, source: GgufFile):
  value_type = gguf_package.GGUFValueType
  for key, value in source.metadata.items():
    if not key.startswith('tokenizer.'):
      continue
    if isinstance(value, np.ndarray):
      code = next(code for code, char in SCALARS.items() if np.dtype('<' + char) == value.dtype)
      writer.add_key_value(key, value.tolist(), value_type.ARRAY, value_type(code))
    elif isinstance(value, list):
      writer.add_key_value(key, value, value_type.ARRAY, value_type.STRING)
    else:
      writer.add_key_value(key, value, value_type(source.kinds[key]))
