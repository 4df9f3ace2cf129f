"""Where a row ends and why: EOS, stop strings, budgets, capacity, broken logits."""

import dataclasses

import jax
import numpy as np
import pytest

from models.table import TableModel
from specdec.accept import RULES
from specdec.commit import Origin, Reason
from specdec.drafters import Empty, Lookup, Model, Simulated
from specdec.engine import Params, Result
from specdec.state import DecodeState
from specdec.stops import stop_table
from tests.toys import CONFIG, VOCAB, decode, engine, plain_greedy, random_toy, recorded, request

GAMMA, LONG = 5, 30
SUCCESSOR = (np.arange(VOCAB) * 5 + 3) % VOCAB  # one cycle through all tokens
PROMPTS = ((1,), (20, 2), (10, 11, 30))
PIECES = [f'{token:02d}'.encode() for token in range(VOCAB)]  # two letters a token
NEVER = ('####',)


def table(favour: float = 0.5) -> TableModel:
  law = np.full((VOCAB, VOCAB), (1 - favour) / VOCAB)
  law[np.arange(VOCAB), SUCCESSOR] += favour
  return TableModel.create(law)


def text(prompt: tuple[int, ...], count: int = LONG) -> list[int]:
  """Greedy text after the prompt: no token twice in `VOCAB` tokens."""
  tokens = [prompt[-1]]
  for _ in range(count):
    tokens.append(int(SUCCESSOR[tokens[-1]]))
  return tokens[1:]


TEXTS = [text(prompt) for prompt in PROMPTS]


def end(*, eos: int | None = None, stop: bytes | None = None, target: TableModel | None = None,
        drafter: str = 'self') -> tuple[Result, DecodeState]:
  """One engine for all cases: its own draft, so all that is drafted is accepted."""
  stops = NEVER if stop is None else (stop.decode(),)
  req = request(LONG, prompts=PROMPTS, eos_ids=[] if eos is None else [eos], stop_table=stop_table(stops, PIECES))
  kinds = {'self': (Model(VOCAB), GAMMA, table()), 'none': (Empty(), 0, None)}
  kind, gamma, draft = kinds[drafter]
  return decode(engine(kind, gamma, logprobs=True), Params(target or table(), draft), req)


@pytest.mark.parametrize('place', [1, 3, 5, 6, 7], ids=['first', 'middle', 'last', 'bonus', 'next round'])
def test_ends_at_the_first_eos(place):
  """Faults 16 and 63: as drafted token 1, 3 or γ, or as the bonus; what stands behind it neither shows nor counts."""
  eos = TEXTS[0][place - 1]
  result, state = end(eos=eos)
  expected = [tokens[:tokens.index(eos) + 1] if eos in tokens else tokens for tokens in TEXTS]
  assert result.tokens == expected
  assert result.reasons == [Reason.EOS if eos in tokens else Reason.MAX_TOKENS for tokens in TEXTS]
  for row, (prompt, tokens) in enumerate(zip(PROMPTS, expected, strict=True)):
    assert int(state.length_B[row]) == len(prompt) + len(tokens)
    assert len(result.logprobs[row]) == len(tokens)
    for buffer in (state.tokens_BL, state.origin_BL, state.logprob_BL):
      assert not np.any(buffer[row, len(prompt) + len(tokens):])
  first = result.metrics[0]
  assert (first.passes, first.emitted, first.accepted) == (1 + (place > 6), place, min(place, GAMMA) + (place > 6))
  assert first.tested == first.accepted
  assert first.tokens_per_pass <= GAMMA + 1


@pytest.mark.parametrize(('place', 'letters'), [(2, 4), (6, 4), (7, 4), (7, 3), (8, 4)])
def test_stop_string(place, letters):
  """Fault 17: a string over tokens of one round (2, 6, 8) or of two (7), even one that begins amid a token."""
  stop = b''.join(PIECES[token] for token in TEXTS[1][:place])[-letters:]
  result, state = end(stop=stop)
  assert result.tokens[1] == TEXTS[1][:place]
  assert result.reasons[1] == Reason.STOP
  assert len(result.logprobs[1]) == len(result.origins[1]) == result.metrics[1].emitted == place
  assert not np.any(state.tokens_BL[1, len(PROMPTS[1]) + place:])
  for tokens, full in zip(result.tokens, TEXTS, strict=True):
    assert tokens == full[:len(tokens)]
    assert (stop in b''.join(PIECES[token] for token in full)) == (len(tokens) < LONG)


