"""One wide target pass over the newest token and the draft: the laws that the accept rule needs."""

from collections.abc import Sequence
import functools

from flax import struct
import jax
from jax import Array
import jax.numpy as jnp

from models.kv_cache import KVCache
from models.protocol import LanguageModel
from specdec.draft import Draft
from specdec.padded import padded_pass
from specdec.run_if import run_if
from specdec.warp import Sampling, warp


@struct.dataclass
class Scores:
  """What the target says about the T = M + 1 positions of a step.

  Attributes:
    probs_BTV: laws after `warp`; those past a row's drafted count are not used.
    logprobs_BTV: log-softmax of the raw logits; None unless asked for.
    width_index: which of the widths ran.
  """

  probs_BTV: Array
  logprobs_BTV: Array | None
  width_index: Array


def verify(target: LanguageModel, cache: KVCache, newest_B: Array, draft: Draft, sampling: Sampling, *,
           num_tokens: int, widths: Sequence[int], rows: int, logprobs: bool) -> tuple[Scores, KVCache]:
  """Scores the draft; the cache keeps its length (the newest token is its next slot).

  Args:
    target: the model.
    cache: all tokens but the newest.
    newest_B: last committed token.
    draft: M drafted tokens.
    sampling: the filters of the law.
    num_tokens: real tokens; padding logits beyond are cut.
    widths: compiled pass widths, ascending, the last M + 1: the narrowest that holds the longest draft runs.
    rows: at least so many query rows per pass (TPU lowers a single row badly).
    logprobs: whether raw log-probabilities are wanted.
  """
  tokens_BT = jnp.concatenate([newest_B[:, None], draft.tokens_BM], axis=1)
  batch, full = tokens_BT.shape

  def at_width(width: int, carry: tuple[Scores, KVCache]) -> tuple[Scores, KVCache]:
    scores, cache = carry
    output = padded_pass(target, tokens_BT[:, :width], cache, rows)
    logits_BTV = output.logits_BRV[..., :num_tokens]
    scores = scores.replace(probs_BTV=scores.probs_BTV.at[:, :width].set(warp(logits_BTV, sampling)))
    if logprobs:
      raw_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
      scores = scores.replace(logprobs_BTV=scores.logprobs_BTV.at[:, :width].set(raw_BTV))
    return scores, output.cache

  zeros_BTV = jnp.zeros((batch, full, num_tokens), jnp.float32)
  chosen = jnp.searchsorted(jnp.asarray(widths), jnp.max(draft.count_B) + 1)
  carry = Scores(zeros_BTV, zeros_BTV if logprobs else None, chosen), cache
  if len(widths) == 1:
    return at_width(full, carry)
  for index, width in enumerate(widths):
    carry = run_if(chosen == index, functools.partial(at_width, width), carry)
  return carry
