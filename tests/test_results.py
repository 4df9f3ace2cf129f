"""JSON lines survive what happens to files: kills, torn lines, wrong paths, odd values."""

import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from experiments import sample_files
from launch import results
from models.errors import InputError

ROWS = [{'gamma': gamma, 'name': 'ü' * gamma, 'speedup': 1.5} for gamma in range(4)]


def _write(path, rows):
  for row in rows:
    results.append_row(str(path), row)


def test_rows_come_back(tmp_path):
  path = tmp_path / 'rows.jsonl'
  _write(path, ROWS)
  assert results.read_rows(str(path)) == ROWS
  assert path.read_bytes().count(b'\n') == len(ROWS)


def test_torn_at_every_byte(tmp_path):
  """However much of the last row reached the file: the rows before it stand, and the next append mends the file."""
  path = tmp_path / 'rows.jsonl'
  _write(path, ROWS)
  content = path.read_bytes()
  whole = content[:-1].rfind(b'\n') + 1
  for size in range(whole, len(content)):
    path.write_bytes(content[:size])
    expected = ROWS if size == len(content) - 1 else ROWS[:-1]
    assert results.read_rows(str(path)) == expected
    assert path.read_bytes() == content[:size], 'reading must not write'
    results.append_row(str(path), {'next': 1})
    assert results.read_rows(str(path)) == [*expected, {'next': 1}]


def test_kill_loses_at_most_the_row_being_written(tmp_path):
  path = tmp_path / 'rows.jsonl'
  code = ('import sys; from launch import results\n'
          'for number in range(10**6):\n'
          '  results.append_row(sys.argv[1], {"number": number, "padding": "x" * 20000})\n'
          '  print(number, flush=True)\n')
  root = pathlib.Path(results.__file__).parent.parent
  with subprocess.Popen([sys.executable, '-c', code, path], stdout=subprocess.PIPE, text=True, cwd=root,
                        env={**os.environ, 'JAX_PLATFORMS': 'cpu'}) as process:
    for line in process.stdout:
      if int(line) == 20:
        process.send_signal(signal.SIGKILL)
        break
    said = [20, *(int(line) for line in process.stdout if line.endswith('\n'))]
  numbers = [row['number'] for row in results.read_rows(str(path))]
  assert numbers == list(range(len(numbers)))
  assert len(numbers) >= said[-1] + 1
  results.append_row(str(path), {'number': -1})
  assert [row['number'] for row in results.read_rows(str(path))] == [*numbers, -1]


