"""Rows of a batch: each lives alone, whatever its neighbours accept, and rests once it has ended."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.accept import RULES
from specdec.commit import Limits, Reason, commit, write_tokens
from specdec.draft import Draft
from specdec.drafters import Empty, Lookup
from specdec.engine import Engine, Params, Request, Result, step_once, to_result
from specdec.rng import row_keys
from specdec.state import DecodeState
from specdec.warp import Sampling, keep_top_p, warp
from tests.toys import (
  GREEDY,
  PROMPTS,
  SAMPLED,
  VOCAB,
  assert_same_live_slots,
  checked,
  decode,
  draft,
  engine,
  fresh_cache,
  greedy_text,
  model_engine,
  plain_greedy,
  request,
  target,
)

RAGGED = ((40, 41, 42), tuple(range(9)), (63,))
KINDS = pytest.mark.parametrize('sampling', [GREEDY, SAMPLED], ids=['greedy', 'sampled'])


def pair() -> tuple[Engine, Params]:
  return model_engine(4), Params(target(), draft())


def steps(req: Request, count: int = 1000) -> DecodeState:
  """The state after some steps of the target with its draft."""
  eng, params = pair()
  state = eng.start(params, req)
  while count and bool(jnp.any(state.live_B)):
    state, count = step_once(eng, params, state), count - 1
  return state


def alone(req: Request, row: int) -> Request:
  return Request(**(vars(req) | {'prompts': req.prompts[row:row + 1], 'seeds': req.seeds[row:row + 1]}))


def solo_texts(req: Request) -> list[list[int]]:
  return [checked(to_result(steps(alone(req, row)))).tokens[0] for row in range(len(req.prompts))]


def row_of(state: DecodeState, row: int) -> DecodeState:
  """One row of everything that has rows."""
  batch = state.length_B.shape[0]
  return jax.device_get(jax.tree.map(lambda x: x[row:row + 1] if x.shape[:1] == (batch,) else x, state))


@KINDS
@pytest.mark.parametrize('rounds', [0, 5])
def test_ragged_prompts_equal_solo_runs(rounds, sampling):
  """Fault 20: prompts of 3, 9 and 1 tokens, right after the prompts and after 5 rounds of different acceptance."""
  req = request(60, sampling, RAGGED)
  together = steps(req, rounds)
  lengths = np.asarray(together.length_B) - np.array([3, 9, 1])
  assert (lengths == 0).all() if rounds == 0 else len(set(lengths.tolist())) > 1
  for row in range(3):
    solo, mine = steps(alone(req, row), rounds), row_of(together, row)
    np.testing.assert_array_equal(mine.length_B, solo.length_B)
    np.testing.assert_array_equal(mine.tokens_BL, solo.tokens_BL)
    assert_same_live_slots(mine.cache, solo.cache)
    assert_same_live_slots(mine.draft_state.cache, solo.draft_state.cache)


@KINDS
def test_text_does_not_depend_on_neighbours_or_order(sampling):
  """Alone, in a batch, in another order; `rejection`."""
  req = request(30, sampling)
  texts = decode(*pair(), req)[0].tokens
  assert solo_texts(req) == texts
  order = [2, 0, 1]
  turned = request(30, sampling, [req.prompts[i] for i in order], [req.seeds[i] for i in order])
  assert decode(*pair(), turned)[0].tokens == [texts[i] for i in order]


def coupled(drafter, gamma: int, req: Request) -> Result:
  return decode(engine(drafter, gamma, 'coupled'), Params(target()), req)[0]


@KINDS
def test_coupled_text_depends_on_the_seed_alone(sampling):
  """Alone, in a batch, in another order, with and without a draft."""
  req, drafter = request(30, sampling), Lookup(1, 1, partial=True)
  result = coupled(drafter, 4, req)
  assert result.total.drafted > 0
  assert result.tokens == coupled(Empty(), 0, req).tokens
  assert [coupled(drafter, 4, alone(req, row)).tokens[0] for row in range(3)] == result.tokens
  turned = request(30, sampling, req.prompts[::-1], req.seeds[::-1])
  assert coupled(drafter, 4, turned).tokens == result.tokens[::-1]
  if sampling is GREEDY:
    assert result.tokens == [text[:30] for text in greedy_text()]


def test_same_prompts_with_other_seeds_differ():
  result, _ = decode(*pair(), request(30, SAMPLED, [[5]] * 3, [1, 2, 1]))
  assert result.tokens[0] == result.tokens[2] != result.tokens[1]


def test_ended_rows_rest():
  """Fault 18: row 0 ends after 2 tokens, the others after 40, and from then on nothing of row 0 changes."""
  others = [text[:40] for text in greedy_text()[1:]]
  short = plain_greedy(target(), [(token,) for token in range(VOCAB)], 2)
  token = next(token for token, (first, second) in enumerate(short) if second not in (first, *others[0], *others[1]))
  prompts, eos = [(token,), *PROMPTS[1:]], short[token][1]
  req = request(40, prompts=prompts, eos_ids=[eos])
  eng, params = pair()
  frozen, rounds = None, 0
  for state in eng.stream(params, req):
    if frozen is not None:
      for before, now in zip(jax.tree.leaves(frozen), jax.tree.leaves(row_of(resting(state), 0)), strict=True):
        np.testing.assert_array_equal(now, before)
      rounds += 1
    elif state.reason_B[0]:
      frozen = row_of(resting(state), 0)
  assert rounds > 5
  result = to_result(state)
  assert result.reasons == [Reason.EOS, Reason.MAX_TOKENS, Reason.MAX_TOKENS]
  assert result.tokens == [short[token], *others] == solo_texts(req)


def resting(state: DecodeState) -> DecodeState:
  """The state with what lies past the committed lengths blanked: those slots may hold anything."""
  blank = lambda x, length_B: jnp.where(jnp.arange(x.shape[2])[:, None] < length_B[:, None, None, None], x, 0)
  shown = lambda cache: cache.replace(
      k=tuple(blank(k, cache.length_B) for k in cache.k), v=tuple(blank(v, cache.length_B) for v in cache.v),
      position_BS=blank(cache.position_BS[:, None, :, None], cache.length_B)[:, 0, :, 0])
  return state.replace(
      cache=shown(state.cache), row_key_B=jax.random.key_data(state.row_key_B),
      draft_state=state.draft_state.replace(cache=shown(state.draft_state.cache)))


@jax.jit
def poisoned(state: DecodeState) -> DecodeState:
  """Rubbish in every slot that is not committed."""
  def spoil(cache):
    dead_BS = jnp.arange(cache.capacity) >= cache.length_B[:, None]
    rubbish = lambda x: jnp.where(dead_BS[:, None, :, None], 1e4, x)
    return cache.replace(k=tuple(map(rubbish, cache.k)), v=tuple(map(rubbish, cache.v)),
                         position_BS=jnp.where(dead_BS, 10_000, cache.position_BS))
  return state.replace(
      cache=spoil(state.cache), draft_state=state.draft_state.replace(cache=spoil(state.draft_state.cache)))


def test_what_is_rolled_back_is_never_seen():
  """Fault 12: poison beyond the lengths changes no token and no acceptance, and rollback no shape."""
  eng, params = pair()
  clean, _ = decode(eng, params, request(64))
  state = poisoned(eng.start(params, request(64)))
  shapes = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
  while bool(jnp.any(state.live_B)):
    state = poisoned(step_once(eng, params, state))
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state) == shapes
  result = to_result(state)
  assert result.tokens == greedy_text()
  assert result.metrics == clean.metrics


def test_both_caches_follow_the_text():
  """Fault 9: before each draft the target's cache lacks the newest token, the draft's the two newest."""
  for state in pair()[0].stream(pair()[1], request(30)):
    live_B, length_B = np.asarray(state.live_B), np.asarray(state.length_B)
    np.testing.assert_array_equal(state.cache.length_B, length_B - 1)
    np.testing.assert_array_equal(state.draft_state.cache.length_B[live_B], np.maximum(length_B - 2, 0)[live_B])


def test_verify_reads_positions_from_the_cache_length():
  """Fault 6: a step's tokens stand at consecutive positions from the committed length on."""
  before = None
  for state in pair()[0].stream(pair()[1], request(30)):
    positions_BS = np.asarray(state.cache.position_BS)
    if before is not None:
      for row in np.flatnonzero(before.live):
        start, end = before.length[row], int(state.cache.length_B[row])
        np.testing.assert_array_equal(positions_BS[row, start:end], np.arange(start, end))
    before = np.rec.fromarrays([state.live_B, state.cache.length_B], names='live, length')


