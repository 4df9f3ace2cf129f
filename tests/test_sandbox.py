"""Hostile programs leave the parent, its files and its processes intact, and end in the right kind (faults 58, 59).

Bombs are bounded, so that a broken sandbox fails a test and not the machine.
"""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import pytest

from experiments import sandbox
from models.errors import InputError

if sys.platform != 'linux':
  pytest.skip('the sandbox needs Linux', allow_module_level=True)

LONG, SHORT = sandbox.Limits(seconds=20), sandbox.Limits(seconds=0.5)


@pytest.fixture(params=sandbox.MODES)
def mode(request):
  try:
    return sandbox.isolation((request.param,)).mode
  except InputError as error:
    pytest.skip(str(error))


def run(mode: str, program: str, limits: sandbox.Limits = LONG) -> sandbox.Result:
  return sandbox.run(textwrap.dedent(program), limits, (mode,))


@pytest.mark.parametrize('program, kind, detail', [
    ('x = 1', 'passed', ''),
    ('import numpy; assert numpy.arange(3).sum() == 3', 'passed', ''),
    ('import tempfile\nwith tempfile.TemporaryFile() as file: file.write(b"x")', 'passed', ''),
    ('import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()', 'passed', ''),
    ('from dataclasses import dataclass\n@dataclass\nclass A:\n  x: int\nassert A(1).x == 1', 'passed', ''),
    ('if __name__ == "__main__": 1 / 0', 'passed', ''),
    ('assert 1 == 2, "no"', 'wrong', 'AssertionError: no'),
    ('1 / 0', 'exception', 'ZeroDivisionError'),
    ('def f(:', 'exception', 'SyntaxError'),
    ('x = "\ud800"', 'exception', 'UnicodeEncodeError'),
    ('x = "\0"', 'exception', 'null bytes'),
    ('def f(): f()\nf()', 'exception', 'RecursionError'),
    ('input()', 'exception', 'EOFError'),
    ('class E(Exception):\n  def __str__(self): raise SystemExit\nraise E', 'exception', 'E'),
])
def test_kinds(mode, program, kind, detail):
  """Fault 59: pass, wrong and exception are told apart."""
  result = run(mode, program)
  assert result.kind == kind and detail in result.detail and result.passed == (kind == 'passed')


@pytest.mark.parametrize('program', [
    'import sys; sys.exit(0)',
    'import os; os._exit(0)',
    'raise SystemExit(0)',
    'import os\nfor fd in range(3, 9):\n  try: os.write(fd, b\'["", "passed", ""]\')\n  except OSError: 0\nos._exit(0)',
])
def test_early_end_is_no_pass(mode, program):
  assert run(mode, program).kind == 'exception'


@pytest.mark.parametrize('program', [
    'while True: pass',
    'import time; time.sleep(60)',
    'while True:\n  try:\n    while True: pass\n  except BaseException: pass',
    'import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)',
])
def test_endless_program(mode, program):
  """Fault 58: a sample that loops forever."""
  result = run(mode, program, SHORT)
  assert result.kind == 'timeout' and result.seconds < 5


def test_endless_output(mode):
  result = run(mode, 'while True: print("x" * 1000)', SHORT)
  assert result.kind == 'timeout'
  assert len(result.output) == sandbox.OUTPUT_BYTES and set(result.output) <= {'x', '\n'}


def test_fork_bomb(mode):
  result = run(mode, """
      import os, time
      for _ in range(100):
        if os.fork() == 0:
          time.sleep(30)
          os._exit(0)
      """)
  assert result.kind == 'exception' and ('BlockingIOError' in result.detail or 'refused' in result.detail)


def test_thread_bomb(mode):
  result = run(mode, """
      import threading, time
      for _ in range(100):
        threading.Thread(target=time.sleep, args=(30,)).start()
      """)
  assert result.kind == 'exception' and 'thread' in result.detail


