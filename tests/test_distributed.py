"""Several processes as one program: who is missing is named, and two decode what one does."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from experiments import exactness, reproduce, sweep
from launch import distributed
from models.config import DecoderConfig
from models.errors import InputError
from models.loading import orbax
from models.random_weights import random_decoder

ROOT = pathlib.Path(__file__).parents[1]
ENVIRONMENT = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
GENERATE = ('-m', 'launch.generate', f'--config={ROOT}/configs/tiny.py', '--prompt=abc',
            '--config.sampling.max_new_tokens=8')


def free_port() -> int:
  with socket.socket() as server:
    server.bind(('', 0))
    return server.getsockname()[1]


def start(process_id: int, port: int, *flags: str, num_processes: int = 2) -> subprocess.Popen:
  """One of several processes of `launch.generate`, with 4 devices."""
  return subprocess.Popen(
      [sys.executable, *GENERATE, f'--coordinator=localhost:{port}', f'--num_processes={num_processes}',
       f'--process_id={process_id}', *flags],
      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
      env=ENVIRONMENT | {'JAX_NUM_CPU_DEVICES': '4'})


def test_two_processes_decode_what_one_does(tmp_path):
  common = ('--config.engine.logprobs=False', '--config.sampling.temperature=1.0')
  mesh = ('--config.mesh.data=1', '--config.mesh.model=8', *common)
  port = free_port()
  processes = [start(i, port, *mesh, '--join_timeout=120', f'--json_out={tmp_path / f"{i}.json"}') for i in (0, 1)]
  outputs = [process.communicate(timeout=500) for process in processes]
  assert [process.returncode for process in processes] == [0, 0], outputs
  subprocess.run([sys.executable, *GENERATE, *common, f'--json_out={tmp_path / "one.json"}'],
                 check=True, cwd=ROOT, env=ENVIRONMENT, capture_output=True)
  texts = {name: json.loads((tmp_path / f'{name}.json').read_text()) for name in ('0', 'one')}
  assert texts['0'] == texts['one']
  assert not (tmp_path / '1.json').exists()  # one process speaks
  assert 'tokens in' in outputs[0][0] and 'tokens in' not in outputs[1][0]
  assert 'processes          2' in outputs[0][1] and 'data 1 x model 8' in outputs[0][1]


@pytest.mark.parametrize('here, missing', [
    (0, 'process 1 of 2 did not join within 1 s'),
    pytest.param(1, 'process 0 of 2 did not answer within 1 s', marks=pytest.mark.slow)])
def test_a_process_that_does_not_join(here, missing):
  process = start(here, free_port(), '--join_timeout=1')
  _, stderr = process.communicate(timeout=120)
  assert process.returncode == 2
  assert missing in stderr.splitlines()[-1] and 'Traceback' not in stderr


@pytest.mark.slow
def test_all_hear_who_is_missing():
  port = free_port()
  processes = [start(i, port, '--join_timeout=60' if i else '--join_timeout=15', num_processes=3) for i in (0, 2)]
  for process in processes:
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 2
    assert 'process 1 of 3 did not join' in stderr.splitlines()[-1]


@pytest.mark.slow
def test_mesh_that_leaves_a_process_out():
  port = free_port()
  processes = [start(i, port, '--join_timeout=120') for i in (0, 1)]
  for process in processes:
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 2
    assert 'mesh.data=1 x mesh.model=1 does not match the job: it has 8 devices in 2 processes' in stderr


AGREE = '''
import sys
from launch import costs, distributed
from launch.mesh import make_mesh
from launch.slices.place import Place
import jax
process = int(sys.argv[2])
distributed.join(Place(f'localhost:{sys.argv[1]}', 2, process), 60)
jax.set_mesh(make_mesh(1, 8))
print('agreed:', costs.agreed(0.12345 + process, [1.0, 1.23456 + process]), flush=True)
'''


def test_all_go_by_the_costs_of_one():
  """Else each would compile a program of its own."""
  port = free_port()
  processes = [subprocess.Popen([sys.executable, '-c', AGREE, str(port), str(i)], stdout=subprocess.PIPE, text=True,
                                cwd=ROOT, env=ENVIRONMENT | {'JAX_NUM_CPU_DEVICES': '4'}) for i in (0, 1)]
  outputs = [process.communicate(timeout=120)[0] for process in processes]
  assert all('agreed: (0.123, (1.0, 1.235))' in output for output in outputs)


SAVE = '''
import sys
import jax
from launch import distributed
from launch.mesh import make_mesh
from launch.slices.place import Place
from models.config import DecoderConfig
from models.loading import orbax
from models.random_weights import random_decoder
distributed.join(Place(f'localhost:{sys.argv[1]}', 2, int(sys.argv[2])), 60)
with jax.set_mesh(make_mesh(1, 8)):
  eight_heads = DecoderConfig.tiny(vocab_size=16, num_heads=8, num_kv_heads=8)
  orbax.save_decoder(sys.argv[3], random_decoder(eight_heads, 0, make_mesh(1, 8)))
'''


@pytest.mark.slow
def test_two_processes_save_one_checkpoint(tmp_path):
  """Each writes its part; any mesh, or one device, reads the whole."""
  port = free_port()
  processes = [subprocess.Popen([sys.executable, '-c', SAVE, str(port), str(i), str(tmp_path / 'saved')], cwd=ROOT,
                                env=ENVIRONMENT | {'JAX_NUM_CPU_DEVICES': '4'}) for i in (0, 1)]
  assert [process.wait(timeout=120) for process in processes] == [0, 0]
  saved = orbax.load_decoder(tmp_path / 'saved', orbax.read_config(tmp_path / 'saved'))
  alone = random_decoder(DecoderConfig.tiny(vocab_size=16, num_heads=8, num_kv_heads=8), 0)
  for ours, theirs in zip(jax.tree.leaves(saved), jax.tree.leaves(alone), strict=True):
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize('module', [exactness, reproduce, sweep])
def test_one_host_commands(module, monkeypatch):
  monkeypatch.setattr(distributed, 'joined', lambda: True)
  with pytest.raises(InputError, match='start it on one host'):
    module.main()


@pytest.mark.parametrize('flags, message', [
    (['--coordinator=h:1'], '--num_processes and --process_id missing'),
    pytest.param(['--slice=v4-33'], "slice 'v4-33' is unknown", marks=pytest.mark.slow),
    (['--slice=v4-32'], 'mesh.data=1 x mesh.model=1 does not match the slice: v4-32 has 16 chips on 4 hosts'),
    (['--compile_cache_dir=/dev/null/x'], '--compile_cache_dir=/dev/null/x cannot be made')])
def test_bad_input(flags, message):
  done = subprocess.run([sys.executable, *GENERATE, *flags], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)
  assert done.returncode == 2 and message in done.stderr.splitlines()[-1] and 'Traceback' not in done.stderr


@pytest.mark.slow
def test_compile_cache(tmp_path):
  """A second start finds every program and adds none."""
  command = [sys.executable, *GENERATE, f'--compile_cache_dir={tmp_path / "cache"}']
  found = []
  for _ in range(2):
    subprocess.run(command, check=True, cwd=ROOT, env=ENVIRONMENT, capture_output=True)
    found.append({path.name for path in (tmp_path / 'cache').iterdir() if path.name.endswith('-cache')})
  assert any('step_once' in name for name in found[0]) and found[0] == found[1]


@pytest.mark.slow
def test_profile(tmp_path):
  subprocess.run([sys.executable, *GENERATE, f'--profile_dir={tmp_path}'], check=True, cwd=ROOT, env=ENVIRONMENT,
                 capture_output=True)
  assert list(tmp_path.rglob('*.xplane.pb'))


@pytest.mark.slow
def test_a_killed_process_of_a_sharded_humaneval_run(tmp_path):
  """kill -9 of one of two processes: the other asks for a restart, and the restarted run comes to the results of one
  process on one device."""
  command = lambda name, *flags: [
      sys.executable, '-m', 'experiments.humaneval', f'--config={ROOT}/configs/tiny.py:lookup', '--generate_only',
      '--limit=3', '--config.sampling.max_new_tokens=4', '--config.sampling.temperature=1.0',
      '--config.engine.capacity=1024',
      f'--units_dir={tmp_path / name}', f'--samples_out={tmp_path / name}.jsonl', *flags]

  def start_both() -> list[subprocess.Popen]:
    port = free_port()
    return [subprocess.Popen(
        command('killed', '--config.mesh.model=4', f'--coordinator=localhost:{port}', '--num_processes=2',
                f'--process_id={i}', '--join_timeout=120'),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=ENVIRONMENT | {'JAX_NUM_CPU_DEVICES': '2'}) for i in (0, 1)]

  units = lambda: len(list((tmp_path / 'killed').glob('unit-*')))
  first, second = start_both()
  while not units():
    assert first.poll() is None and second.poll() is None, [
        process.communicate()[1] for process in (first, second) if process.poll() is not None]
    time.sleep(0.01)
  second.kill()
  second.communicate()
  _, stderr = first.communicate(timeout=300)
  assert first.returncode == 42 and 'lost another process of the job' in stderr, stderr
  assert 0 < units() < 3
  for process in start_both():
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
  subprocess.run(command('alone'), check=True, cwd=ROOT, env=ENVIRONMENT, capture_output=True)
  samples = lambda name: [(tmp_path / f'{name}.{way}.jsonl').read_text() for way in ('plain', 'speculative')]
  assert samples('killed') == samples('alone')
