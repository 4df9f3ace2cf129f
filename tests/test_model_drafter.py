"""A language model as the draft: what its cache holds, and that it keeps up."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from flax import struct
from jax import Array
import jax.numpy as jnp
import numpy as np
import pytest

from models.table import TableModel
from specdec import rng
from specdec.commit import Reason
from specdec.draft import Draft
from specdec.drafters import Model, ReducedModel
from specdec.drafters.protocol import Context
from specdec.engine import Params, step_once
from specdec.features import Reads
from tests.toys import (
  CAPACITY,
  GREEDY,
  PROMPTS,
  SAMPLED,
  SLOTS,
  VOCAB,
  assert_same_live_slots,
  decode,
  draft,
  engine,
  fresh_cache,
  greedy_text,
  model_engine,
  request,
  target,
)


def test_a_model_is_its_own_perfect_draft():
  """Fault 9: greedy, γ = 4, 100 rounds: everything is accepted and every round gives 5 tokens."""
  result, state = decode(model_engine(4), Params(target(), target()), request(500))
  for metrics in result.metrics:
    assert (metrics.passes, metrics.emitted, metrics.drafted, metrics.accepted) == (100, 500, 400, 400)
  assert_same_live_slots(
      state.draft_state.cache, fresh_cache(target(), state.tokens_BL, state.draft_state.cache.length_B, SLOTS))


def test_a_model_is_its_own_perfect_draft_when_sampled():
  """Laws from wide and narrow passes differ by rounding only."""
  result, _ = decode(model_engine(4), Params(target(), target()), request(500, SAMPLED))
  assert result.total.alpha > 0.999
  assert result.total.overlap == pytest.approx(1, abs=1e-4)


def test_draft_cache_after_every_round():
  """Fault 10: over 200 rounds it equals a fresh prefill of the same tokens, and acceptance does not decay."""
  eng, params = model_engine(4), Params(target(), draft())
  state = eng.start(params, request(580, SAMPLED))
  accepted = [np.zeros(3)]
  for rounds in range(200):
    state = step_once(eng, params, state)
    accepted.append(np.asarray(state.counters.accepted_B))
    if rounds < 20 or rounds % 20 == 19:
      cache = state.draft_state.cache
      np.testing.assert_array_equal(cache.length_B, np.maximum(state.length_B - 2, 0))
      assert_same_live_slots(cache, fresh_cache(draft(), state.tokens_BL, cache.length_B, SLOTS))
  assert np.all(state.live_B), 'more room is needed for 200 rounds'
  kept = np.diff(accepted, axis=0)
  first, last = kept[:50].ravel(), kept[-50:].ravel()
  sigma = np.sqrt(first.var() / first.size + last.var() / last.size)
  assert last.mean() > first.mean() - 3 * sigma > 0


@struct.dataclass
class ScheduledState:
  inner: Any
  rounds: Array


@dataclasses.dataclass(frozen=True)
class Scheduled:
  """Another drafter, asked for another count in each round; row b plays the schedule from its entry b."""

  inner: Model
  schedule: tuple[int, ...]

  name, reads = 'scheduled', Reads.NOTHING
  is_tree, draws = False, True

  def levels(self, gamma: int) -> int:
    return gamma

  def init(self, params: Any, *arguments: Any) -> ScheduledState:
    return ScheduledState(self.inner.init(params, *arguments), jnp.int32(0))

  def propose(self, params: Any, state: ScheduledState, context: Context, gamma: int) -> tuple[Draft, ScheduledState]:
    row_B = jnp.arange(context.length_B.shape[0])
    wanted_B = jnp.asarray(self.schedule)[(state.rounds + row_B) % len(self.schedule)]
    context = context.replace(gamma_B=jnp.minimum(context.gamma_B, wanted_B))
    drafted, inner = self.inner.propose(params, state.inner, context, gamma)
    return drafted, ScheduledState(inner, state.rounds + 1)

  def observe(self, state: ScheduledState, *arguments: Any) -> ScheduledState:
    return state.replace(inner=self.inner.observe(state.inner, *arguments))


SCHEDULED = Scheduled(Model(VOCAB), (3, 0, 3) + (0,) * 12)


def test_rounds_without_a_draft():
  """Fault 15: rows that draft 3 or nothing, each in other rounds; gaps longer than one chunk of catching up."""
  result, state = decode(engine(SCHEDULED, 3), Params(target(), target()), request(64))
  assert result.tokens == greedy_text()
  for metrics in result.metrics:
    assert metrics.accepted == metrics.drafted >= 3 * 2 * 3
    assert metrics.passes_by_width[0] > metrics.passes_by_width[1] > 0
  cache = state.draft_state.inner.cache
  assert_same_live_slots(cache, fresh_cache(target(), state.tokens_BL, cache.length_B, SLOTS))


def test_draft_cache_of_a_row_that_ended_without_a_draft():
  """Fault 18: row 0 fills its capacity in rounds that draft nothing, and later drafts of the others leave it alone."""
  prompts = [np.random.default_rng(0).integers(0, VOCAB, CAPACITY - 12).tolist(), *PROMPTS[1:]]
  result, state = decode(engine(SCHEDULED, 3), Params(target(), target()), request(64, prompts=prompts))
  cache = state.draft_state.inner.cache
  assert result.reasons[0] == Reason.LENGTH
  assert result.metrics[1].passes > result.metrics[0].passes + 15, 'the others must draft on'
  assert cache.length_B[0] < CAPACITY - 2
  assert_same_live_slots(cache, fresh_cache(target(), state.tokens_BL, cache.length_B, SLOTS))


def test_text_outgrows_the_context_of_the_draft():
  """Fault 30: target 64 positions, draft 32: drafting stops there, plain decoding goes on, text stays right."""
  law = np.random.default_rng(1).dirichlet(np.full(VOCAB, 0.1), VOCAB)
  short = TableModel.create(law).replace(max_positions=32)
  prompts = [range(28), range(1), range(40)]
  params = Params(TableModel.create(law), short)
  result, _ = decode(engine(Model(VOCAB), 3), params, request(30, prompts=prompts))
  for prompt, tokens in zip(prompts, result.tokens, strict=True):
    text = [prompt[-1]]
    for _ in range(30):
      text.append(int(law[text[-1]].argmax()))
    assert tokens == text[1:]
  assert [metrics.drafted for metrics in result.metrics] == [4, 22, 0]  # lengths 28, 32; 1, 5, ... 29; none
  assert [metrics.accepted for metrics in result.metrics] == [4, 22, 0]


def reduced(model, ids: Sequence[int]) -> ReducedModel:
  ids_U = jnp.asarray(ids, jnp.int32)
  return ReducedModel(model.with_head(model.lm_head[ids_U]), ids_U)


@pytest.mark.slow
def test_all_tokens_as_a_reduced_vocabulary_change_nothing():
  """Nor does the way through the ids: same draws, same verdicts."""
  whole_text, _ = decode(model_engine(4), Params(target(), draft()), request(100, SAMPLED))
  same, _ = decode(model_engine(4), Params(target(), reduced(draft(), range(VOCAB))), request(100, SAMPLED))
  assert same.tokens == whole_text.tokens and same.metrics == whole_text.metrics


@pytest.mark.parametrize('sampling', [GREEDY, SAMPLED])
def test_tokens_that_are_not_drafted(sampling):
  """The law has nothing outside of the ids, and greedy text is that of the target all the same."""
  ids = range(1, VOCAB, 2)
  result, state = decode(model_engine(4), Params(target(), reduced(target(), ids)), request(100, sampling))
  drafted, _ = Model(VOCAB).propose(
      reduced(target(), ids), state.draft_state, context(state, sampling), 4)
  outside = np.setdiff1d(np.arange(VOCAB), ids)
  assert np.isin(drafted.tokens_BM, ids).all() and not np.asarray(drafted.probs_BMV)[..., outside].any()
  np.testing.assert_allclose(drafted.probs_BMV.sum(-1), 1, atol=1e-5)
  assert 0 < result.total.alpha < 1
  if sampling is GREEDY:
    assert result.tokens == greedy_text(100)


def context(state, sampling) -> Context:
  live_B = jnp.ones_like(state.live_B)
  return Context(tokens_BL=state.tokens_BL, length_B=state.length_B, gamma_B=jnp.full_like(state.length_B, 4),
                 live_B=live_B, row_key_B=state.row_key_B, sampling=sampling, purpose=rng.Purpose.DRAFT)