def test_process_that_detaches_is_killed():
  try:
    sandbox.isolation(('namespaces',))
  except InputError as error:
    pytest.skip(str(error))
  result = run('namespaces', f"""
      import ctypes, os, time
      read, write = os.pipe()
      if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
          ctypes.CDLL(None).prctl(15, b'orphan-{os.getpid()}', 0, 0, 0)  # PR_SET_NAME
          os.write(write, b'x')
          time.sleep(60)
        os._exit(0)
      os.read(read, 1)
      """)
  names = [path.read_text().strip() for path in pathlib.Path('/proc').glob('[0-9]*/comm') if path.exists()]
  assert result.passed and f'orphan-{os.getpid()}' not in names


@pytest.fixture
def canary(tmp_path):
  """A directory of the current user that anyone could enter."""
  for directory in (tmp_path, *tmp_path.parents[:3]):
    if directory.stat().st_uid == os.getuid() and directory != pathlib.Path('/tmp'):
      directory.chmod(directory.stat().st_mode | 0o055)
  (tmp_path / 'inner').mkdir()
  (tmp_path / 'inner' / 'file').write_text('whole')
  tmp_path.chmod(0o777)
  yield tmp_path
  assert (tmp_path / 'inner' / 'file').read_text() == 'whole'
  assert [path.name for path in tmp_path.iterdir()] == ['inner']
  assert (tmp_path / 'inner').stat().st_mode & 0o700 == 0o700


@pytest.mark.parametrize('program', [
    'import shutil; shutil.rmtree({path!r})',
    'import os; os.remove({path!r} + "/inner/file")',
    'import os; os.rename({path!r} + "/inner/file", "stolen")',
    'import os; os.truncate({path!r} + "/inner/file", 0)',
    'import os; os.chmod({path!r} + "/inner", 0)',
    'open({path!r} + "/inner/file", "w")',
    'open({path!r} + "/new", "w")',
    'open({path!r} + "/inner/file").read()',
    'import os; os.symlink({path!r}, "link"); open("link/new", "w")',
    'import os; os.chdir({path!r}); open("new", "w")',
])
def test_files_outside_are_out_of_reach(mode, canary, program):
  """Fault 58: a sample that deletes a file leaves the work tree intact."""
  assert run(mode, program.format(path=str(canary))).kind == 'exception'


def test_deletion_below_the_hook(canary):
  """The namespace, not a check inside Python, keeps the files."""
  try:
    sandbox.isolation(('namespaces',))
  except InputError as error:
    pytest.skip(str(error))
  run('namespaces', f'import ctypes; ctypes.CDLL(None).unlink({os.fsencode(canary / "inner" / "file")!r})')


def test_libraries_are_read_only(mode):
  result = run(mode, 'import json; open(json.__file__, "a")')
  assert result.kind == 'exception' and pathlib.Path(textwrap.__file__).is_file()


def test_huge_file(mode):
  result = run(mode, """
      with open('huge', 'wb') as file:
        for _ in range(200):
          file.write(bytes(1 << 20))
      """)
  assert result.kind == 'exception' and 'File too large' in result.detail


def test_many_files(mode):
  result = run(mode, """
      import time
      for name in range(20):
        with open(str(name), 'wb') as file:
          file.write(bytes(8 << 20))
      time.sleep(5)
      """)
  assert result.kind == 'exception' and ('No space left' in result.detail or 'wrote more' in result.detail)


def test_temporary_directory_is_removed(mode, monkeypatch, tmp_path):
  monkeypatch.setattr(sandbox.tempfile, 'tempdir', str(tmp_path))
  tmp_path.chmod(0o755)
  assert run(mode, 'import os; os.makedirs("a/b"); open("a/b/c", "w").close(); os.mkdir("closed", 0)').passed
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('program', ['x = bytearray(1 << 34)', 'x = [0]\nwhile len(x) < 1 << 30: x += x'])
def test_much_memory(mode, program):
  result = run(mode, program, sandbox.Limits(seconds=20, memory_bytes=256 << 20))
  assert result.kind == 'exception' and 'MemoryError' in result.detail


