"""The loop on an encoder-decoder: its text against the plainest decoding, and what it refuses."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from experiments.chi_square import chi_square
from models.errors import InputError
from specdec.accept import RULES
from specdec.commit import Origin
from specdec.drafters import Empty, Hybrid, Lookup, LookupTree, Model
from specdec.engine import Engine, Params, context_of, run, to_result
from specdec.warp import Sampling
from tests import toys
from tests.encdec_toys import (
  CONFIG,
  SOURCE_CAPACITY,
  SOURCES,
  VOCAB,
  draft,
  engine,
  forward,
  greedy_text,
  random_encdec,
  request,
  source_of,
  stranger,
  target,
)

SAMPLED = Sampling.create(1.0, 0, 0.9)
SMALL = dataclasses.replace(CONFIG, vocab_size=5, num_layers=1)
DRAFTERS = {'first layer': (Model(VOCAB), draft), 'own encoder': (Model(VOCAB), stranger),
            'lookup': (Lookup(partial=True), lambda: None)}


@functools.cache
def plain(rows: int, rule: str = 'coupled') -> list[list[int]]:
  """Sampled text without a draft."""
  return toys.decode(engine(Empty(), 0, rule), Params(target()), request(40, SAMPLED, rows))[0].tokens


@pytest.mark.parametrize(('gamma', 'rows'), [
    pytest.param(gamma, rows, marks=[pytest.mark.slow] * ((gamma, rows) != (3, 4)))
    for gamma in range(1, 8) for rows in (1, 4)])
def test_text_is_that_of_plain_decoding(gamma, rows):
  """Greedy as by whole passes without a cache; sampled under the coupled rule, whatever the draft."""
  name = list(DRAFTERS)[gamma % 3]
  drafter, draft_params = DRAFTERS[name]
  params = Params(target(), draft_params())
  result, _ = toys.decode(engine(drafter, gamma, 'coupled'), params, request(40, rows=rows))
  assert result.tokens == greedy_text()[:rows]
  result, _ = toys.decode(engine(drafter, gamma, 'coupled'), params, request(40, SAMPLED, rows))
  assert result.tokens == plain(rows)
  if name != 'lookup':
    origins = {origin for row in result.origins for origin in row}
    assert {Origin.ACCEPTED, Origin.CORRECTED} <= origins


@pytest.mark.parametrize(('name', 'rule'), [
    ('own encoder', 'rejection'), pytest.param('lookup', 'block', marks=pytest.mark.slow),
    pytest.param('first layer', 'block', marks=pytest.mark.slow)])
def test_greedy_text_under_other_rules(name, rule):
  drafter, draft_params = DRAFTERS[name]
  result, _ = toys.decode(engine(drafter, 4, rule), Params(target(), draft_params()), request(40))
  assert result.tokens == greedy_text()


@pytest.mark.parametrize('drafter', [
    LookupTree(partial=True, branches=2), pytest.param(Hybrid(Model(VOCAB), Lookup(), 2, 2), marks=pytest.mark.slow)],
                         ids=lambda drafter: drafter.name)
def test_trees(drafter):
  """Slots are not positions there, and scores by distance go by positions."""
  params = Params(target(), draft() if drafter.name == 'hybrid' else None)
  result, _ = toys.decode(engine(drafter, 4, 'multiround'), params, request(40))
  assert result.tokens == greedy_text()
  assert result.total.drafted > 0


@pytest.mark.slow
def test_a_model_is_its_own_perfect_draft():
  result, _ = toys.decode(engine(Model(VOCAB), 4), Params(target(), target()), request(100))
  for metrics in result.metrics:
    assert (metrics.passes, metrics.accepted, metrics.drafted) == (20, 80, 80)
  result, _ = toys.decode(engine(Model(VOCAB), 4), Params(target(), target()), request(100, SAMPLED))
  assert result.total.alpha > 0.995


def test_sampled_text_follows_the_law():
  """Two tokens under the token rule against their exact law, by χ²."""
  model, drafting = (random_encdec(config, seed) for seed, config in enumerate((
      SMALL, dataclasses.replace(SMALL, width=16))))
  rows, sources = 1000, [(1, 2, 3)]
  eng = Engine(Model(5), RULES['rejection'], 2, 20, 5, source_capacity=8)
  params, counts = Params(model, drafting), np.zeros((5, 5))
  for start in range(0, 2000, rows):
    req = request(2, Sampling.create(1.0), prompts=[(0,)] * rows, seeds=range(start, start + rows),
                  sources=sources * rows)
    result = to_result(run(eng, params, eng.start(params, req)))
    np.add.at(counts, tuple(np.array(result.tokens).T), 1)
  tokens_BT = np.array([[0, first] for first in range(5)])
  law_BTV = jax.nn.softmax(forward(model, source_of(sources * 5, 8), tokens_BT))
  law = np.asarray(law_BTV[0, 0][:, None] * law_BTV[:, 1], np.float64)
  assert chi_square(counts, law / law.sum()).p_value > 1e-3
  assert chi_square(counts, np.full((5, 5), 1 / 25)).p_value < 1e-6, 'another law would be seen'


@pytest.mark.parametrize(('changes', 'message'), [
    ({'sources': None}, '4 texts have 0 sources'), ({'sources': SOURCES[:2]}, '4 texts have 2 sources'),
    ({'sources': [(1,), (), (2,), (3,)]}, 'source 1 is empty'),
    ({'sources': [(1,), (2,), (3,) * (SOURCE_CAPACITY + 1), (3,)]}, 'source 2 has 41 tokens, more than'),
    ({'sources': [(1,), (2,), (VOCAB,), (3,)]}, 'source 2 holds ids outside of 0..63')])
def test_sources_that_are_refused(changes, message):
  with pytest.raises(InputError, match=message) as caught:
    engine(Empty(), 0).generate(Params(target()), request(4, **changes))
  assert '\n' not in str(caught.value)


def test_sources_for_a_target_without_an_encoder():
  with pytest.raises(InputError, match='no encoder'):
    toys.engine(Empty(), 0).generate(Params(toys.target()), request(4))


@pytest.mark.slow
def test_a_draft_without_an_encoder():
  """It goes by the text alone; greedy text is the target's all the same."""
  result, _ = toys.decode(engine(Model(VOCAB), 3), Params(target(), toys.draft()), request(40))
  assert result.tokens == greedy_text()
  assert result.total.drafted > 0


