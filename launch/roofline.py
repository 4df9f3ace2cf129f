"""What GPUs could do at best: bytes over memory bandwidth, or arithmetic over its peak; links cost nothing here."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from launch.build import check_fields, check_layers
from launch.chips import GIB, Chip
from launch.estimate import Step, published_plain_ms, workloads_of
from launch.shapes import model_config
from models.abstract import abstract_decoder
from models.config import DecoderConfig, EncDecConfig
from models.errors import InputError
from models.loading.reduced import is_reduced, num_drafted
from models.loading.safetensors import SafetensorsDirectory


def roofline_ms(num_bytes: float, flops: float, chips: int, chip: Chip) -> float:
  """A pass that reads so many bytes and does so many operations, shared by all chips."""
  return max(num_bytes / (chips * chip.hbm_gbs * 1e6), flops / (chips * chip.bf16_tflops * 1e9))


@functools.cache
def num_parameters(model: DecoderConfig | EncDecConfig) -> int:
  """Of a decoder layers are all alike: the first two tell."""
  if isinstance(model, EncDecConfig):
    return sum(leaf.size for leaf in abstract_decoder(model)[1].values())
  one, two = (sum(leaf.size for leaf in abstract_decoder(
      dataclasses.replace(model, num_layers=layers, windows=()))[1].values()) for layers in (1, 2))
  return one + (model.num_layers - 1) * (two - one)


def cache_values(model: DecoderConfig, batch: int, capacity: int) -> int:
  return 2 * batch * capacity * model.num_layers * model.num_kv_heads * model.head_dim


def _draft(config: ConfigDict, target: DecoderConfig) -> DecoderConfig | None:
  """The model that drafts, if one does."""
  if config.drafter.name == 'model':
    model = model_config(config.drafter, config.engine.attention_block)
    if not is_reduced(config.drafter.source):
      return model
    num_draft = num_drafted(SafetensorsDirectory(config.drafter.source), model)
    return dataclasses.replace(model, vocab_size=num_draft, tied_embedding=True)  # an LM head; embedded by the target
  if config.drafter.name in ('none', 'lookup'):
    return None
  if config.drafter.name != 'self':
    raise InputError(f'drafter.name={config.drafter.name!r}: GPUs are planned for chains: none, lookup, self or model')
  check_layers(config.drafter.num_layers, target.num_layers)
  return dataclasses.replace(target, num_layers=config.drafter.num_layers, windows=())


def roofline(config: ConfigDict, count: int, chip: Chip) -> dict[str, Any]:
  """The facts of `launch.plan` that hold without a compiler."""
  check_fields(config)
  workloads = workloads_of(config)
  gamma, batch, capacity = config.engine.gamma, config.engine.batch, config.engine.capacity
  target = model_config(config.target, config.engine.attention_block)
  if isinstance(target, EncDecConfig):
    raise InputError('GPUs are planned for decoders alone: name a slice such as v4-8 for a target with an encoder')
  draft = _draft(config, target)
  models = [model for model in (target, draft) if model]
  own_weights = models[:1] if config.drafter.name == 'self' else models  # its layers are those of the target
  weights = sum(num_parameters(model) * jnp.dtype(model.dtype).itemsize for model in own_weights)
  caches = sum(cache_values(model, batch, capacity) * jnp.dtype(model.dtype).itemsize for model in models)

  def pass_ms(model: DecoderConfig, tokens: int) -> float:
    values = num_parameters(model) + cache_values(model, batch, capacity)
    flops = 2 * num_parameters(model) * tokens * batch
    return roofline_ms(values * jnp.dtype(model.dtype).itemsize, flops, count, chip)

  plain, verify = pass_ms(target, 1), pass_ms(target, gamma + 1)
  drafted = pass_ms(draft, 1) if draft else 0.0
  needed = (weights + caches) / count / GIB
  return {
      'topology': f'{count}x{chip.name}', 'chips': count, 'hosts': None, 'fits': needed <= chip.usable_gib,
      'problem': f'does not fit on {count}x{chip.name}: {needed:.1f} GiB a chip of {chip.usable_gib}: take more chips',
      'usable_gib': chip.usable_gib, 'weights_gib': weights / count / GIB, 'cache_gib': caches / count / GIB,
      'gamma': gamma, 'floor_ms': plain, 'predicted_ms_plain': plain, 'predicted_ms_draft': drafted,
      'predicted_ms_verify': verify, 'published_ms_plain': published_plain_ms(config),
      'workloads': [workload.row(Step(plain, drafted, drafted, verify), gamma) for workload in workloads if gamma]}