def test_stop_string_of_the_prompt_does_not_count():
  """A stop string must be completed by the output; what the prompt ends with is not part of it."""
  stop = PIECES[PROMPTS[0][-1]] + PIECES[TEXTS[0][0]]
  assert stop not in b''.join(PIECES[token] for token in TEXTS[0])
  result, _ = end(stop=stop)
  assert result.tokens[0] == TEXTS[0]


def broken(value: float, *after: int) -> TableModel:
  """The table, broken in the laws that follow these tokens."""
  model = table()
  return model.replace(weights=model.weights.at[np.array(after)].set(value))


@pytest.mark.parametrize('drafter', ['none', 'self'])
@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_broken_logits_end_their_row(drafter, value):
  """Fault 24: the law after the third token of row 0 is broken. The row says so; the others do not notice."""
  result, state = end(target=broken(value, TEXTS[0][2]), drafter=drafter)
  assert result.reasons == [Reason.ERROR, Reason.MAX_TOKENS, Reason.MAX_TOKENS]
  assert result.tokens == [TEXTS[0][:3], *TEXTS[1:]]
  assert not np.any(np.isnan(state.logprob_BL))
  assert all(np.isfinite(metrics.overlap_sum) for metrics in result.metrics)


@pytest.mark.parametrize('drafter', ['none', 'self'])
def test_a_text_that_ends_before_a_broken_law_does_not_meet_it(drafter):
  """Row 0 ends with its third token, an EOS, row 2 with its budget: what follows is not drawn from."""
  eos, last = TEXTS[0][2], TEXTS[2][-1]
  result, _ = end(eos=eos, target=broken(np.nan, eos, last), drafter=drafter)
  assert result.tokens == [TEXTS[0][:3], *TEXTS[1:]]
  assert result.reasons == [Reason.EOS, Reason.MAX_TOKENS, Reason.MAX_TOKENS]


UNSAID = min(set(range(VOCAB)).difference(*PROMPTS, *TEXTS))
REPEATING = (  # lookup copies the text of row 0 and, behind its broken law, a 0; in the other rows what is refused
    (*PROMPTS[0], *TEXTS[0][:3], 0, *PROMPTS[0]),
    *((prompt[-1], UNSAID, 0, *prompt) for prompt in PROMPTS[1:]))
