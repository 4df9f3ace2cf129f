"""The state of the loop."""

from typing import Any

from flax import struct
from jax import Array
import jax.numpy as jnp

from models.kv_cache import KVCache
from models.source import Source
from specdec.adaptive import AcceptanceEstimate
from specdec.commit import Commit, Limits, Reason, write_tokens
from specdec.metrics import Counters
from specdec.warp import Sampling


@struct.dataclass
class DecodeState:
  """Everything that a step changes, and the values that it reads. Donated to the loop.

  Invariants between steps: the target's cache holds all tokens but the newest (`cache.length_B` = `length_B` - 1);
  every live row gains at least one token per step, or ends; nothing of an ended row changes.

  Attributes:
    tokens_BL: prompt and output, then 0.
    length_B, prompt_length_B: committed tokens.
    reason_B: `Reason`.
    stop_state_B: state of the stop automaton.
    origin_BL: `Origin` of each token.
    logprob_BL: target log-probability (raw, before any filter) of each emitted token; None unless asked for.
    row_key_B: the rows' random keys.
    cache: of the target.
    draft_state: of the drafter.
    estimate: running acceptance; None unless γ adapts.
    counters: what the metrics come from.
    sampling, limits: values.
    source: what the encoder has read; None without one.
  """

  tokens_BL: Array
  length_B: Array
  prompt_length_B: Array
  reason_B: Array
  stop_state_B: Array
  origin_BL: Array
  logprob_BL: Array | None
  row_key_B: Array
  cache: KVCache
  draft_state: Any
  estimate: AcceptanceEstimate | None
  counters: Counters
  sampling: Sampling
  limits: Limits
  source: Source | None = None

  @property
  def live_B(self) -> Array:
    return self.reason_B == Reason.LIVE

  @property
  def newest_B(self) -> Array:
    return jnp.take_along_axis(self.tokens_BL, self.length_B[:, None] - 1, axis=1)[:, 0]

  def add(self, step: Commit, logprobs_BTV: Array | None) -> 'DecodeState':
    """The state with the step's tokens in the text."""
    write = lambda buffer, update: write_tokens(buffer, update, self.length_B, step.count_B)
    logprob_BL = self.logprob_BL
    if logprob_BL is not None:
      logprob_BL = write(logprob_BL, jnp.take_along_axis(logprobs_BTV, step.tokens_BT[..., None], axis=-1)[..., 0])
    return self.replace(
        tokens_BL=write(self.tokens_BL, step.tokens_BT), origin_BL=write(self.origin_BL, step.origin_BT),
        logprob_BL=logprob_BL, length_B=self.length_B + step.count_B, reason_B=step.reason_B,
        stop_state_B=step.stop_state_B)
