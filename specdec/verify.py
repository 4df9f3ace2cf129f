"""One wide target pass over the newest token and the draft: the laws that the accept rule needs."""

from collections.abc import Sequence

from flax import struct
import jax
from jax import Array
import jax.numpy as jnp

from models.kv_cache import KVCache
from models.protocol import LanguageModel
from specdec.draft import Draft
from specdec.warp import Sampling, warp


@struct.dataclass
class Scores:
  """What the target says about the T = M + 1 positions of a step.

  Attributes:
    probs_BTV: laws after `warp`; those past a row's drafted count are not used.
    logprobs_BTV: log-softmax of the raw logits; None unless asked for.
  """

  probs_BTV: Array
  logprobs_BTV: Array | None


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
  full = tokens_BT.shape[1]

  def at_width(width: int):
    def run(cache):
      padded = max(width, rows)
      padded_BT = jnp.pad(tokens_BT[:, :width], ((0, 0), (0, padded - width)))
      position_BT = cache.length_B[:, None] + jnp.arange(padded)
      batch = tokens_BT.shape[0]
      rows_BR = None if padded == width else jnp.broadcast_to(jnp.arange(width), (batch, width))
      output = target(padded_BT, position_BT, cache.causal_mask(padded), cache, rows_BR)
      logits_BTV = output.logits_BRV[..., :num_tokens]
      fill = lambda x: jnp.pad(x, ((0, 0), (0, full - width), (0, 0)))
      raw_BTV = fill(jax.nn.log_softmax(logits_BTV, axis=-1)) if logprobs else None
      return Scores(fill(warp(logits_BTV, sampling)), raw_BTV), output.cache
    return run

  if len(widths) == 1:
    return at_width(full)(cache)
  needed = jnp.max(draft.count_B) + 1
  index = jnp.searchsorted(jnp.asarray(widths), needed)
  return jax.lax.switch(index, [at_width(width) for width in widths], cache)
