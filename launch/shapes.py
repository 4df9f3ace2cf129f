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
from launch.build_drafter import check_encoder, untrained_heads
from launch.draft_ids import read_draft_ids
from launch.drafter_fields import UNTRAINED, taps_of
from models.abstract import AnyConfig, AnyModel, abstract_module, new_model
from models.decoder import Decoder
from models.eagle import EagleHead, EagleWeights
from models.errors import InputError
from models.heads import MedusaHeads
from models.kv_heads import with_repeats
from models.loading import embedded_model, orbax
from models.loading.eagle import checked_head
from models.loading.load import float_dtype, open_checkpoint
from models.loading.medusa import checked_heads
from models.loading.reduced import HEAD, checked_draft, is_reduced, num_drafted
from models.sharding import sharding_of, spec
from specdec import drafters


def model_config(section: ConfigDict, attention_block: int) -> AnyConfig:
  """The shapes of the model of a `target` or `drafter` section."""
  if section.source.startswith('random:'):
    return random_config(section, attention_block)[0]
  path = embedded_model() if section.source == 'embedded' else pathlib.Path(section.source)
  with contextlib.ExitStack() as stack:
    config = (orbax.read_config(path) if orbax.is_checkpoint(path)
              else stack.enter_context(open_checkpoint(path))[2])
  return dataclasses.replace(config, dtype=float_dtype(section.dtype), attention_block=attention_block or None)


def abstract_target(config: ConfigDict, mesh: Mesh) -> AnyModel:
  target = model_config(config.target, config.engine.attention_block)
  return abstract_model(dataclasses.replace(target, taps=taps_of(config.drafter)), mesh)


def abstract_draft(config: ConfigDict, section: ConfigDict, target: Decoder, mesh: Mesh) -> Any:
  """What the device holds for the drafter of a section (`launch.build_drafter`).

  Raises:
    InputError: files that do not fit the target; layers that the target does not have; a drafter that is nothing to
      plan.
  """
  check_encoder(section, target.has_encoder)
  match section.name:
    case 'self':
      check_layers(section.num_layers, target.config.num_layers)
      return _reduced(section, target.first_layers(section.num_layers), mesh)
    case 'model' if is_reduced(section.source):
      return _reduced_of_files(section, target, mesh, splits_draft(config))
    case 'model':
      draft = model_config(section, config.engine.attention_block)
      return _reduced(section, abstract_model(dataclasses.replace(draft, split=splits_draft(config)), mesh), mesh)
    case 'hybrid':
      return abstract_draft(config, section.of, target, mesh)
    case 'medusa' | 'eagle':
      with given_by('drafter'):
        heads = _placed(_heads(section, target, mesh), mesh)
      return _with_borrowed(heads, target, mesh)
    case 'simulated':
      raise InputError("drafter.name='simulated' cannot be planned: it times an engine on this machine; use another")
    case 'unigram' | 'bigram':
      raise InputError(f'drafter.name={section.name!r} cannot be planned: it has no pass to plan; use another')
  return None


def _reduced(section: ConfigDict, draft: Decoder, mesh: Mesh) -> Decoder | drafters.ReducedModel:
  if not section.draft_vocab:
    return draft
  num_draft = len(read_draft_ids(section.draft_vocab, draft.vocab_size))
  return drafters.ReducedModel(draft.with_head(_head_rows(draft, num_draft, mesh, draft.config.split)),
                               _ids(num_draft, mesh))


def _reduced_of_files(section: ConfigDict, target: Decoder, mesh: Mesh, split: bool) -> drafters.ReducedModel:
  """As `models.loading.reduced.load_reduced` loads it."""
  source, config, plan = checked_draft(
      section.source, target, section.dtype, split=split, attention_block=target.config.attention_block)
  num_draft, draft = num_drafted(source, config), abstract_model(config, mesh)
  lender = draft if HEAD in plan else target
  draft.embed, head = target.embed, _head_rows(lender, num_draft, mesh, split)
  return drafters.ReducedModel(draft.with_head(head), _ids(num_draft, mesh))


def _head_rows(lender: Decoder, num_draft: int, mesh: Mesh, split: bool = True) -> jax.ShapeDtypeStruct:
  """[U, D]: so many rows of an LM head."""
  shape = num_draft, lender.config.width
  return jax.ShapeDtypeStruct(
      shape, lender.lm_head.dtype, sharding=NamedSharding(mesh, spec('VD', shape, mesh, split)))


def _ids(num_draft: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((num_draft,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))


def _heads(section: ConfigDict, target: Decoder, mesh: Mesh) -> Callable[[], nnx.Module]:
  """What makes the heads of a section, from the headers of their files."""
  if section.source == UNTRAINED:
    return untrained_heads(section, target)
  if section.name == 'medusa':
    _, config, _ = checked_heads(section.source, target.config.width, target.vocab_size, section.dtype)
    return lambda: MedusaHeads(config, nnx.Rngs(0))
  _, config, _ = checked_head(section.source, target, section.dtype)
  config = dataclasses.replace(config, decoder=with_repeats(config.decoder, mesh)[0])
  return lambda: EagleHead(config, nnx.Rngs(0))


def _with_borrowed(heads: MedusaHeads | EagleHead, target: Decoder,
                   mesh: Mesh) -> drafters.MedusaParams | EagleWeights:
  """As `launch.build_drafter` has them."""
  own = heads.config.own_head if isinstance(heads, MedusaHeads) else heads.head is not None
  rows_UD = None
  if not own:
    num_draft = heads.config.draft_vocab
    rows_UD = target.lm_head if num_draft is None else _head_rows(target, num_draft, mesh)
  if isinstance(heads, MedusaHeads):
    return drafters.MedusaParams(heads, rows_UD)
  embed = (target.embed if heads.embed is None else heads.embed).get_value()
  return EagleWeights(heads, embed, heads.head.get_value() if own else rows_UD)


def abstract_model(config: AnyConfig, mesh: Mesh) -> AnyModel:
  return _placed(lambda: new_model(with_repeats(config, mesh)[0], nnx.Rngs(0)), mesh, config.split)


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