def test_lookup_copies_from_the_source():
  """The text 0 5 9 goes on as the source does behind its 5 9, until the source ends; the text comes second."""
  state = engine(Lookup(1, 2, partial=True), 4).start(
      Params(target()), request(8, prompts=[(0, 5, 9)] * 2, sources=[(5, 9, 7, 6, 2), (1, 2, 5)], seeds=[0, 1]))
  context = context_of(engine(Lookup(1, 2, partial=True), 4), state)
  drafted, _ = Lookup(1, 2, partial=True).propose(None, (), context, 4)
  assert drafted.count_B.tolist() == [3, 0]
  assert drafted.tokens_BM[0, :3].tolist() == [7, 6, 2]


def test_starts_differ_in_length():
  """A forced beginning of the decoded text is a prompt like any other."""
  prompts = ((0,), (0, 4), (0, 9, 9, 3), (0, 2, 1))
  result, _ = toys.decode(engine(Model(VOCAB), 4), Params(target(), stranger()), request(10, prompts=prompts))
  for row, (prompt, text) in enumerate(zip(prompts, result.tokens, strict=True)):
    tokens_BT = np.zeros((1, 20), np.int32)
    tokens_BT[0, :len(prompt) + len(text)] = [*prompt, *text]
    logits = forward(target(), source_of(SOURCES[row:row + 1]), tokens_BT)
    assert np.argmax(logits[0, len(prompt) - 1:len(prompt) + 9], axis=-1).tolist() == text
