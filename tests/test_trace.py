"""Traces: what is told of each token is what the loop did, and what one pass over the whole text says."""

import functools
import itertools
import json
import types

import numpy as np
import pytest

from configs import smollm2, tiny
from experiments import audits
from experiments.trace import record, write_each
from launch import cli
from launch.prompts import Prompt
from launch.session import Session
from specdec.engine import Result, to_result

PROMPT, SEED = Prompt('text', 'a b a b a', False), 3
CASES = {'model': 1.0, 'lookup': 0.0, 'lookup_tree': 0.0}  # by temperature


@functools.cache
def session_of(drafter: str) -> Session:
  config = tiny.get_config('lookup' if drafter == 'lookup_tree' else drafter)
  with config.unlocked():
    config.engine.capacity = 64
    config.sampling.temperature, config.sampling.max_new_tokens = CASES[drafter], 40
    if drafter == 'lookup_tree':
      config.drafter = smollm2.get_config(drafter).drafter
      config.accept.rule, config.engine.gamma = 'multiround', smollm2.get_config(drafter).engine.gamma
  return Session.from_config(config)


@functools.cache
def trace_of(drafter: str) -> dict:
  return record(session_of(drafter), PROMPT, SEED)


def result_of(session: Session) -> Result:
  return [to_result(state) for state in session.stream(session.request([PROMPT], [SEED]))][-1]


@pytest.mark.parametrize('drafter', CASES)
def test_trace_is_what_the_loop_did(drafter):
  trace, session = trace_of(drafter), session_of(drafter)
  result = result_of(session)
  tokens = [token for step in trace['steps'] for token in step['tokens']]
  assert [token['token_id'] for token in tokens] == result.tokens[0]
  assert [token['origin'] for token in tokens] == [origin.name.lower() for origin in result.origins[0]]
  assert ''.join(token['text'] for token in tokens) == session.text(result.tokens[0])
  assert trace['passes'] == len(trace['steps'])
  assert trace['accepted'] == sum(token['origin'] == 'accepted' for token in tokens)
  if drafter != 'lookup_tree':  # whose counters see the accepted path only
    assert trace['drafted'] == sum(step['drafted'] for step in trace['steps'])
  for step in trace['steps']:
    last, kept = step['tokens'][-1], sum(token['origin'] == 'accepted' for token in step['tokens'])
    assert step['drafted'] == kept + len(step['refused']) + len(step['unused'])
    assert all(('draft_prob' in token) == (token['origin'] == 'accepted') for token in step['tokens'])
    assert (last['origin'] != 'corrected') or step['refused']
    assert all(token['token_id'] != last['token_id'] for token in step['refused'])
  json.dumps(trace, allow_nan=False)


@pytest.mark.parametrize('drafter', CASES)
def test_target_is_that_of_one_pass_over_the_text(drafter):
  session, steps = session_of(drafter), trace_of(drafter)['steps']
  tokens = [token for step in steps for token in step['tokens']]
  logits_TV = audits.scores(session, session.encode(PROMPT), [token['token_id'] for token in tokens])
  law_TV = np.exp(logits_TV - np.logaddexp.reduce(logits_TV, axis=1, keepdims=True))
  for token, law_V in zip(tokens, law_TV, strict=True):
    assert_told(token, law_V)
  ends = itertools.accumulate(len(step['tokens']) for step in steps)
  for step, end in zip(steps, ends, strict=True):
    for token in step['refused']:
      assert_told(token, law_TV[end - 1])


def assert_told(token: dict, law_V: np.ndarray) -> None:
  assert token['target_prob'] == pytest.approx(law_V[token['token_id']], rel=1e-3)
  likelier = law_V > law_V[token['token_id']]
  assert abs(token['target_rank'] - 1 - likelier.sum()) <= 1  # ties within rounding


def test_draft_laws():
  """A draft that draws tells its law; a copy is a point mass and has no rank."""
  drafted = {drafter: [token for step in trace_of(drafter)['steps'] for token in (*step['refused'], *step['unused'])]
             for drafter in CASES}
  assert all(0 < token['draft_prob'] < 1 and token['draft_rank'] >= 1 for token in drafted.pop('model'))
  for tokens in drafted.values():
    assert tokens and all((token['draft_prob'], token['draft_rank']) == (1.0, None) for token in tokens)


@pytest.mark.parametrize('out', ['traces.json', '-'])
def test_traces_are_written_as_they_come(out, tmp_path, monkeypatch, capsys):
  """A run that ends early leaves those that are whole; standard output gets one list."""
  path = tmp_path / out if out != '-' else out
  monkeypatch.setattr(cli, 'JSON_OUT', types.SimpleNamespace(value=str(path)))
  some = [{'id': name, 'emitted': 3, 'passes': 2, 'accepted': 1, 'drafted': 4} for name in 'ab']

  def ended():
    yield from some
    raise KeyboardInterrupt

  if out == '-':
    write_each(some)
    assert json.loads(capsys.readouterr().out) == some
    return
  with pytest.raises(KeyboardInterrupt):
    write_each(ended())
  assert json.loads(path.read_text()) == some
