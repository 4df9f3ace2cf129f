"""Every command as a user runs it, on the toy pair."""

import json
import os
import pathlib
import pty
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != 'NO_COLOR'} | {
    'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), 'TERM': 'xterm'}
GENERATE, TINY = 'launch.generate', f'--config={ROOT}/configs/tiny.py'
GREEN, RED, BLUE, RESET = '\x1b[32m', '\x1b[31m', '\x1b[34m', '\x1b[0m'


def run(module: str, *flags: str, **changes: str) -> subprocess.CompletedProcess:
  done = subprocess.run([sys.executable, '-m', module, *flags], capture_output=True, text=True, cwd=ROOT,
                        env=ENVIRONMENT | changes)
  assert done.returncode == 0, done.stderr
  return done


def payload(module: str, *flags: str):
  """Standard output holds the JSON and nothing else."""
  return json.loads(run(module, *flags, '--json_out=-').stdout)


def on_terminal(*flags: str, **changes: str) -> str:
  """What `launch.generate` writes to a terminal."""
  ours, theirs = pty.openpty()
  process = subprocess.Popen([sys.executable, '-m', GENERATE, *flags], stdout=theirs, stderr=theirs, cwd=ROOT,
                             env=ENVIRONMENT | changes)
  os.close(theirs)
  parts = []
  try:
    while part := os.read(ours, 4096):
      parts.append(part)
  except OSError:  # how Linux says that the other end is closed
    pass
  os.close(ours)
  assert process.wait() == 0
  return b''.join(parts).decode('utf-8', 'replace').replace('\r\n', '\n')


def test_generate_on_a_terminal(tmp_path):
  """Accepted tokens are green, corrections red, bonus tokens blue; the JSON beside it holds the facts."""
  result = tmp_path / 'result.json'
  legend, _, shown = on_terminal(f'{TINY}:self', '--prompt=first', f'--json_out={result}').partition('\n')
  assert re.findall(r'(\x1b\[3\dm)\w+', legend) == [GREEN, RED, BLUE]
  assert {GREEN, RED, BLUE} <= set(re.findall(r'\x1b\[3\dm', shown))
  (row,) = json.loads(result.read_text())
  assert (row['id'], row['prompt'], row['drafter'], row['gamma'], row['reason']) == (
      'text', 'first', 'self', 4, 'max_tokens')
  assert len(row['token_ids']) == len(row['origins']) == len(row['logprobs']) == 32
  assert all(logprob < 0 for logprob in row['logprobs'])
  assert set(row['origins']) >= {'accepted', 'corrected', 'bonus'}
  assert row['origins'].count('accepted') == row['accepted'] and row['passes'] == 32 - row['accepted']
  assert f'[32 tokens in {row["passes"]} target passes: ' in shown


def test_generate_without_colours():
  assert '\x1b' not in on_terminal(f'{TINY}:none', '--prompt=first', '--config.sampling.max_new_tokens=2', NO_COLOR='1')


@pytest.mark.slow
def test_generate_in_batches(tmp_path):
  """Rows of a batch are shown one after the other, and are what they are alone."""
  prompts, result = tmp_path / 'prompts.txt', tmp_path / 'result.json'
  prompts.write_text('first\nanother one\nthird of three\n')
  flags = (f'{TINY}:lookup', f'--prompts={prompts}', '--config.sampling.max_new_tokens=12')
  stdout = run(GENERATE, *flags, f'--json_out={result}').stdout
  alone, together = json.loads(result.read_text()), payload(GENERATE, *flags, '--config.engine.batch=2')
  assert [row['id'] for row in alone] == ['prompts/1', 'prompts/2', 'prompts/3']
  for field in ('id', 'text', 'token_ids', 'origins', 'reason', 'passes'):
    assert [row[field] for row in alone] == [row[field] for row in together]
  assert re.split(r'\n\[12 tokens in .*\]\n', stdout) == [*(row['text'] for row in alone), '']


@pytest.mark.slow
def test_bench():
  plain, row = payload('launch.bench', f'{TINY}:lookup', '--repeats=1', '--config.engine.gamma=2',
                       '--config.sampling.max_new_tokens=8')
  assert [(r['drafter'], r['gamma'], r['new_tokens']) for r in (plain, row)] == [('none', 0, 8), ('lookup', 2, 8)]
  assert plain['speedup'] == 1 and all(r['ms_per_token'] > 0 and r['compile_seconds'] > 0 for r in (plain, row))


@pytest.mark.parametrize('module, flags', [
    (GENERATE, ('prompt', 'config', 'json_out', 'coordinator', 'compile_cache_dir')),
    ('launch.convert', ('source', 'json_out')),
    pytest.param('experiments.exactness', ('rungs', 'config', 'slice'), marks=pytest.mark.slow)])
def test_help(module, flags):
  """Says what the command is for and lists all flags of ours, wherever they are defined."""
  shown = run(module, '--help').stdout
  assert 'python -m' in shown and f'{module.replace(".", "/")}.py:' in shown
  assert all(re.search(rf'^  --{flag}: ', shown, re.MULTILINE) for flag in flags) and 'pdb' not in shown


@pytest.mark.slow
def test_exactness():
  verdicts = payload('experiments.exactness', TINY, '--rungs=three_tokens')
  assert len(verdicts) == 3 and all(verdict['passed'] and verdict['rung'] == 'three_tokens' for verdict in verdicts)


@pytest.mark.slow
def test_sweep(tmp_path):
  rows, plot = tmp_path / 'rows.jsonl', tmp_path / 'plot.png'
  run('experiments.sweep', f'--config={ROOT}/configs/sweep_gamma.py:tiny', '--config.grid.engine.gamma=(1,)',
      '--noconfig.plain', f'--out={rows}', f'--plot={plot}')
  assert [json.loads(line)['gamma'] for line in rows.read_text().splitlines()] == [1]
  assert plot.read_bytes().startswith(b'\x89PNG')


@pytest.mark.slow
def test_reproduce(tmp_path):
  """On the embedded model: it has no other."""
  rows = payload('experiments.reproduce', '--prompts=1', '--max_new_tokens=4', f'--rows={tmp_path / "rows.jsonl"}',
                 f'--plot={tmp_path / "plot.png"}')
  assert len(rows) == 20 and {row['drafter'] for row in rows} == {'none', 'lookup', 'model', 'medusa', 'hybrid'}
  assert (tmp_path / 'plot.png').stat().st_size > 0
