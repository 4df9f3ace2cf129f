"""Results files under kill -9 at any moment: what is there is whole, and a restart ends like a run left alone."""

import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
COUNT, KILLS = 400, 10
SIZES = [1 + number * 997 % 40_000 for number in range(COUNT)]  # long rows, so that many writes are torn

# Imports once; for each line of its input a child goes on with the work, and is killed after so many seconds ('-':
# never), counted from its start or, with '+', from its first sign of work. The child's exit status is printed.
DRIVER = f'''
import os, pathlib, signal, sys, time
from launch import results
from launch.work_units import WorkUnits

work, path = sys.argv[1:]
row = lambda number: {{'number': number, 'text': 'x' * (1 + number * 997 % 40_000)}}

def append():
  there = {{found['number'] for found in results.rows_so_far(path)}}
  for number in range({COUNT}):
    if number not in there:
      results.append_row(path, row(number))

def units():
  found = WorkUnits(path, {{'seed': 1}}, {COUNT}).run(row)
  results.write_json(path + '/all.json', found)

def written():
  return [file.stat().st_size for file in pathlib.Path(path).parent.rglob('*.json*') if '.tmp' not in file.name]

for line in sys.stdin:
  before = written()
  child = os.fork()
  if not child:
    {{'append': append, 'units': units}}[work]()
    os._exit(0)
  if line.strip() != '-':
    while line.startswith('+') and written() == before:
      time.sleep(0.001)
    time.sleep(float(line))
    os.kill(child, signal.SIGKILL)
  print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
'''


@contextlib.contextmanager
def worker(work: str, path: pathlib.Path):
  """Yields what runs a child and returns its status."""
  process = subprocess.Popen(
      [sys.executable, '-c', DRIVER, work, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
      cwd=ROOT, env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'})

  def run(seconds: str) -> int:
    process.stdin.write(f'{seconds}\n')
    process.stdin.flush()
    return int(process.stdout.readline())

  with process:
    yield run
    process.stdin.close()


def whole(numbers) -> list[dict]:
  return [{'number': number, 'text': 'x' * SIZES[number]} for number in numbers]


def test_rows_survive(tmp_path):
  """After each kill the file holds rows from the first on, none lost or changed but the one that was being written."""
  path, chance, held, killed = tmp_path / 'rows.jsonl', random.Random(0), 0, 0
  with worker('append', path) as run:
    for number in range(KILLS):
      killed += run(f'{"+" * (number % 2)}{chance.uniform(0.0, 0.03)}') == -9
      content = path.read_bytes() if path.exists() else b''
      lines = content.split(b'\n')[:-1]  # what follows the last break was being written
      assert [json.loads(line) for line in lines] == whole(range(len(lines))) and len(lines) >= held
      held = len(lines)
    assert killed >= 3 and held > 0
    assert run('-') == 0
  assert [json.loads(line) for line in path.read_text().splitlines()] == whole(range(COUNT))
  assert [file.name for file in tmp_path.iterdir()] == ['rows.jsonl']


def test_units_survive(tmp_path):
  """After each kill every file of a unit is whole; a restart does the rest, and ends like a run left alone."""
  path, chance, held, killed = tmp_path / 'units', random.Random(1), 0, 0
  with worker('units', path) as run:
    for number in range(KILLS):
      killed += run(f'{"+" * (number % 2)}{chance.uniform(0.0, 0.03)}') == -9
      numbers = []
      for file in sorted(path.glob('unit-*.json')):
        numbers.append(int(file.name.split('-')[1]))
        assert json.loads(file.read_text()) == whole(numbers[-1:])[0]
      assert numbers == list(range(len(numbers))) and len(numbers) >= held
      held = len(numbers)
    assert killed >= 3 and held > 0
    assert run('-') == 0
  assert json.loads((path / 'all.json').read_text()) == whole(range(COUNT))
