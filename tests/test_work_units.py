"""Work in units: a run that is killed goes on where it was, and comes to the same results."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import pytest

from configs import tiny
from launch import preemption
from launch.prompts import Prompt
from launch.timed import PLAIN, _about
from launch.work_units import WorkUnits, seeds_for
from models.errors import InputError

ROOT = pathlib.Path(__file__).parents[1]
ABOUT = {'config': {'seed': 1}}
WORK = '''
import sys, time
from launch import preemption
from launch.work_units import WorkUnits
preemption.watch()
preemption.GRACE_SECONDS = float(sys.argv[3])
def work(unit):
  print(unit, flush=True)
  time.sleep(float(sys.argv[2]))
  return {'square': unit * unit}
try:
  print(WorkUnits(sys.argv[1], {'work': 'squares'}, 5).run(work))
except preemption.Preempted as error:
  print(error, file=sys.stderr)
  sys.exit(preemption.RESTART_STATUS)
'''
SQUARES = [{'square': unit * unit} for unit in range(5)]


def start(directory: pathlib.Path, seconds: float, grace: float = 20.0) -> subprocess.Popen:
  """A process that squares 0..4, a unit each, and says which it is at."""
  return subprocess.Popen(
      [sys.executable, '-c', WORK, directory, str(seconds), str(grace)], stdout=subprocess.PIPE,
      stderr=subprocess.PIPE, text=True, env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'})


def wait_for(process: subprocess.Popen, line: str) -> None:
  while process.stdout.readline().strip() != line:
    assert process.poll() is None


def test_runs_once(tmp_path):
  done = []
  work = lambda unit: done.append(unit) or {'unit': unit}
  first = WorkUnits(str(tmp_path), ABOUT, 3).run(work)
  again = WorkUnits(str(tmp_path), ABOUT, 3)
  assert again.num_done == 3 and again.run(work) == first == [{'unit': unit} for unit in range(3)]
  assert done == [0, 1, 2]


@pytest.mark.slow
def test_killed_in_the_middle(tmp_path):
  """What was finished stays, what was in flight is done again, and the results are those of a run left alone."""
  process = start(tmp_path, 0.5)
  wait_for(process, '2')
  process.kill()
  process.communicate()
  assert process.returncode == -signal.SIGKILL
  assert len(list(tmp_path.glob('unit-*.json'))) == 2
  out, _ = start(tmp_path, 0.0).communicate()
  assert out.splitlines() == ['2', '3', '4', str(SQUARES)]


def test_sigterm_finishes_the_unit(tmp_path):
  process = start(tmp_path, 1.0)
  wait_for(process, '1')
  process.terminate()
  out, stderr = process.communicate()
  assert process.returncode == 42 and stderr == f'{preemption.Preempted()}\n'
  assert out == '' and len(list(tmp_path.glob('unit-*.json'))) == 2


def test_sigterm_drops_a_long_unit(tmp_path):
  process = start(tmp_path, 60.0, grace=0.5)
  wait_for(process, '0')
  begun = time.monotonic()
  process.terminate()
  _, stderr = process.communicate()
  assert process.returncode == 42 and time.monotonic() - begun < 30
  assert stderr == f'{preemption.Preempted()}\n' and not list(tmp_path.glob('unit-*.json'))


def test_other_work_is_refused(tmp_path):
  WorkUnits(str(tmp_path), ABOUT, 3)
  with pytest.raises(InputError, match=r'config\.seed is 1 there and 2 here'):
    WorkUnits(str(tmp_path), {'config': {'seed': 2}}, 3)
  with pytest.raises(InputError, match='units is 3 there and 4 here'):
    WorkUnits(str(tmp_path), ABOUT, 4)


def test_a_mesh_of_another_size_goes_on():
  session = types.SimpleNamespace(config=tiny.get_config())
  about = _about({PLAIN: session}, [], 1)
  session.config.mesh.model = 8
  assert _about({PLAIN: session}, [], 1) == about
  session.config.engine.gamma = 2
  assert _about({PLAIN: session}, [], 1) != about


def test_other_drafts_are_other_work():
  plain, one, other = (types.SimpleNamespace(config=tiny.get_config('lookup')) for _ in range(3))
  other.config.drafter.max_ngram += 1
  assert _about({PLAIN: plain, 'lookup': one}, [], 1) != _about({PLAIN: plain, 'lookup': other}, [], 1)


@pytest.mark.parametrize('name', ['about.json', 'unit-00001-of-00003.json'])
def test_broken_files_are_said_before_the_work(name, tmp_path):
  WorkUnits(str(tmp_path), ABOUT, 3).run(lambda unit: unit)
  (tmp_path / name).write_bytes(b'{"a": \xff')
  with pytest.raises(InputError, match=f'{name} is broken: remove it'):
    WorkUnits(str(tmp_path), ABOUT, 3)


def test_buckets_are_refused():
  with pytest.raises(InputError, match='gs://bucket/x is no directory'):
    WorkUnits('gs://bucket/x', ABOUT, 3)


def test_a_result_appears_whole(tmp_path):
  """A unit that cannot be written leaves no file behind."""
  with pytest.raises(TypeError):
    WorkUnits(str(tmp_path), ABOUT, 1).run(lambda unit: object())
  assert {path.name for path in tmp_path.iterdir()} == {'about.json'}
  assert json.loads((tmp_path / 'about.json').read_text()) == ABOUT | {'units': 1}


def test_seeds():
  """By seed, prompt and sample; not by place."""
  one, other = Prompt('one', 'a', False), Prompt('other', 'b', False)
  first = seeds_for(0, [one, one, other])
  assert len(set(first)) == 3 and all(0 <= seed < 1 << 32 for seed in first)
  assert seeds_for(0, [other, one, one]) == [first[2], first[0], first[1]]
  assert not set(first) & set(seeds_for(1, [one, one, other]))


@pytest.mark.slow
def test_humaneval_goes_on(tmp_path):
  """Killed after some units: the samples are those of a run left alone, and those of another batch size."""
  texts = {}
  for name, flags in {'alone': (), 'killed': (), 'wide': ('--config.engine.batch=2',)}.items():
    command = [
        sys.executable, '-m', 'experiments.humaneval', f'--config={ROOT}/configs/tiny.py:lookup', '--generate_only',
        '--limit=6', '--config.sampling.max_new_tokens=6', '--config.sampling.temperature=1.0',
        f'--units_dir={tmp_path / name}', f'--samples_out={tmp_path / name}.jsonl', *flags]
    start = lambda command=command: subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT,
        env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'})
    if name == 'killed':
      process = start()
      while not list((tmp_path / name).glob('unit-*')):
        assert process.poll() is None
        time.sleep(0.01)
      process.kill()
      process.wait()
      assert 0 < len(list((tmp_path / name).glob('unit-*'))) < 6
    assert start().wait() == 0
    texts[name] = [(tmp_path / f'{name}.{way}.jsonl').read_text() for way in ('plain', 'speculative')]
  assert texts['alone'] == texts['killed'] == texts['wide']
