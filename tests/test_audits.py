"""The checks on a config's own model pass what is right and refuse what is not."""

import dataclasses
import functools
import types

import pytest

from configs import tiny
from experiments import audits, exactness
from experiments.verdict import at_least, at_most
from launch.prompts import load_prompts
from launch.session import Completion, Session
from models.errors import InputError
from specdec.accept import RULES


@functools.cache
def session() -> Session:
  config = exactness.changed(tiny.get_config('none'), temperature=0.0)
  with config.unlocked():
    config.sampling.max_new_tokens = 12
  return Session.from_config(config)


@functools.cache
def completions() -> list[Completion]:
  return session().generate(prompts())


def prompts():
  return load_prompts(session().config.data)


def test_greedy_text_passes():
  likeliest, logprobs = audits.teacher_forced(session(), prompts(), 'plain', completions())
  assert likeliest.passed and likeliest.value == 0
  assert logprobs.passed and logprobs.value < 1e-5


def test_a_token_that_is_not_the_likeliest_is_found():
  tokens = list(completions()[0].token_ids)
  tokens[5] ^= 1
  wrong = [dataclasses.replace(completions()[0], token_ids=tokens)]
  likeliest, logprobs = audits.teacher_forced(session(), prompts()[:1], 'plain', wrong)
  assert not likeliest.passed and not logprobs.passed


def test_a_wrong_logprob_is_found():
  wrong = [dataclasses.replace(completions()[0], logprobs=[x + 2e-4 for x in completions()[0].logprobs])]
  likeliest, logprobs = audits.teacher_forced(session(), prompts()[:1], 'plain', wrong)
  assert likeliest.passed and not logprobs.passed
  assert logprobs.value == pytest.approx(2e-4, abs=2e-5)


def test_texts_that_part():
  tokens = completions()[0].token_ids
  gap = functools.partial(audits.gap_at_parting, session(), prompts()[0], 0)
  assert gap(tokens, tokens) is None
  assert gap(tokens, tokens[:-1]) == float('inf')
  other = [*tokens[:5], tokens[5] ^ 1, *tokens[6:]]
  logits_TV = audits.scores(session(), session().encode(prompts()[0]), tokens)
  assert gap(tokens, other) == pytest.approx(logits_TV[5, tokens[5]] - logits_TV[5, other[5]]) != 0


def test_caches_that_differ():
  request = session().request(prompts())
  cache = session().engine.start(session().params, request).cache
  length = int(cache.length_B[0])
  assert audits.cache_difference(cache, cache) == 0
  change = lambda slot: cache.replace(k=(cache.k[0].at[0, 0, slot, 0].add(1e-3), *cache.k[1:]))
  assert audits.cache_difference(change(length - 1), cache) > audits.CACHE_LIMIT
  assert audits.cache_difference(change(length), cache) == 0  # past the length nothing counts
  moved = cache.replace(position_BS=cache.position_BS.at[0, 1].add(1))
  assert audits.cache_difference(moved, cache) == float('inf')
  shorter = cache.with_length(cache.length_B - 1)
  assert audits.cache_difference(change(length - 1), shorter) == 0


def test_narrow_types_may_round_more():
  model = types.SimpleNamespace(config=types.SimpleNamespace(dtype='bfloat16'))
  narrow = audits.Tolerance.of(types.SimpleNamespace(params=types.SimpleNamespace(target=model)))
  exact = audits.Tolerance.of(session())
  assert narrow.gap > exact.gap and narrow.logprob > exact.logprob and narrow.kept < exact.kept == 1


def test_changed_leaves_the_config_alone():
  config = tiny.get_config('model')
  config.engine.logprobs = False
  other = exactness.changed(config, temperature=0.5, rule='coupled')
  assert (other.sampling.temperature, other.accept.rule, other.engine.logprobs) == (0.5, 'coupled', True)
  assert (config.sampling.temperature, config.accept.rule, config.engine.logprobs) == (0.0, 'rejection', False)


def test_verdicts():
  assert at_most('', '', 1.0, 1.0).passed and not at_most('', '', 1.1, 1.0).passed
  assert at_least('', '', 1.0, 1.0).passed and not at_least('', '', 0.9, 1.0).passed
  assert not at_most('', '', float('nan'), 1.0).passed and not at_least('', '', float('nan'), 1.0).passed


LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]


@pytest.mark.parametrize('variant', ['none', 'model', 'simulated'])
def test_every_rule_and_drafter_is_shown(variant, monkeypatch):
  """On the model: those that any config can run, and the config's own."""
  config = tiny.get_config(variant)
  model = exactness.ModelRungs(config)
  drafters = {'lookup', 'self', 'simulated'} | {variant} - {'none'}
  seen = {'equality': [], 'own_draft': [], 'caches': [], 'teacher_forced': []}

  def note(rung, session, prompts, check, *texts):
    rule, temperature = session.engine.rule.name, session.config.sampling.temperature
    seen[rung].append((rule, session.config.drafter.name, temperature))
    assert rule in check and session.engine.gamma == 4
    return []

  for rung in seen:
    monkeypatch.setattr(audits, rung, functools.partial(note, rung))
  monkeypatch.setattr(model, 'texts', lambda *key: [])
  for rung in (model.equality, model.own_draft, model.caches, model.audit):
    rung()
  each = lambda rules, temperature: {(rule, drafter, temperature) for rule in rules for drafter in drafters}
  assert set(seen['equality']) == each(LOSSLESS, 0.0) | each(['coupled'], 1.0)
  assert set(seen['caches']) == each(LOSSLESS, 0.0) | each(LOSSLESS, 1.0)
  assert set(seen['teacher_forced']) == each(LOSSLESS, 0.0)
  assert {(rule, temperature) for rule, _, temperature in seen['own_draft']} == {
      (rule, temperature) for rule in LOSSLESS for temperature in (0.0, 1.0)}


def test_a_lossy_rule_is_refused(monkeypatch):
  lossy = types.SimpleNamespace(name='typical', lossless=False)
  monkeypatch.setitem(RULES, 'typical', lossy)
  config = tiny.get_config('model')
  exactness.check_lossless(config)
  config.accept.rule = 'typical'
  with pytest.raises(InputError, match=r"'typical' is lossy.*: use one of rejection, block, multiround, coupled$"):
    exactness.check_lossless(config)