def test_broken_line_in_the_middle_is_named(tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_text('{"a": 1}\n\n{"a": \n{"a": 2}\n')
  with pytest.raises(InputError, match=r'line 3 of .*rows.jsonl is not a JSON object: remove it'):
    results.read_rows(str(path))


def test_missing_file(tmp_path):
  with pytest.raises(InputError, match='No such file'):
    results.read_rows(str(tmp_path / 'none.jsonl'))


@pytest.mark.parametrize('path, message', [('file/rows.jsonl', 'cannot write file/rows.jsonl: its directory is a file'),
                                           ('directory', 'Is a directory'), ('', 'No such file')])
def test_unwritable_path_is_one_line(path, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'directory').mkdir()
  (tmp_path / 'file').write_text('text')
  for write in (results.check_writable, lambda p: results.append_row(p, {}), lambda p: results.write_json(p, {})):
    with pytest.raises(InputError) as caught:
      write(path)
    assert '\n' not in str(caught.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ['directory', 'file']
  with pytest.raises(InputError, match=message):
    results.check_writable(path)


def test_check_writable_leaves_no_trace(tmp_path):
  path = tmp_path / 'rows.jsonl'
  results.check_writable(str(path))
  assert not path.exists()
  path.write_text('{"a": 1}\n')
  results.check_writable(str(path))
  assert path.read_text() == '{"a": 1}\n'
  results.check_writable(str(tmp_path / 'new' / 'directory' / 'rows.jsonl'))
  assert not list((tmp_path / 'new' / 'directory').iterdir())
  results.check_writable('-')
  results.check_writable(None)


@dataclasses.dataclass
class _Point:
  x: float
  y: np.ndarray


@pytest.mark.parametrize('value, expected', [
    (math.nan, None), (-math.inf, None), (np.float32('nan'), None), (jnp.inf, None),
    (np.float32(0.5), 0.5), (np.int64(3), 3), (np.bool_(True), True), (True, True),
    (np.array([1.0, np.nan]), [1.0, None]), (np.array(2), 2), ((1, 2), [1, 2]), ({1: 'a'}, {'1': 'a'}),
    (pathlib.PurePosixPath('a/b'), 'a/b'), (_Point(1.0, np.arange(2)), {'x': 1.0, 'y': [0, 1]}),
    (ml_collections.ConfigDict({'a': {'b': (1, 2)}}), {'a': {'b': [1, 2]}}),
])
def test_values_become_json(value, expected):
  got = json.loads(results.dumps(value))
  assert got == expected
  assert type(got) is type(expected)


def test_jax_values_become_json():
  assert results.plain(jnp.float32(0.5)) == 0.5
  assert results.plain(jnp.array([0.5, jnp.nan], jnp.bfloat16)) == [0.5, None]
  assert results.plain({'a': jnp.arange(2)}) == {'a': [0, 1]}
  with pytest.raises(TypeError, match='object cannot be written'):
    results.plain({'a': object()})


def test_write_json_replaces_whole(tmp_path):
  path = tmp_path / 'facts.json'
  results.write_json(str(path), {'a': 1})
  with pytest.raises(TypeError):
    results.write_json(str(path), {'a': object()})
  assert json.loads(path.read_text()) == {'a': 1}
  link = tmp_path / 'link.json'
  link.symlink_to(path)
  results.write_json(str(link), {'a': 2})
  assert link.is_symlink()
  assert json.loads(path.read_text()) == {'a': 2}
  assert sorted(entry.name for entry in tmp_path.iterdir()) == ['facts.json', 'link.json']


@pytest.mark.parametrize('write', [
    lambda path: results.write_json(path, {'new': 1}), lambda path: sample_files.write_lines(path, [{'new': 1}])])
def test_a_write_that_fails_leaves_what_was_there(write, tmp_path, monkeypatch):

  def full(*arguments):
    raise OSError(28, 'No space left on device')

  path = tmp_path / 'rows.jsonl'
  path.write_text('{"old": 1}\n')
  with monkeypatch.context() as patch:
    patch.setattr(results.os, 'fsync', full)
    with pytest.raises(InputError, match='No space left'):
      write(str(path))
  assert path.read_text() == '{"old": 1}\n'
  assert [entry.name for entry in tmp_path.iterdir()] == ['rows.jsonl']
  write(str(path))
  assert json.loads(path.read_text()) == {'new': 1}


def test_standard_output(capsys):
  results.write_json('-', {'a': math.nan})
  assert json.loads(capsys.readouterr().out) == {'a': None}


def test_rows_go_to_files():
  """Text for a person goes to standard output."""
  results.check_rows(None)
  results.check_rows('/dev/null')
  with pytest.raises(InputError, match='rows are appended to a file, not to -'):
    results.check_rows('-')


def test_rows_so_far(tmp_path):
  path = str(tmp_path / 'rows.jsonl')
  assert results.rows_so_far(None) == results.rows_so_far(path) == []
  results.append_row(path, {'a': 1})
  assert results.rows_so_far(path) == [{'a': 1}]


def test_device_is_written_to_not_replaced():
  results.write_json('/dev/null', {'a': 1})
  results.append_row('/dev/null', {'a': 1})
  assert pathlib.Path('/dev/null').is_char_device()


def test_row_key():
  row = {'base': 'f.py:a', 'overrides': {'engine.gamma': 3, 'seed': 0}, 'config_hash': 'x', 'speedup': 1.0}
  same = {'overrides': {'seed': 0, 'engine.gamma': 3}, 'base': 'f.py:a', 'config_hash': 'x', 'speedup': 2.0}
  assert results.row_key(row) == results.row_key(same)
  for name, value in (('base', 'f.py:b'), ('overrides', {'engine.gamma': 4, 'seed': 0}), ('config_hash', 'y')):
    assert results.row_key({**row, name: value}) != results.row_key(row)


def test_environment():
  facts = results.environment()
  assert facts['jax_version'] == jax.__version__
  assert facts['num_devices'] == jax.device_count()
  assert facts['cpu_model']
  assert json.loads(results.dumps(facts)) == facts