def test_network(mode):
  with socket.create_server(('127.0.0.1', 0)) as server:
    server.settimeout(0.1)
    port = server.getsockname()[1]
    result = run(mode, f'import socket; socket.create_connection(("127.0.0.1", {port}), timeout=2)')
    assert result.kind == 'exception' and 'PermissionError' in result.detail
    with pytest.raises(TimeoutError):
      server.accept()


def test_network_below_the_hook():
  """The namespace, not a check inside Python, keeps the network away."""
  try:
    sandbox.isolation(('namespaces',))
  except InputError as error:
    pytest.skip(str(error))
  with socket.create_server(('127.0.0.1', 0)) as server:
    address = (2).to_bytes(2, sys.byteorder) + server.getsockname()[1].to_bytes(2) + bytes([127, 0, 0, 1]) + bytes(8)
    result = run('namespaces', f"""
        import ctypes
        libc = ctypes.CDLL(None)
        assert libc.connect(libc.socket(2, 1, 0), {address!r}, 16) == -1
        """)
  assert result.passed


def test_environment_is_not_ours(mode, monkeypatch):
  monkeypatch.setenv('CANARY', 'secret')
  result = run(mode, 'import os; print(sorted(os.environ))')
  assert result.passed and result.output.strip() in (
      "['OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS']", "['LC_CTYPE', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS']")
  assert run(mode, f'open("/proc/{os.getpid()}/environ").read()').kind == 'exception'


def test_signals_do_not_reach_us(mode):
  with subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE) as victim:
    assert run(mode, f'import os; os.kill({victim.pid}, 9)').kind == 'exception'
    assert run(mode, 'import os; os.kill(os.getppid(), 9)').kind in ('passed', 'exception')
    assert run(mode, 'import os; os.kill(0, 9)').kind == 'exception'
    assert victim.poll() is None
    victim.communicate(b'\n')
  assert victim.returncode == 0


def test_root_is_given_up(mode):
  assert run(mode, 'import os; assert os.getuid() == os.geteuid() != 0').passed


# When the sandbox itself fails


@pytest.fixture
def child(tmp_path, monkeypatch):
  """Puts a script in the place of the sandbox's own child process."""
  sandbox.isolation(sandbox.MODES)

  def replace(script: str):
    path = tmp_path / 'child.py'
    path.write_text(script)
    monkeypatch.setattr(sandbox, 'CHILD', str(path))
  return replace


@pytest.mark.parametrize('script, detail', [
    ('import sys; print("broken"); sys.exit(3)', 'exit status 3: broken'),
    ('import os; os.kill(os.getpid(), 9)', 'was killed'),
    ('import time; time.sleep(60)', 'did not end'),
])
def test_harness_error(child, monkeypatch, script, detail):
  """Fault 59: what says nothing about the program is a kind of its own."""
  child(script)
  monkeypatch.setattr(sandbox, 'GRACE_SECONDS', 0.5)
  result = sandbox.run('x = 1', sandbox.Limits(seconds=0.1))
  assert result.kind == 'harness_error' and detail in result.detail


def test_missing_interpreter(monkeypatch):
  sandbox.isolation(sandbox.MODES)
  monkeypatch.setattr(sys, 'executable', '/nowhere/python')
  assert sandbox.run('x = 1').kind == 'harness_error'


def test_other_systems_are_refused(monkeypatch):
  monkeypatch.setattr(sys, 'platform', 'darwin')
  with pytest.raises(InputError, match='Linux'):
    sandbox.isolation.__wrapped__()


def test_without_isolation_nothing_runs(child):
  child('import os, sys; os.write(int(sys.argv[1]), b\'{"kind": "harness_error", "detail": "forbidden"}\')')
  with pytest.raises(InputError, match='namespaces: forbidden; landlock: forbidden'):
    sandbox.isolation.__wrapped__()
