"""From a tree to the path that was accepted: after this, a step over a tree goes on like one over a chain."""

from jax import Array
import jax.numpy as jnp

from models.kv_cache import KVCache
from specdec.draft import AnyDraft, Draft, TreeDraft, Verdict
from specdec.verify import Scores


def straighten(draft: AnyDraft, verdict: Verdict, scores: Scores, cache: KVCache) -> tuple[Draft, Scores, KVCache]:
  """The accepted path as a chain, the scores of its rows, and the cache with the path at the committed length.

  A chain is its own path: nothing is moved. Of a tree the laws are not wanted any more.
  """
  if not isinstance(draft, TreeDraft):
    return draft, scores, cache
  rows_BE = jnp.pad(verdict.path_BP, ((0, 0), (1, 0)))
  along = lambda x: None if x is None else jnp.take_along_axis(x, rows_BE[..., None], axis=1)
  scores = scores.replace(
      probs_BTV=along(scores.probs_BTV[..., :1]), logprobs_BTV=along(scores.logprobs_BTV),
      features_BTF=along(scores.features_BTF))
  return draft.along(verdict), scores, cache.compact(verdict.path_BP, draft.width + 1)


def path_overlap(draft: TreeDraft, target_probs_BTV: Array, verdict: Verdict) -> Array:
  """[B, P]: the probability that some child is kept, of each row on the path; NaN where children were drawn."""
  batch, levels = verdict.path_BP.shape
  if draft.laws_BRV is not None:
    return jnp.full((batch, levels), jnp.nan)
  row_B1 = jnp.arange(batch)[:, None]
  prob_BM = target_probs_BTV[row_B1, draft.parents_BM, draft.tokens_BM]
  elder_BMM = ((draft.parents_BM[:, :, None] == draft.parents_BM[:, None])
               & (draft.tokens_BM[:, :, None] == draft.tokens_BM[:, None]))
  repeated_BM = jnp.any(jnp.tril(elder_BMM, -1), axis=-1)
  above_BP = jnp.pad(verdict.path_BP[:, :-1], ((0, 0), (1, 0)))
  child_BPM = (draft.parents_BM[:, None] == above_BP[..., None]) & ~repeated_BM[:, None]
  return jnp.nan_to_num(jnp.sum(jnp.where(child_BPM, prob_BM[:, None], 0.0), axis=-1))
