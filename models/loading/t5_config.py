"""config.json -> `EncDecConfig`, for T5, its v1.1 and Flan-T5 as Hugging Face writes them."""

import os
from pathlib import Path

from models.config import EncDecConfig
from models.loading.hf_config import MOST_LAYERS, Fields
from models.loading.safetensors import read_json

MLPS = {'relu': 'relu', 'gated-gelu': 'geglu'}  # by feed_forward_proj


def is_t5(directory: str | os.PathLike) -> bool:
  """Whether the directory's config.json is of this family.

  Raises:
    InputError: if there is none.
  """
  return read_json(Path(directory) / 'config.json').get('model_type') == 't5'


def encdec_config(directory: str | os.PathLike, own_head: bool) -> EncDecConfig:
  """The config.json of a directory as an `EncDecConfig`. Its torch_dtype is not followed.

  transformers 5 writes every T5 as tied: what tells v1.1 then is that vectors are not scaled before the LM head.

  Args:
    directory: holds config.json.
    own_head: whether there is a tensor for the LM head, which a tied model need not have.

  Raises:
    InputError: if a field is missing, malformed, or asks for something that is not implemented.
  """
  path = Path(directory) / 'config.json'
  fields = Fields(path, read_json(path))
  kind = fields.get('feed_forward_proj', str, 'relu')
  if kind not in MLPS:
    raise fields.fail('feed_forward_proj', f'use one of {", ".join(MLPS)}')
  if fields.fields.get('quantization_config'):
    raise fields.fail('quantization_config', 'only models without it are')
  num_layers = fields.size('num_layers', most=MOST_LAYERS)
  tied = fields.get('tie_word_embeddings', bool, True)
  scaled = fields.get('scale_decoder_outputs', bool, tied)
  return EncDecConfig(
      vocab_size=fields.size('vocab_size'), width=fields.size('d_model'),
      num_layers=fields.size('num_decoder_layers', num_layers, MOST_LAYERS), num_encoder_layers=num_layers,
      num_heads=fields.size('num_heads'), head_dim=fields.size('d_kv'), ff_width=fields.size('d_ff'), mlp=MLPS[kind],
      num_buckets=fields.size('relative_attention_num_buckets', 32),
      max_distance=fields.size('relative_attention_max_distance', 128),
      norm_eps=fields.get('layer_norm_epsilon', float, 1e-6), tied_embedding=tied and (scaled or not own_head),
      scaled_output=scaled, start_token=fields.get('decoder_start_token_id', int, fields.get('pad_token_id', int, 0)))
