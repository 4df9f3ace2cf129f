"""`experiments.humaneval` and `experiments.xsum` as a user runs them, on a session that answers from a list.
"""

import json
import pathlib
import subprocess
import sys

import pytest

from experiments import sandbox
from models.errors import InputError

# Answers every even problem with its reference solution, in twice the time without a draft.
FAKE = '''
import dataclasses, runpy, sys
from launch import prompts, timed, timing
from specdec.commit import Reason
from specdec.metrics import Metrics

SOLUTIONS = {problem.task_id: problem.canonical_solution for problem in prompts.humaneval_problems()}
ZEROS = {field.name: () if 'tuple' in str(field.type) else 0 for field in dataclasses.fields(Metrics)}

def time_all(ways, prompts, repeats, units_dir=None):
  return [timed.Timed(name, session, [batch(session.engine, prompt) for prompt in prompts])
          for name, session in ways.items()]

def batch(engine, prompt):
  passes = 5 if engine.gamma else 10
  by_width = (0,) * (len(engine.verify_widths) - 1) + (passes,)
  metrics = Metrics(**ZEROS | dict(passes=passes, emitted=10 if REASON == 'EOS' else 0, passes_by_width=by_width))
  return timed.Batch(
      seconds=passes / 100, pass_seconds=dict.fromkeys((1, *engine.verify_widths), .01), draft_seconds=0.0,
      live_bytes=0.0, tokens=[[1] * 10], texts=[text(engine, prompt)], reasons=[Reason[REASON]], metrics=[metrics])

def text(engine, prompt):
  if prompt.id in SOLUTIONS:
    good = int(prompt.id.partition('/')[2]) % 2 == 0
    return (SOLUTIONS[prompt.id] if good else BAD) + '\\ndef more(): pass\\n'
  return prompt.reference + '</s>' if engine.gamma else ' the '

timed.time_all = time_all
timing.memory_bandwidth = lambda: 1e9
'''


ROOT = pathlib.Path(__file__).parent.parent


def start(*arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT)


@pytest.fixture
def command():
  def run(module: str, *flags: str, reason: str = 'EOS', bad: str = '    return None\n'):
    script = f'REASON, BAD = {reason!r}, {bad!r}\n{FAKE}\nsys.argv[0] = {module!r}\n' \
             f'runpy.run_module({module!r}, run_name="__main__", alter_sys=True)'
    return start('-c', script, *flags)
  return run


HUMANEVAL = ('experiments.humaneval', '--config=configs/tiny.py:lookup')
XSUM = ('experiments.xsum', '--config=configs/tiny.py:lookup')
SPEED = {'draft_cost', 'verify_cost', 'predicted_speedup', 'bandwidth_utilisation', 'overlap', 'compile_seconds'}


@pytest.fixture(scope='module')
def _isolated():
  try:
    sandbox.isolation(sandbox.MODES)
  except InputError as error:
    pytest.skip(str(error))


def one_line(done: subprocess.CompletedProcess) -> str:
  assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1 and 'Traceback' not in done.stderr
  return done.stderr


@pytest.mark.usefixtures('_isolated')
def test_humaneval(command, tmp_path):
  """Plain and speculative runs go through the same code and give equal scores (fault 61)."""
  samples, results = tmp_path / 'samples.jsonl', tmp_path / 'results.jsonl'
  done = command(*HUMANEVAL, '--limit=4', '--allow_code_execution', '--json_out=-', f'--samples_out={samples}',
                 f'--results_out={results}', '--config.engine.batch=3')
  assert done.returncode == 0, done.stderr
  payload = json.loads(done.stdout)
  plain, speculative = payload['rows']
  assert (plain['decoder'], speculative['decoder']) == ('plain', 'speculative')
  assert plain['pass@1'] == speculative['pass@1'] == .5 and plain['counts'] == speculative['counts']
  assert speculative['counts']['passed'] == 2
  assert plain['ms_per_token'] == pytest.approx(10) and speculative['speedup'] == pytest.approx(2)
  assert set(speculative) >= SPEED and speculative['predicted_speedup'] == pytest.approx(2)
  assert speculative['tokens_per_pass'] == 2 and speculative['same_as_plain'] == 1 and plain['drafter'] == 'none'
  assert 'pass@1' in done.stderr and 'speed-up' in done.stderr and '4 of 164 problems' in done.stderr
  rows = [json.loads(line) for line in results.read_text().splitlines()]
  assert [row['decoder'] for row in rows] == ['plain'] * 4 + ['speculative'] * 4
  assert not any('def more' in row['completion'] for row in rows)
  again = command('experiments.humaneval', f'--samples={tmp_path / "samples.speculative.jsonl"}', '--json_out=-',
                  '--allow_code_execution')
  assert again.returncode == 0 and json.loads(again.stdout)['rows'][0]['pass@1'] == .5


@pytest.mark.parametrize('flags', [HUMANEVAL, ('experiments.humaneval', '--samples=any.jsonl')])
def test_humaneval_refuses_to_run_code(command, flags):
  """Fault 58: without the flag, one line and status 2, before anything is decoded or read."""
  done = command(*flags)
  assert done.returncode == 2 and '--allow_code_execution' in one_line(done)


