"""The parts of a step, alone: target passes of each width, and the draft.

Each program repeats its part in one device loop, so that what is timed is the part and not the call.
"""

import functools

import jax
from jax import Array
import jax.numpy as jnp

from models.protocol import LanguageModel
from specdec.draft import Draft, TreeDraft
from specdec.drafters.protocol import Stateless
from specdec.engine import Engine, Params, context_of, laid_out
from specdec.features import Reads, features_of
from specdec.padded import padded_pass
from specdec.state import DecodeState
from specdec.tree import TreeSpec
from specdec.verify import verify

PASSES = 4  # target passes per program
SHORT_DRAFTS = 256  # drafts per program without a model: so short that a few would not outweigh the call


class Parts:
  """The parts of an engine's step on one batch, to be timed again and again.

  Owns a copy of the state. As in the loop itself it is donated, so that no cache is copied, and comes back with
  nothing changed that a part depends on.
  """

  def __init__(self, engine: Engine, params: Params, state: DecodeState):
    self._engine, self._params, self._state = engine, params, copy_of(state)
    self.drafts_per_call = SHORT_DRAFTS if isinstance(engine.drafter, Stateless) else PASSES

  def target_passes(self, width: int) -> DecodeState:
    """`PASSES` target passes of `width` tokens per row, the filters of the law included."""
    self._state = target_passes(self._engine, width, self._params.target, self._state)
    return self._state

  def drafts(self) -> DecodeState:
    """`drafts_per_call` drafts of γ tokens per row."""
    self._state = drafts(self._engine, self.drafts_per_call, self._params, self._state)
    return self._state


def copy_of(state: DecodeState) -> DecodeState:
  """For a call that the state is donated to."""
  return jax.tree.map(lambda x: x.copy(), state)


@functools.partial(jax.jit, static_argnames=('engine', 'width', 'tree'), donate_argnames=('state',))
def target_passes(engine: Engine, width: int, target: LanguageModel, state: DecodeState,
                  tree: TreeSpec | None = None) -> DecodeState:
  """`PASSES` passes over a chain of `width` tokens per row, or over a tree of as many."""
  count_B = jnp.full_like(state.length_B, width - 1)

  def one(_, state):
    drafted_BM = jnp.broadcast_to(state.newest_B[:, None], (state.newest_B.shape[0], width - 1))
    draft = Draft(drafted_BM, None, count_B)
    if tree is not None:
      parents_BM = jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), drafted_BM.shape)
      draft = TreeDraft(drafted_BM, parents_BM, None, count_B, tree.levels, tree.branching)
    scores, cache = verify(
        target, state.cache, state.newest_B, draft, state.sampling,
        num_tokens=engine.num_tokens, widths=(width,), rows=engine.rows, logprobs=engine.logprobs, reads=Reads.NOTHING)
    never_B = jnp.sum(scores.probs_BTV[..., 0], axis=1) > width
    if engine.logprobs:
      never_B |= jnp.sum(scores.logprobs_BTV[..., 0], axis=1) > 0
    return _used(state.replace(cache=cache), never_B)

  return laid_out(jax.lax.fori_loop(0, PASSES, one, state))


@functools.partial(jax.jit, static_argnames=('engine', 'repeats'), donate_argnames=('state',))
def drafts(engine: Engine, repeats: int, params: Params, state: DecodeState) -> DecodeState:
  features_BEF = _no_features(engine, params.target, state)

  def one(_, state):
    context = context_of(engine, state)
    context = context.replace(gamma_B=jnp.full_like(context.gamma_B, engine.gamma))  # however few a row would want
    draft, draft_state = engine.drafter.propose(params.draft, state.draft_state, context, engine.gamma)
    never_B = jnp.sum(draft.tokens_BM, axis=1) + draft.count_B < 0
    laws = draft.laws_BRV if isinstance(draft, TreeDraft) else draft.probs_BMV
    if laws is not None:
      never_B |= jnp.sum(laws[..., 0], axis=1) > engine.gamma
    draft_state = engine.drafter.observe(draft_state, state.length_B, features_BEF)
    return _used(state.replace(draft_state=draft_state), never_B)

  return laid_out(jax.lax.fori_loop(0, repeats, one, state))


def _no_features(engine: Engine, target: LanguageModel, state: DecodeState) -> Array | None:
  """Zeros in the place of what a step hands to the drafter of the target."""
  reads, batch = engine.drafter.reads, state.newest_B.shape[0]
  if reads is Reads.NOTHING:
    return None
  one = lambda: features_of(padded_pass(target, jnp.zeros((batch, 1), jnp.int32), state.cache, 1), reads)
  shape = jax.eval_shape(one)
  return jnp.zeros((batch, engine.levels + 1, shape.shape[-1]), shape.dtype)


def _used(state: DecodeState, never_B: Array) -> DecodeState:
  """The state with a newest token that would be another one if `never_B` could hold.

  The compiler does not know that it cannot. So it leaves out nothing that `never_B` is made from, and does nothing
  once for all repeats.
  """
  row_B = jnp.arange(never_B.shape[0])
  tokens_BL = state.tokens_BL.at[row_B, state.length_B - 1].add(never_B.astype(jnp.int32))
  return laid_out(state.replace(tokens_BL=tokens_BL))
