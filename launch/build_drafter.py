"""From a `drafter` section to a drafter and what the device holds for it."""

import dataclasses
from typing import Any

from flax import nnx
import jax
from ml_collections import ConfigDict

from launch.build import AnyTokenizer, build_model, check_layers, given_by, splits_draft
from launch.drafter_fields import UNTRAINED
from models.config import EagleConfig, MedusaConfig
from models.decoder import Decoder
from models.eagle import EagleHead, EagleWeights
from models.heads import MedusaHeads
from models.loading.eagle import load_eagle
from models.loading.load import float_dtype
from models.loading.medusa import load_medusa
from models.random_weights import new_module
from models.tokenizer import check_same_vocabulary
from specdec import drafters
from specdec.tree import TreeSpec


def build_drafter(config: ConfigDict, target: Decoder, tokenizer: AnyTokenizer) -> tuple[drafters.Drafter, Any]:
  """The drafter and what the device holds for it.

  Raises:
    InputError: whatever of the section does not fit the target.
  """
  with given_by('drafter'):
    return _build(config, config.drafter, target, tokenizer)


def _build(config: ConfigDict, section: ConfigDict, target: Decoder,
           tokenizer: AnyTokenizer) -> tuple[drafters.Drafter, Any]:
  name, num_tokens, rows = section.name, tokenizer.num_tokens, config.engine.rows
  if name == 'none':
    return drafters.Empty(), None
  if name == 'lookup':
    return drafters.Lookup(**_lookup_fields(section)), None
  if name == 'lookup_tree':
    return drafters.LookupTree(**_lookup_fields(section), branches=section.branches), None
  if name == 'self':
    check_layers(section.num_layers, target.config.num_layers)
    return drafters.Model(num_tokens, rows), target.first_layers(section.num_layers)
  if name == 'model':
    draft, draft_tokenizer = build_model(section, config.engine.attention_block, splits_draft(config))
    check_same_vocabulary(tokenizer, draft_tokenizer)
    return drafters.Model(num_tokens, rows), draft
  if name == 'medusa':
    return drafters.Medusa(tree_of(section.tree), num_tokens), _medusa(section, target)
  if name == 'eagle':
    return drafters.Eagle(num_tokens, tree_of(section.tree), section.children, section.version, rows), _eagle(
        section, target)
  if name == 'hybrid':
    return _hybrid(config, target, tokenizer)
  return drafters.Simulated(section.alpha), None


def _hybrid(config: ConfigDict, target: Decoder, tokenizer: AnyTokenizer) -> tuple[drafters.Drafter, Any]:
  section = config.drafter
  inner, params = _build(config, section.of, target, tokenizer)
  if isinstance(inner, drafters.Eagle):
    inner = drafters.Eagle(**vars(inner) | {'longest': section.copied})
  lookup = drafters.Lookup(**_lookup_fields(section.lookup))
  return drafters.Hybrid(inner, lookup, config.engine.gamma - section.copied, section.copied), params


def _lookup_fields(section: ConfigDict) -> dict[str, Any]:
  return {'min_ngram': section.min_ngram, 'max_ngram': section.max_ngram, 'latest': section.match == 'latest',
          'partial': section.partial}


def tree_of(field: Any) -> TreeSpec | drafters.Dynamic:
  """A static tree from its paths, or a dynamic one from its sizes."""
  if isinstance(field, ConfigDict):
    return drafters.Dynamic(field.levels, field.top_k, field.nodes)
  return TreeSpec.from_paths(field)


def _mesh() -> jax.sharding.Mesh | None:
  mesh = jax.sharding.get_mesh()
  return None if mesh.empty else mesh


def _medusa(section: ConfigDict, target: Decoder) -> drafters.MedusaParams:
  config = target.config
  if section.source == UNTRAINED:
    heads = new_module(lambda: MedusaHeads(medusa_config(section, target), nnx.Rngs(0)), _mesh())
  else:
    heads = load_medusa(section.source, config.width, target.vocab_size, dtype=section.dtype, mesh=_mesh())
  return drafters.MedusaParams(heads, None if heads.config.own_head else target.lm_head)


def medusa_config(section: ConfigDict, target: Decoder) -> MedusaConfig:
  """Of heads that have not been trained: one residual block each, and the target's LM head."""
  return MedusaConfig(num_heads=section.num_heads, width=target.config.width, vocab_size=target.vocab_size,
                      num_layers=1, own_head=False, dtype=float_dtype(section.dtype))


def _eagle(section: ConfigDict, target: Decoder) -> EagleWeights:
  if section.source == UNTRAINED:
    config = eagle_config(section, target)
    return EagleWeights.create(new_module(lambda: EagleHead(config, nnx.Rngs(0)), _mesh()), target)
  head = load_eagle(section.source, target, dtype=section.dtype, mesh=_mesh())
  return EagleWeights.create(head, target)


def eagle_config(section: ConfigDict, target: Decoder) -> EagleConfig:
  """Of a head that has not been trained."""
  layer = dataclasses.replace(target.config, num_layers=1, windows=(), taps=(), dtype=float_dtype(section.dtype))
  return EagleConfig(layer, section.version, fc_bias=section.version == 1)