def one_hot(tokens: Sequence[Sequence[int]], vocab: int = 10) -> jax.Array:
  return jax.nn.one_hot(jnp.asarray(tokens), vocab)


@pytest.mark.parametrize('rule', RULES.values(), ids=list(RULES))
def test_rows_that_refuse_at_different_places(rule):
  """Fault 19: row 0 keeps 4 and corrects 5 to 7; row 1 corrects its first token to 8."""
  drafted = Draft(jnp.asarray([[4, 5], [6, 5]]), None, jnp.asarray([2, 2]))
  length_B, zeros_B = jnp.asarray([3, 1]), jnp.zeros(2, jnp.int32)
  verdict = rule(row_keys(jnp.arange(2, dtype=jnp.uint32)), length_B, drafted, one_hot([[4, 7, 9], [8, 9, 9]]))
  limits = Limits(jnp.full(4, -1), jnp.zeros((1, 1), jnp.int32), jnp.asarray([9, 9]), jnp.zeros(2, bool))
  added = commit(drafted, verdict, jnp.full(2, 3), limits, length_B, zeros_B, zeros_B)
  np.testing.assert_array_equal(added.count_B, [2, 1])
  text_BL = write_tokens(jnp.zeros((2, 6), jnp.int32), added.tokens_BT, length_B, added.count_B)
  np.testing.assert_array_equal(text_BL, [[0, 0, 0, 4, 7, 0], [0, 8, 0, 0, 0, 0]])


def test_top_p_of_a_block_is_row_by_row():
  """Fault 19: [batch, position, vocabulary] as each law by itself."""
  logits_BTV = np.random.default_rng(0).standard_normal((2, 3, 10)).astype(np.float32)
  sampling = Sampling.create(1.0, 7, 0.6)
  rows = [[warp(logits, sampling) for logits in row] for row in logits_BTV]
  np.testing.assert_allclose(warp(logits_BTV, sampling), rows, atol=1e-7)
  law = jnp.asarray([0.4, 0.3, 0.2, 0.1])
  np.testing.assert_allclose(keep_top_p(law, jnp.float32(0.65)), [4 / 7, 3 / 7, 0, 0], atol=1e-6)


def test_draft_cache_equals_fresh_prefill_of_each_row():
  """All but the two newest tokens are in it, whatever each row accepted."""
  state = steps(request(60, SAMPLED, RAGGED), 8)
  expected = fresh_cache(draft(), state.tokens_BL, state.length_B - 2, state.tokens_BL.shape[1])
  assert_same_live_slots(state.draft_state.cache, expected)