def test_humaneval_without_scoring(command, tmp_path):
  done = command(*HUMANEVAL, '--generate_only', '--limit=2', f'--samples_out={tmp_path / "s.jsonl"}')
  assert done.returncode == 0, done.stderr
  assert 'not scored' in done.stdout and 'pass@1' not in done.stdout and 'speed-up' in done.stdout
  for decoder in ('plain', 'speculative'):
    rows = [json.loads(line) for line in (tmp_path / f's.{decoder}.jsonl').read_text().splitlines()]
    assert [row['task_id'] for row in rows] == ['HumanEval/0', 'HumanEval/1']
    assert set(rows[0]) == {'task_id', 'completion'}


@pytest.mark.parametrize('flags, shown', [
    ([*HUMANEVAL, '--generate_only', '--config.data.offset=162'], 'HumanEval, 2 samples'),
    pytest.param([*XSUM, '--config.data.offset=1'], ' stories', marks=pytest.mark.slow)])
def test_all_from_an_offset(command, flags, shown):
  done = command(*flags, '--limit=0')
  assert done.returncode == 0, done.stderr
  assert shown in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures('_isolated')
def test_humaneval_of_timeouts_fails(command):
  """Fault 59: > 50 % timeouts, status 1."""
  done = command(*HUMANEVAL, '--config.data.offset=1', '--limit=1', '--allow_code_execution', '--timeout=1',
                 bad='    while True: pass\n')
  assert done.returncode == 1 and 'error: 1 of 1 programs ended in timeout' in done.stderr


@pytest.mark.usefixtures('_isolated')
@pytest.mark.parametrize('flags, expected', [
    (['--k=1,2'], 'pass@2'), (['--samples_per_problem=2'], 'temperature'),
])
def test_humaneval_wrong_use(command, flags, expected):
  done = command(*HUMANEVAL, '--allow_code_execution', '--limit=1', *flags)
  assert done.returncode == 2 and expected in one_line(done)


def test_xsum(command, tmp_path):
  """The report names variant and stemmer (fault 62)."""
  done = command(*XSUM, '--limit=3', '--json_out=-', f'--summaries_out={tmp_path / "s.jsonl"}')
  assert done.returncode == 0, done.stderr
  payload = json.loads(done.stdout)
  plain, speculative = payload['rows']
  assert set(speculative) >= SPEED
  assert set(speculative['rouge']) == {'rouge1', 'rouge2', 'rougeL', 'rougeLsum'}
  assert speculative['rouge']['rouge2'] == {'mean': 1, 'low': 1, 'high': 1} and plain['rouge']['rouge2']['mean'] == 0
  assert payload['difference']['rouge2']['mean'] == 1 and payload['stemmer'] is True and payload['benchmark'] == 'news'
  assert 'stemmer on' in done.stderr and 'rougeLsum' in done.stderr and 'speed-up' in done.stderr
  rows = [json.loads(line) for line in (tmp_path / 's.jsonl').read_text().splitlines()]
  assert rows[3]['summary'] == rows[3]['reference'] and rows[0]['summary'] == 'the' and len(rows) == 6


@pytest.mark.slow
def test_xsum_from_a_file_where_nothing_drafts(command, tmp_path):
  path = tmp_path / 'xsum.jsonl'
  path.write_text('{"document": "A long text.", "summary": "Short.", "id": "1"}\n')
  done = command('experiments.xsum', '--config=configs/tiny.py:none', f'--config.data.path={path}', '--nostemmer',
                 '--json_out=-')
  assert done.returncode == 0 and 'xsum, 1 stories' in done.stderr and 'stemmer off' in done.stderr
  payload = json.loads(done.stdout)
  assert [row['decoder'] for row in payload['rows']] == ['plain'] and payload['difference']['rouge1'] is None


def test_xsum_wrong_use(command):
  done = command(*XSUM, '--config.data.path=/nowhere.jsonl')
  assert done.returncode == 2 and '/nowhere.jsonl' in one_line(done)


@pytest.mark.parametrize('flags', [(*HUMANEVAL, '--generate_only'), pytest.param(XSUM, marks=pytest.mark.slow)])
def test_broken_numbers_fail_the_run(command, flags, tmp_path):
  """Whatever was decoded is kept where it was asked for, but neither scored nor timed."""
  path = tmp_path / 'out.jsonl'
  out = f'--samples_out={path}' if flags[0] == 'experiments.humaneval' else f'--summaries_out={path}'
  done = command(*flags, '--limit=2', out, reason='ERROR')
  assert done.returncode == 1 and not done.stdout
  assert one_line(done).startswith('error: 2 of 2 texts (plain) ended in numbers that are not finite')
  assert list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize('prompts, module, flags', [
    (2, 'experiments.xsum', []),
    (3, 'experiments.humaneval', ['--generate_only', '--config.engine.batch=2', '--limit=3'])])
def test_commands_on_the_toy(prompts, module, flags):
  """`configs/tiny.py`: every command runs on it."""
  done = start('-m', module, '--config=configs/tiny.py:lookup', '--json_out=-', *flags)
  assert done.returncode == 0, done.stderr
  plain, speculative = json.loads(done.stdout)['rows']
  assert plain['drafter'] == 'none' and speculative['drafter'] == 'lookup'
  assert plain['prompts'] == speculative['prompts'] == prompts
  assert plain['new_tokens'] == speculative['new_tokens'] and speculative['same_as_plain'] == 1
  assert speculative['speedup'] > 0 and 0 < speculative['draft_cost'] < 1
