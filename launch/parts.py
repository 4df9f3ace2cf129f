"""The parts of a step, timed alone: target passes of each width, and the draft.

Each program runs its part several times in one device loop, so that what is timed is the part and not the call.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from models.kv_cache import KVCache
from models.protocol import LanguageModel
from specdec.draft import Draft
from specdec.drafters import Empty
from specdec.engine import Engine, context_of
from specdec.state import DecodeState
from specdec.verify import verify

REPEATS = 4  # passes per program


@functools.partial(jax.jit, static_argnames=('engine', 'width'))
def target_passes(engine: Engine, width: int, target: LanguageModel, state: DecodeState) -> tuple[Array, KVCache]:
  """`REPEATS` target passes of `width` tokens per row at the state's length, the filters of the law included."""
  count_B = jnp.full_like(state.length_B, width - 1)

  def one(_, carry):
    newest_B, cache = carry
    drafted_BM = jnp.broadcast_to(newest_B[:, None], (newest_B.shape[0], width - 1))
    scores, cache = verify(
        target, cache, newest_B, Draft(drafted_BM, None, count_B), state.sampling, num_tokens=engine.num_tokens,
        widths=(width,), rows=engine.rows, logprobs=engine.logprobs)
    return jnp.argmax(scores.probs_BTV[:, 0], axis=-1).astype(jnp.int32), cache

  return jax.lax.fori_loop(0, REPEATS, one, (state.newest_B, state.cache))


def pass_engine(engine: Engine) -> Engine:
  """The engine without what a target pass does not depend on, so that one program serves all drafters."""
  return dataclasses.replace(engine, drafter=Empty(), gamma=0, widths=(), adaptive=None)


@functools.partial(jax.jit, static_argnames=('engine',))
def drafts(engine: Engine, draft_params: Any, state: DecodeState) -> Any:
  """`REPEATS` drafts of γ tokens per row at the state's length."""
  context = context_of(engine, state)

  def one(_, draft_state):
    _, draft_state = engine.drafter.propose(draft_params, draft_state, context, engine.gamma)
    return engine.drafter.observe(draft_state, state.length_B)

  return jax.lax.fori_loop(0, REPEATS, one, state.draft_state)
