"""The models of a config as shapes that say how each array lies on a mesh; no weight is read or made."""

from collections.abc import Callable
import contextlib
import dataclasses
import math
import pathlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from launch.build import check_layers, given_by, random_config, splits_draft
from launch.build_drafter import untrained_heads
from launch.draft_ids import read_draft_ids
from launch.drafter_fields import UNTRAINED, taps_of
from models.abstract import abstract_module
from models.config import DecoderConfig
from models.decoder import Decoder
from models.eagle import EagleWeights
from models.errors import InputError
from models.kv_heads import with_repeats
from models.loading import embedded_model, orbax
from models.loading.load import float_dtype, open_checkpoint
from models.sharding import sharding_of, spec
from specdec import drafters


def model_config(section: ConfigDict, attention_block: int) -> DecoderConfig:
  """The shapes of the model of a `target` or `drafter` section."""
  if section.source.startswith('random:'):
    return random_config(section, attention_block)[0]
  path = embedded_model() if section.source == 'embedded' else pathlib.Path(section.source)
  with contextlib.ExitStack() as stack:
    config = (orbax.read_config(path) if orbax.is_checkpoint(path)
              else stack.enter_context(open_checkpoint(path))[2])
  return dataclasses.replace(config, dtype=float_dtype(section.dtype), attention_block=attention_block or None)


def abstract_target(config: ConfigDict, mesh: Mesh) -> Decoder:
  target = model_config(config.target, config.engine.attention_block)
  return abstract_model(dataclasses.replace(target, taps=taps_of(config.drafter)), mesh)


def abstract_draft(config: ConfigDict, section: ConfigDict, target: Decoder, mesh: Mesh) -> Any:
  """What the device holds for the drafter of a section (`launch.build_drafter`).

  Raises:
    InputError: heads of a file, whose shapes are those of untrained ones; layers that the target does not have; a
      drafter that is nothing to plan.
  """
  match section.name:
    case 'self':
      check_layers(section.num_layers, target.config.num_layers)
      return _reduced(section, target.first_layers(section.num_layers), mesh)
    case 'model':
      draft = model_config(section, config.engine.attention_block)
      return _reduced(section, abstract_model(dataclasses.replace(draft, split=splits_draft(config)), mesh), mesh)
    case 'hybrid':
      return abstract_draft(config, section.of, target, mesh)
    case 'medusa' | 'eagle':
      if section.source != UNTRAINED:
        raise InputError(f'drafter.source={section.source!r}: heads are planned by their shapes alone: set it to '
                         f'{UNTRAINED!r}')
      with given_by('drafter'):
        heads = _placed(untrained_heads(section, target), mesh)
      if section.name == 'eagle':
        return EagleWeights.create(heads, target)
      return drafters.MedusaParams(heads, None if section.own_head else target.lm_head)
    case 'simulated':
      raise InputError("drafter.name='simulated' cannot be planned: it times an engine on this machine; use another")
  return None


def _reduced(section: ConfigDict, draft: Decoder, mesh: Mesh) -> Decoder | drafters.ReducedModel:
  if not section.draft_vocab:
    return draft
  rows = len(read_draft_ids(section.draft_vocab, draft.vocab_size)), draft.config.width
  places = (spec('VD', rows, mesh, draft.config.split), PartitionSpec())
  head, ids = (jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, place)) for shape, dtype, place in zip(
      (rows, rows[:1]), (draft.lm_head.dtype, jnp.int32), places, strict=True))
  return drafters.ReducedModel(draft.with_head(head), ids)


def abstract_model(config: DecoderConfig, mesh: Mesh) -> Decoder:
  return _placed(lambda: Decoder(with_repeats(config, mesh)[0], nnx.Rngs(0)), mesh, config.split)


def _placed(make: Callable[[], nnx.Module], mesh: Mesh, split: bool = True) -> nnx.Module:
  graph, leaves = abstract_module(make)
  place = sharding_of(mesh, split)
  return nnx.merge(graph, nnx.from_flat_state([
      (path, leaf.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place(path, leaf.shape))))
      for path, leaf in leaves.items()]))


def device_bytes(tree: Any, without: tuple[str, ...] = ()) -> int:
  """Bytes on one device of the arrays of a tree, but for those named; what is in it twice counts once."""
  leaves = {id(leaf): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if not any(name in jax.tree_util.keystr(path) for name in without)}
  return sum(math.prod(device_shape(leaf)) * leaf.dtype.itemsize for leaf in leaves.values())


def device_shape(leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
  return leaf.sharding.shard_shape(leaf.shape)
