"""Scores follow from what the programs did, and nothing runs without consent (faults 58 to 61)."""

import json

import pytest

from experiments import sandbox, score
from experiments.completions import completion
from experiments.sample_files import Sample, read_samples, write_lines
from launch.errors import RunError
from launch.prompts import humaneval_problems
from models.errors import InputError

PROBLEMS = humaneval_problems()


@pytest.fixture
def works():
  try:
    sandbox.isolation(sandbox.MODES)
  except InputError as error:
    pytest.skip(str(error))


@pytest.fixture
def nothing_runs(monkeypatch):
  def refuse(*args):
    raise AssertionError('a program was run')
  monkeypatch.setattr(sandbox, 'run', refuse)
  monkeypatch.setattr(score, 'self_check', lambda *args: None)


def sample(index: int, text: str | None = None) -> Sample:
  return Sample(f'HumanEval/{index}', PROBLEMS[index].canonical_solution if text is None else text)


@pytest.mark.usefixtures('nothing_runs')
def test_refuses_without_consent():
  """Fault 58: without the explicit flag, scoring refuses."""
  with pytest.raises(InputError, match='--allow_code_execution'):
    score.score_samples([sample(0)], allow_execution=False)


def test_kinds_are_counted_apart(works):
  """Faults 59 and 60."""
  samples = [sample(0), sample(0, '    return None\n'), sample(0, '    1 / 0\n'), sample(0, '    while True: pass\n'),
             sample(1), sample(1, '    def\n'), sample(1), sample(1)]
  scores = score.score_samples(samples, allow_execution=True, k=(1, 2), timeout=1.5, workers=4)
  assert scores.counts == {'passed': 4, 'wrong': 1, 'exception': 2, 'timeout': 1, 'harness_error': 0}
  assert [row['result'] for row in scores.results] == [
      'passed', 'wrong', 'exception', 'timeout', 'passed', 'exception', 'passed', 'passed']
  assert scores.pass_at == pytest.approx({1: (1 / 4 + 3 / 4) / 2, 2: (1 / 2 + 1) / 2})
  assert scores.problems == 2 and 'files' in scores.isolation
  assert [row['completion'] for row in scores.results] == [sample.completion for sample in samples]


def test_all_reference_solutions_of_a_kind_pass(works):
  """Fault 61: the cut that raw completions get leaves every reference solution whole."""
  for problem in PROBLEMS:
    assert completion(problem.canonical_solution, problem, chat=False) == problem.canonical_solution
  replies = [f'Here:\n```python\n{problem.prompt}{problem.canonical_solution}```' for problem in PROBLEMS[:64:8]]
  samples = [Sample(problem.task_id, completion(reply, problem, chat=True))
             for problem, reply in zip(PROBLEMS[:64:8], replies, strict=True)]
  assert score.score_samples(samples, allow_execution=True, timeout=10).pass_at == {1: 1.0}


def test_mostly_timeouts_fail_the_run(works):
  """Fault 59: > 50 % timeouts fail the run loudly."""
  slow = sample(0, '    import time; time.sleep(60)\n')
  scores = score.score_samples([slow, slow, sample(1)], allow_execution=True, timeout=1.5, workers=2)
  with pytest.raises(RunError, match='2 of 3 programs ended in timeout'):
    scores.check()
  score.score_samples([slow, sample(1)], allow_execution=True, timeout=1.5, workers=2).check()


@pytest.mark.parametrize('kind, raises', [('timeout', True), ('harness_error', True), ('wrong', False)])
def test_check(kind, raises):
  rows = [{'task_id': 'HumanEval/0', 'result': kind, 'passed': False}] * 3
  scores = score.Scores(rows, dict.fromkeys(sandbox.KINDS, 0) | {kind: 3}, {1: 0.0}, 1, '')
  if raises:
    with pytest.raises(RunError):
      scores.check()
  else:
    scores.check()


def test_broken_harness_is_found_before_any_sample_runs(works, monkeypatch):
  """Fault 59: reference solutions of 5 shipped tasks pass before any run."""
  ran = []

  def run(source, limits):
    ran.append(source)
    return sandbox.Result('timeout', 'ran past 3 s', 3.0, '')
  monkeypatch.setattr(sandbox, 'run', run)
  monkeypatch.setattr(score, 'self_check', score.self_check.__wrapped__)
  with pytest.raises(RunError, match='reference solution of HumanEval/0 ended in timeout'):
    score.score_samples([sample(7, '    never = 1\n')], allow_execution=True)
  assert len(ran) == 5 and not any('never' in source for source in ran)


@pytest.mark.usefixtures('nothing_runs')
@pytest.mark.parametrize('samples, k, expected', [
    ([], (1,), 'no samples'),
    ([Sample('HumanEval/164', '')], (1,), 'HumanEval/164'),
    ([sample(0), sample(0), sample(1)], (2,), 'pass@2'),
    ([sample(0)], (0,), 'pass@0'),
])
def test_wrong_samples(works, samples, k, expected):
  with pytest.raises(InputError, match=expected):
    score.score_samples(samples, allow_execution=True, k=k)


def test_sample_files(tmp_path):
  path = tmp_path / 'samples.jsonl'
  samples = [sample(0), sample(1, '    return "ü\ud800"\n')]
  write_lines(path, map(vars, samples))
  assert read_samples(str(path)) == samples
  path.write_text(path.read_text() + '\n' + json.dumps({'task_id': 'HumanEval/2', 'completion': '', 'more': 1}))
  assert read_samples(str(path))[2] == Sample('HumanEval/2', '')
  with pytest.raises(InputError, match='name another file'):
    write_lines(str(tmp_path / 'none' / 'x'), [])


@pytest.mark.parametrize('content, expected', [
    ('{"task_id": "a"}', 'line 1'), ('{"task_id": "a", "completion": "b"}\n\n[1]', 'line 3'), ('nonsense', 'not JSON'),
    ('{"task_id": 1, "completion": "b"}', 'must be texts')])
def test_wrong_sample_file(tmp_path, content, expected):
  path = tmp_path / 'samples.jsonl'
  path.write_text(content)
  with pytest.raises(InputError, match=expected):
    read_samples(str(path))
  with pytest.raises(InputError, match='cannot be read'):
    read_samples(str(tmp_path / 'missing.jsonl'))
