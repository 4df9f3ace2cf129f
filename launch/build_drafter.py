"""From a `drafter` section to a drafter and what the device holds for it."""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import nnx
import jax
from ml_collections import ConfigDict

from launch.build import AnyTokenizer, build_model, check_layers, given_by, splits_draft
from launch.draft_ids import read_draft_ids
from launch.drafter_fields import UNTRAINED
from launch.ngram_counts import laws_of, read_tokens
from launch.tree_file import read_tree
from models.abstract import AnyModel
from models.config import EagleConfig, MedusaConfig
from models.decoder import Decoder
from models.eagle import EagleHead, EagleWeights
from models.errors import InputError
from models.heads import MedusaHeads
from models.loading.eagle import load_eagle
from models.loading.load import float_dtype
from models.loading.medusa import load_medusa
from models.loading.reduced import head_rows, is_reduced, load_reduced
from models.random_weights import new_module
from models.sharding import put_whole
from models.tokenizer import check_same_vocabulary
from specdec import drafters
from specdec.tree import TreeSpec


def build_drafter(config: ConfigDict, target: AnyModel, tokenizer: AnyTokenizer) -> tuple[drafters.Drafter, Any]:
  """The drafter and what the device holds for it.

  Raises:
    InputError: whatever of the section does not fit the target.
  """
  with given_by('drafter'):
    return drafter_of(config, tokenizer.num_tokens), _params(config, config.drafter, target, tokenizer)


def drafter_of(config: ConfigDict, num_tokens: int) -> drafters.Drafter:
  """The drafter without its weights.

  Args:
    config: of a decode command.
    num_tokens: real tokens of the vocabulary.

  Raises:
    InputError: fields that do not fit each other.
  """
  with given_by('drafter'):
    return _drafter(config.drafter, config.engine, num_tokens)


def _drafter(section: ConfigDict, engine: ConfigDict, num_tokens: int) -> drafters.Drafter:
  match section.name:
    case 'none':
      return drafters.Empty()
    case 'lookup':
      return drafters.Lookup(**_lookup_fields(section))
    case 'lookup_tree':
      return drafters.LookupTree(**_lookup_fields(section), branches=section.branches)
    case 'self' | 'model':
      return drafters.Model(num_tokens, engine.rows)
    case 'unigram' | 'bigram':
      return drafters.Ngram(num_tokens)
    case 'medusa':
      return drafters.Medusa(tree_of(section.tree), num_tokens, engine.rows)
    case 'eagle':
      return drafters.Eagle(num_tokens, tree_of(section.tree), section.children, section.version, engine.rows)
    case 'hybrid':
      inner = _drafter(section.of, engine, num_tokens)
      if isinstance(inner, drafters.Eagle):
        inner = dataclasses.replace(inner, longest=section.copied)
      return drafters.Hybrid(
          inner, drafters.Lookup(**_lookup_fields(section.lookup)), engine.gamma - section.copied, section.copied)
  return drafters.Simulated(section.alpha)


def _params(config: ConfigDict, section: ConfigDict, target: AnyModel, tokenizer: AnyTokenizer) -> Any:
  check_encoder(section, target.has_encoder)
  match section.name:
    case 'self':
      check_layers(section.num_layers, target.config.num_layers)
      return _reduced(section, target.first_layers(section.num_layers), tokenizer)
    case 'model' if is_reduced(section.source):
      draft, ids_U = load_reduced(section.source, target, section.dtype, _mesh(), split=splits_draft(config),
                                  attention_block=target.config.attention_block)
      return drafters.ReducedModel(draft, put_whole(ids_U))
    case 'model':
      draft, draft_tokenizer = build_model(section, config.engine.attention_block, splits_draft(config))
      check_same_vocabulary(tokenizer, draft_tokenizer)
      if draft.has_encoder and not target.has_encoder:
        raise InputError(f'drafter.source={section.source!r} has an encoder, but the target gives it no source to '
                         'read: use a draft without one')
      return _reduced(section, draft, tokenizer)
    case 'unigram':
      return laws_of(read_tokens(section.counts, tokenizer), tokenizer.num_tokens, followers=0)
    case 'bigram':
      return laws_of(read_tokens(section.counts, tokenizer), tokenizer.num_tokens, section.followers)
    case 'medusa':
      return _medusa(section, target)
    case 'eagle':
      return _eagle(section, target)
    case 'hybrid':
      return _params(config, section.of, target, tokenizer)
  return None