BROKEN_DRAFTS = {
    'self': (Model(VOCAB), lambda target: target),
    'lookup': (Lookup(1, 1, partial=True), lambda target: None),
    'simulated': (Simulated(1.0), lambda target: recorded(
        [[*TEXTS[0][:3], 0], *[[UNSAID, 0] * (LONG // 2)] * 2], REPEATING))}


QUICK = {('self', 'rejection'), ('simulated', 'multiround'), *(('lookup', rule) for rule in RULES)}


@pytest.mark.parametrize(('name', 'rule'), [
    pytest.param(name, rule, marks=[pytest.mark.slow] * ((name, rule) not in QUICK))
    for name in BROKEN_DRAFTS for rule in RULES])
def test_broken_laws_end_a_row_where_they_end_plain_decoding(name, rule):
  """Fault 24: what stands before a broken law is kept, and one behind a refused token is of no account.

  The token behind the broken law is 0, which is also what the largest of nothing but NaN would be.
  """
  model = broken(np.nan, TEXTS[0][2], UNSAID)
  req = request(LONG, prompts=REPEATING, stop_table=stop_table(NEVER, PIECES))
  drafter, draft_of = BROKEN_DRAFTS[name]
  if drafter.draws and not RULES[rule].laws:
    pytest.skip('this rule refuses drawn tokens')
  plain, _ = decode(engine(Empty(), 0, rule, logprobs=True), Params(model), req)
  result, _ = decode(engine(drafter, GAMMA, rule, logprobs=True), Params(model, draft_of(model)), req)
  assert result.tokens == plain.tokens == [TEXTS[0][:3], *TEXTS[1:]]
  assert result.reasons == plain.reasons == [Reason.ERROR, Reason.MAX_TOKENS, Reason.MAX_TOKENS]
  assert result.metrics[0].accepted == 3
  if name != 'self':
    assert all(metrics.drafted > metrics.accepted for metrics in result.metrics[1:])


def test_broken_draft_costs_speed_only():
  """A drafted token whose law is NaN is refused; text and counts stay sound."""
  req = request(LONG, prompts=PROMPTS, stop_table=stop_table(NEVER, PIECES))
  eng = engine(Model(VOCAB), GAMMA, logprobs=True)
  result, _ = decode(eng, Params(table(), broken(np.nan, TEXTS[0][2])), req)
  assert result.tokens == TEXTS
  assert result.metrics[0].accepted < result.metrics[1].accepted


def test_every_round_makes_progress():
  """Every live row gains a token a round: no run needs more rounds than tokens."""
  result, _ = end()
  assert all(metrics.passes <= metrics.emitted for metrics in result.metrics)
  assert result.total.passes == 3 * LONG // (GAMMA + 1)


def test_ends_at_capacity():
  """Fault 31: prompt 56 of capacity 64 and γ = 16: ends at capacity, says so, and all tokens are right."""
  prompts = [text((1,), 56), text((2,), 30), text((3,), 63)]
  eng = engine(Simulated(1.0), 16, capacity=64)
  rows = recorded([text(tuple(prompt), 40) for prompt in prompts], prompts, eng.slots)
  result, state = decode(eng, Params(table(), rows), request(40, prompts=prompts))
  assert result.tokens == [text(tuple(prompt), 64 - len(prompt)) for prompt in prompts]
  assert result.reasons == [Reason.LENGTH] * 3
  np.testing.assert_array_equal(state.length_B, [64] * 3)
  exact, _ = decode(eng, Params(table(), rows), request(8, prompts=prompts))
  assert exact.reasons == [Reason.MAX_TOKENS, Reason.MAX_TOKENS, Reason.LENGTH]


def test_verify_never_writes_over_what_is_committed():
  """Fault 14: slots exactly as tight as they are allotted, rows at the very end while another goes on."""
  model = random_toy(dataclasses.replace(CONFIG, attention_block=48))
  eng, params = engine(Model(VOCAB), 7, capacity=120), Params(model, table())
  assert eng.slots == 128
  prompts = [np.random.default_rng(size).integers(0, VOCAB, size).tolist() for size in (118, 60, 119)]
  before = jax.device_get(eng.start(params, request(60, prompts=prompts)).cache)
  result, state = decode(eng, params, request(60, prompts=prompts))
  assert result.reasons == [Reason.LENGTH, Reason.MAX_TOKENS, Reason.LENGTH]
  assert [len(tokens) for tokens in result.tokens] == [2, 60, 1]
  assert result.tokens[1] == plain_greedy(model, prompts[1:2], 60)[0]
  after = jax.device_get(state.cache)
  for row, length in ((0, 117), (2, 118)):
    for old, new in zip(before.k + before.v, after.k + after.v, strict=True):
      np.testing.assert_array_equal(old[row, :, :length], new[row, :, :length])


def test_worked_example():
  """Fault 64: rounds that keep 4, 0, 2, 4 and 1 of 4 drafted tokens, made by spoiling a recording where each ends."""
  rounds, at = (4, 0, 2, 4, 1), 0
  spoiled = [list(tokens) for tokens in TEXTS]
  for kept in rounds:
    for tokens in spoiled:
      if kept < 4:
        tokens[at + kept] = int(SUCCESSOR[tokens[at + kept]])
    at += kept + 1
  req = request(LONG, prompts=PROMPTS, eos_ids=[TEXTS[0][at - 1]])
  result, _ = decode(engine(Simulated(1.0), 4), Params(table(), recorded(spoiled, PROMPTS)), req)
  metrics = result.metrics[0]
  assert result.tokens[0] == TEXTS[0][:at]
  assert (metrics.passes, metrics.emitted, metrics.drafted, metrics.accepted, metrics.tested) == (5, 16, 20, 11, 14)
  assert metrics.overlap == metrics.alpha == 11 / 14
  origins = [result.origins[0].count(origin) for origin in (Origin.ACCEPTED, Origin.CORRECTED, Origin.BONUS)]
  assert origins == [11, 3, 2]
