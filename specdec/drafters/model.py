"""A smaller language model as the draft, with its own cache (Chen et al., 2023; Leviathan et al., 2023)."""

import dataclasses

from flax import struct
import jax
from jax import Array
import jax.numpy as jnp

from models.kv_cache import KVCache
from models.protocol import LanguageModel, empty_cache
from models.source import Source
from specdec import rng
from specdec.draft import Draft
from specdec.drafters.draft_vocab import DraftVocab, ReducedModel
from specdec.drafters.protocol import Context
from specdec.features import Reads
from specdec.padded import padded_pass
from specdec.run_if import run_if
from specdec.warp import warp

CATCH_UP = 8  # tokens per pass when the cache lags (only after steps that drafted nothing)


@struct.dataclass
class ModelDraftState:
  """State between steps.

  Attributes:
    cache: its length never exceeds the text's minus 2: the two newest tokens are fed by the next draft's first pass.
      It lags after steps that drafted nothing, and rests once the row has ended.
  """

  cache: KVCache


def feed(model: LanguageModel, cache: KVCache, tokens_BL: Array, start_B: Array, width: int, rows: int,
         wanted_BR: Array) -> tuple[Array, KVCache]:
  """Runs the `width` tokens from `start` of each row; logits of the wanted ones, and the cache at `start`."""
  position_BT = jnp.minimum(start_B[:, None] + jnp.arange(width), tokens_BL.shape[1] - 1)
  tokens_BT = jnp.take_along_axis(tokens_BL, position_BT, axis=1)
  output = padded_pass(model, tokens_BT, cache.with_length(start_B), rows, wanted_BR)
  return output.logits_BRV, output.cache


@dataclasses.dataclass(frozen=True)
class Model:
  """Any smaller model with the target's vocabulary, or the first layers of the target.

  γ passes per step, not γ + 1: the first pass takes the two newest tokens, since after full acceptance the last
  drafted one has not been through the model yet. Rows longer than the draft's own context draft nothing and go on
  as plain decoding.

  Attributes:
    num_tokens: ids both vocabularies share; padding logits beyond are cut before the law is made. Of them the draft
      may speak of fewer (`ReducedModel`).
    rows: query rows per pass, at least (`specdec.padded`).
  """

  num_tokens: int
  rows: int = 1

  name = 'model'
  reads = Reads.NOTHING
  is_tree, draws = False, True

  def levels(self, gamma: int) -> int:
    return gamma

  def init(self, params: LanguageModel | ReducedModel, tokens_BL: Array, length_B: Array, bucket: int,
           features_BTF: Array | None, source: Source | None) -> ModelDraftState:
    batch = tokens_BL.shape[0]
    model, _ = self._parts(params)
    cache = empty_cache(model, batch, tokens_BL.shape[1], source)
    none_BR = jnp.zeros((batch, 0), jnp.int32)
    _, cache = feed(model, cache, tokens_BL, jnp.zeros_like(length_B), bucket, 1, none_BR)
    return ModelDraftState(cache.with_length(jnp.maximum(length_B - 2, 0)))

  def propose(self, params: LanguageModel | ReducedModel, state: ModelDraftState, context: Context,
              gamma: int) -> tuple[Draft, ModelDraftState]:
    model, vocab = self._parts(params)
    room_B = jnp.maximum(model.max_positions + 1 - context.length_B, 0)  # the last drafted token is not fed
    count_B = jnp.where(context.live_B, jnp.minimum(context.gamma_B, room_B), 0)
    num_passes = jnp.max(count_B)
    batch = count_B.shape[0]
    with jax.named_scope('catch_up'):
      cache = run_if(num_passes > 0, lambda cache: self._catch_up(model, cache, context), state.cache)

    def newest_two(carry):
      tokens_BM, probs_BMV, cache = carry
      start_B = jnp.maximum(context.length_B - 2, 0)
      newest_B1 = (context.length_B - 1 - start_B)[:, None]
      logits_B1U, cache = feed(model, cache, context.tokens_BL, start_B, 2, self.rows, newest_B1)
      token_B, law_BV = draw(logits_B1U, vocab, context, 0)
      return tokens_BM.at[:, 0].set(token_B), probs_BMV.at[:, 0].set(law_BV), cache

    def last_drafted(index, carry):
      tokens_BM, probs_BMV, cache = carry
      cache = cache.with_length(context.length_B + index - 1)
      newest_B1 = jax.lax.dynamic_slice_in_dim(tokens_BM, index - 1, 1, axis=1)
      output = padded_pass(model, newest_B1, cache, self.rows)
      token_B, law_BV = draw(output.logits_BRV, vocab, context, index)
      return tokens_BM.at[:, index].set(token_B), probs_BMV.at[:, index].set(law_BV), output.cache

    carry = (jnp.zeros((batch, gamma), jnp.int32), jnp.zeros((batch, gamma, self.num_tokens), jnp.float32), cache)
    with jax.named_scope('first'):
      carry = run_if(num_passes > 0, newest_two, carry) if gamma else carry
    with jax.named_scope('next'):
      tokens_BM, probs_BMV, cache = jax.lax.fori_loop(1, num_passes, last_drafted, carry) if gamma > 1 else carry
    fed_B = jnp.where(context.live_B & (num_passes > 0), context.length_B + num_passes - 1, state.cache.length_B)
    return Draft(tokens_BM, probs_BMV, count_B), ModelDraftState(cache.with_length(fed_B))

  def observe(self, state: ModelDraftState, length_B: Array, features_BEF: Array | None) -> ModelDraftState:
    """Rolls back to what is committed of the slots that were fed, but for the two newest tokens."""
    kept_B = jnp.minimum(state.cache.length_B, jnp.maximum(length_B - 2, 0))
    return state.replace(cache=state.cache.with_length(kept_B))

  def _catch_up(self, model: LanguageModel, cache: KVCache, context: Context) -> KVCache:
    """Feeds what steps without a draft left out, so that only the two newest tokens are missing."""
    none_BR = jnp.zeros((context.length_B.shape[0], 0), jnp.int32)
    wanted_B = jnp.where(context.live_B, jnp.maximum(context.length_B - 2, 0), 0)

    def chunk(cache):
      start_B = cache.length_B
      _, cache = feed(model, cache, context.tokens_BL, start_B, CATCH_UP, 1, none_BR)
      return cache.with_length(jnp.maximum(start_B, jnp.minimum(start_B + CATCH_UP, wanted_B)))

    return jax.lax.while_loop(lambda cache: jnp.any(cache.length_B < wanted_B), chunk, cache)

  def _parts(self, params: LanguageModel | ReducedModel) -> tuple[LanguageModel, DraftVocab]:
    if isinstance(params, ReducedModel):
      return params.model, DraftVocab(params.ids_U, self.num_tokens)
    return params, DraftVocab(None, self.num_tokens)


def draw(logits_B1U: Array, vocab: DraftVocab, context: Context, index: int | Array) -> tuple[Array, Array]:
  """A token, and the law that it is drawn from."""
  law_BV = vocab.laws(warp(vocab.real(logits_B1U), context.sampling))[:, 0]
  return rng.draw(context.row_key_B, context.length_B + index, law_BV, context.purpose), law_BV
