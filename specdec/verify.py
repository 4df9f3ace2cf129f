"""One wide target pass over the newest token and the draft: the laws that the accept rule needs."""

from collections.abc import Sequence
import functools

from flax import struct
import jax
from jax import Array
import jax.numpy as jnp

from models.kv_cache import KVCache
from models.protocol import LanguageModel
from specdec.draft import AnyDraft, TreeDraft
from specdec.features import Reads, features_of
from specdec.padded import padded_pass
from specdec.run_if import run_if
from specdec.tree import ancestors
from specdec.warp import Sampling, warp


@struct.dataclass
class Scores:
  """What the target says about the T = M + 1 positions of a step.

  Attributes:
    probs_BTV: laws after `warp`; those past a row's drafted count are not used.
    logprobs_BTV: log-softmax of the raw logits; None unless asked for.
    features_BTF: what the drafter reads of the target; None if it reads nothing.
    width_index: which of the widths ran.
  """

  probs_BTV: Array
  logprobs_BTV: Array | None
  features_BTF: Array | None
  width_index: Array


def verify(target: LanguageModel, cache: KVCache, newest_B: Array, draft: AnyDraft, sampling: Sampling, *,
           num_tokens: int, widths: Sequence[int], rows: int, logprobs: bool, reads: Reads) -> tuple[Scores, KVCache]:
  """Scores the draft; the cache keeps its length (the newest token is its next slot).

  Args:
    target: the model.
    cache: all tokens but the newest.
    newest_B: last committed token.
    draft: M drafted tokens, a chain or a tree.
    sampling: the filters of the law.
    num_tokens: real tokens; padding logits beyond are cut.
    widths: compiled pass widths, ascending, the last M + 1: the narrowest that holds the longest draft runs.
    rows: at least so many query rows per pass (TPU lowers a single row badly).
    logprobs: whether raw log-probabilities are wanted.
    reads: which vectors of the target the drafter wants.

  Raises:
    ValueError: a tree for a model that knows chains only.
  """
  tokens_BT = jnp.concatenate([newest_B[:, None], draft.tokens_BM], axis=1)
  batch, full = tokens_BT.shape
  ancestors_BTT = None
  if isinstance(draft, TreeDraft):
    if not target.takes_trees:
      raise ValueError('this target takes chains only: its positions are slots of the cache')
    ancestors_BTT = ancestors(draft.parents_BM, draft.levels)

  def at_width(width: int, carry: tuple[Scores, KVCache]) -> tuple[Scores, KVCache]:
    scores, cache = carry
    seen_BTT = None if ancestors_BTT is None else ancestors_BTT[:, :width, :width]
    output = padded_pass(target, tokens_BT[:, :width], cache, rows, ancestors_BTT=seen_BTT)
    logits_BTV = output.logits_BRV[..., :num_tokens]
    scores = scores.replace(probs_BTV=scores.probs_BTV.at[:, :width].set(warp(logits_BTV, sampling)))
    if logprobs:
      raw_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
      scores = scores.replace(logprobs_BTV=scores.logprobs_BTV.at[:, :width].set(raw_BTV))
    if reads is not Reads.NOTHING:
      features_BTF = features_of(output, reads)
      scores = scores.replace(features_BTF=scores.features_BTF.at[:, :width].set(features_BTF))
    return scores, output.cache

  zeros_BTV = jnp.zeros((batch, full, num_tokens), jnp.float32)
  chosen = jnp.searchsorted(jnp.asarray(widths), jnp.max(draft.count_B) + 1)
  features_BTF = None
  if reads is not Reads.NOTHING:
    shape = jax.eval_shape(lambda: features_of(padded_pass(target, tokens_BT, cache, rows), reads))
    features_BTF = jnp.zeros(shape.shape, shape.dtype)
  carry = Scores(zeros_BTV, zeros_BTV if logprobs else None, features_BTF, chosen), cache
  if len(widths) == 1:
    return at_width(full, carry)
  for index, width in enumerate(widths):
    carry = run_if(chosen == index, functools.partial(at_width, width), carry)
  return carry