def check_encoder(section: ConfigDict, has_encoder: bool) -> None:
  """Refuses heads for targets with an encoder.

  Raises:
    InputError: see above.
  """
  if has_encoder and section.name in ('medusa', 'eagle'):
    raise InputError(f'drafter.name={section.name!r}: its heads are for targets without an encoder: use model, self or '
                     'lookup')


def _lookup_fields(section: ConfigDict) -> dict[str, Any]:
  return {'min_ngram': section.min_ngram, 'max_ngram': section.max_ngram, 'latest': section.match == 'latest',
          'partial': section.partial}


def tree_of(field: Any) -> TreeSpec | drafters.Dynamic:
  """A static tree from its paths or from the name of a file, or a dynamic one from its sizes."""
  if isinstance(field, ConfigDict):
    return drafters.Dynamic(field.levels, field.top_k, field.nodes)
  names = (field,) if isinstance(field, str) else tuple(field)  # an override of paths by a name is a tuple of it
  return TreeSpec.from_paths(read_tree(names[0]) if len(names) == 1 and isinstance(names[0], str) else names)


def _reduced(section: ConfigDict, draft: AnyModel, tokenizer: AnyTokenizer) -> AnyModel | drafters.ReducedModel:
  """The draft, with the rows of its LM head that the section wants."""
  if not section.draft_vocab:
    return draft
  ids_U = put_whole(read_draft_ids(section.draft_vocab, tokenizer.num_tokens))
  return drafters.ReducedModel(draft.with_head(head_rows(draft, ids_U, draft.config.split)), ids_U)


def _mesh() -> jax.sharding.Mesh | None:
  mesh = jax.sharding.get_mesh()
  return None if mesh.empty else mesh


def _medusa(section: ConfigDict, target: Decoder) -> drafters.MedusaParams:
  config = target.config
  if section.source == UNTRAINED:
    heads = new_module(untrained_heads(section, target), _mesh())
  else:
    heads = load_medusa(section.source, config.width, target.vocab_size, dtype=section.dtype, mesh=_mesh())
  if heads.config.own_head or heads.draft_ids is None:
    return drafters.MedusaParams(heads, None if heads.config.own_head else target.lm_head)
  return drafters.MedusaParams(heads, head_rows(target, heads.draft_ids[...]))


def _eagle(section: ConfigDict, target: Decoder) -> EagleWeights:
  if section.source == UNTRAINED:
    head = new_module(untrained_heads(section, target), _mesh())
  else:
    head = load_eagle(section.source, target, dtype=section.dtype, mesh=_mesh())
  return EagleWeights.create(head, target)


def untrained_heads(section: ConfigDict, target: Decoder) -> Callable[[], nnx.Module]:
  """What makes the heads of a `medusa` or `eagle` section for this target, all weights new."""
  dtype = float_dtype(section.dtype)
  if section.name == 'medusa':
    heads = MedusaConfig(num_heads=section.num_heads, width=target.config.width, vocab_size=target.vocab_size,
                         own_head=section.own_head, dtype=dtype)
    return lambda: MedusaHeads(heads, nnx.Rngs(0))
  layer = dataclasses.replace(target.config, num_layers=1, windows=(), taps=(), dtype=dtype)
  head = EagleConfig(layer, section.version, fc_bias=section.version == 1, num_taps=max(len(section.taps), 1))
  return lambda: EagleHead(head, nnx.Rngs(0))
