"""What a verdict adds to the text: cut at EOS, stop string and budget in one place."""

import enum

from flax import struct
from jax import Array
import jax.numpy as jnp

from specdec.draft import Draft, Verdict


class Reason(enum.IntEnum):
  """Why a row ended."""

  LIVE = 0
  EOS = 1
  STOP = 2  # a stop string was completed
  MAX_TOKENS = 3
  LENGTH = 4  # the capacity of the row is used up
  ERROR = 5  # the logits of the next token were NaN or infinite


class Origin(enum.IntEnum):
  """Where an emitted token came from."""

  PROMPT = 0
  PLAIN = 1  # a step that drafted nothing
  ACCEPTED = 2
  CORRECTED = 3
  BONUS = 4


@struct.dataclass
class Limits:
  """What ends a row; values, so that changing them compiles nothing.

  Attributes:
    eos_E: token ids, padded with -1.
    stop_ZV: the automaton of `specdec.stops`.
    max_length_B: prompt plus output, at most the capacity.
    by_capacity_B: whether that is the capacity rather than the request.
  """

  eos_E: Array
  stop_ZV: Array
  max_length_B: Array
  by_capacity_B: Array


@struct.dataclass
class Commit:
  """The tokens that a step adds, [B, T], of which the first `count_B` count.

  Attributes:
    tokens_BT, origin_BT: ids and `Origin`s.
    count_B: emitted tokens; 0 in ended rows.
    reason_B: `Reason` after the step.
    stop_state_B: automaton state after the last emitted token.
  """

  tokens_BT: Array
  origin_BT: Array
  count_B: Array
  reason_B: Array
  stop_state_B: Array


def commit(draft: Draft, verdict: Verdict, num_finite_B: Array, limits: Limits, length_B: Array, reason_B: Array,
           stop_state_B: Array) -> Commit:
  """Turns a verdict into emitted tokens.

  `num_finite_B` counts the target's laws before the first that is not finite. What a rule makes of that law means
  nothing: the tokens before it are kept, and the row ends where it would draw from it.
  """
  num_accepted_B = jnp.minimum(verdict.num_accepted_B, num_finite_B)
  broken_B = num_accepted_B == num_finite_B
  num_B1 = num_accepted_B[:, None]
  index_T = jnp.arange(draft.width + 1)
  padded_BT = jnp.pad(draft.tokens_BM, ((0, 0), (0, 1)))
  tokens_BT = jnp.where(index_T == num_B1, verdict.next_token_B[:, None], padded_BT)
  live_B = reason_B == Reason.LIVE

  available_B = jnp.minimum(num_accepted_B + ~broken_B, limits.max_length_B - length_B)
  available_B = jnp.where(live_B, available_B, 0)
  is_eos_BT = jnp.any(tokens_BT[..., None] == limits.eos_E, axis=-1)
  state_BT = _stop_states(tokens_BT, limits.stop_ZV, stop_state_B)
  is_stop_BT = (state_BT == limits.stop_ZV.shape[0] - 1) & (limits.stop_ZV.shape[0] > 1)
  ends_BT = (is_eos_BT | is_stop_BT) & (index_T < available_B[:, None])
  ended_B = jnp.any(ends_BT, axis=1)
  last_B = jnp.argmax(ends_BT, axis=1)
  count_B = jnp.where(ended_B, last_B + 1, available_B)

  at_last = lambda x_BT: jnp.take_along_axis(x_BT, jnp.maximum(count_B - 1, 0)[:, None], axis=1)[:, 0]
  full_B = length_B + count_B >= limits.max_length_B
  limit_B = jnp.where(limits.by_capacity_B, Reason.LENGTH, Reason.MAX_TOKENS)
  after_B = jnp.where(full_B, limit_B, jnp.where(broken_B, Reason.ERROR, Reason.LIVE))
  after_B = jnp.where(ended_B, jnp.where(at_last(is_eos_BT), Reason.EOS, Reason.STOP), after_B)
  return Commit(
      tokens_BT=tokens_BT, origin_BT=_origins(draft, num_B1, index_T), count_B=count_B,
      reason_B=jnp.where(live_B, after_B, reason_B).astype(jnp.int32),
      stop_state_B=jnp.where(count_B > 0, at_last(state_BT), stop_state_B))


def _stop_states(tokens_BT: Array, stop_ZV: Array, state_B: Array) -> Array:
  """[B, T]: the automaton's state after each token."""
  if stop_ZV.shape[0] == 1:
    return jnp.zeros_like(tokens_BT)
  states = []
  for i in range(tokens_BT.shape[1]):
    state_B = stop_ZV[state_B, tokens_BT[:, i]]
    states.append(state_B)
  return jnp.stack(states, axis=1)


def _origins(draft: Draft, num_B1: Array, index_T: Array) -> Array:
  last_B1 = jnp.where(num_B1 < draft.count_B[:, None], Origin.CORRECTED, Origin.BONUS)
  last_B1 = jnp.where(draft.count_B[:, None] == 0, Origin.PLAIN, last_B1)
  return jnp.where(index_T < num_B1, Origin.ACCEPTED, last_B1).astype(jnp.int8)


def write_tokens(buffer_BL: Array, update_BT: Array, length_B: Array, count_B: Array) -> Array:
  """Writes the first `count` entries of each row at `length`; nothing else changes."""
  index_T = jnp.arange(update_BT.shape[1])
  slot_BT = jnp.where(index_T < count_B[:, None], length_B[:, None] + index_T, buffer_BL.shape[1])
  row_B1 = jnp.arange(buffer_BL.shape[0])[:, None]
  return buffer_BL.at[row_B1, slot_BT].set(update_BT.astype(buffer_BL.dtype), mode='drop')
