"""Runs one program that a model wrote, in a process of its own that can harm neither us nor the files.

It is no full sandbox: the kernel is shared, and a program made to forge its verdict can. What it holds off is what
generated code does by accident or by habit: endless loops and output, fork bombs, deleted and huge files, all memory
taken, network access, reading the user's files and environment. `sandbox_child.py` has the mechanism.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time

from models.errors import InputError

KINDS = ('passed', 'wrong', 'exception', 'timeout', 'harness_error')
MODES = ('namespaces', 'landlock')  # the stronger first
OUTPUT_BYTES = 16_384  # kept of what a program prints
GRACE_SECONDS = 20.0  # for starting and ending the processes around a program, on a busy machine

CHILD = str(pathlib.Path(__file__).with_name('sandbox_child.py'))
# The environment of a program: nothing of ours. A numerical library must not start a thread per core of a large host.
ENVIRONMENT = {'OPENBLAS_NUM_THREADS': '1', 'OMP_NUM_THREADS': '1'}
PROBE = """
import collections, hashlib, json, math, random, re, typing
assert math.sqrt(collections.Counter('aaaa')['a']) == 2
"""


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one program may use.

  Attributes:
    seconds: wall time from the moment the program starts; CPU time is limited to one second more.
    memory_bytes: address space of each process.
    file_bytes: size of each file it writes.
    disk_bytes: all its files together (they live in memory where namespaces are permitted).
    processes: processes and threads together.
    open_files: file descriptors.
  """

  seconds: float = 5.0
  memory_bytes: int = 1 << 30
  file_bytes: int = 16 << 20
  disk_bytes: int = 64 << 20
  processes: int = 16
  open_files: int = 64


@dataclasses.dataclass(frozen=True)
class Result:
  """How one program ended.

  Attributes:
    kind: 'passed' (ran to its end), 'wrong' (AssertionError), 'exception' (any other error, exit or signal),
      'timeout', or 'harness_error' (the sandbox itself failed: says nothing about the program).
    detail: the exception, or what else happened; one line.
    seconds: wall time of the program.
    output: the first `OUTPUT_BYTES` of its standard output and error.
  """

  kind: str
  detail: str
  seconds: float
  output: str

  @property
  def passed(self) -> bool:
    return self.kind == 'passed'


@dataclasses.dataclass(frozen=True)
class Isolation:
  """What stands between a program and the machine: how files, network and processes are kept apart."""

  mode: str
  files: str
  network: str
  processes: str

  def __str__(self) -> str:
    return f'{self.mode}: files: {self.files}; network: {self.network}; processes: {self.processes}'


def run(program: str, limits: Limits = Limits(), modes: tuple[str, ...] = MODES) -> Result:
  """Runs Python source in the strongest of `modes` that works here. Never raises for what the program does."""
  report, output = _run_in(isolation(modes).mode, program, limits)
  return Result(report['kind'], report['detail'], report['seconds'], output)


@functools.cache
def isolation(modes: tuple[str, ...] = MODES) -> Isolation:
  """The first of `modes` that works here, found by running a small program in each."""
  if sys.platform != 'linux':
    raise InputError(f'running completions needs the isolation of a Linux kernel, this is {sys.platform}: '
                     'write them with --samples_out and score the file on Linux')
  failures = []
  for mode in modes:
    report, _ = _run_in(mode, PROBE, Limits(seconds=20.0))
    if report['kind'] == 'passed':
      return Isolation(mode, **report['isolation'])
    failures.append(f'{mode}: {report["detail"]}')
  raise InputError('running completions needs user namespaces or Landlock, and neither works here '
                   f'({"; ".join(failures)}): score the samples where one is permitted and, as root, '
                   'with an interpreter that every user may read')


def _run_in(mode: str, program: str, limits: Limits) -> tuple[dict, str]:
  """The report of the child process, and what the program printed."""
  with (
      tempfile.TemporaryDirectory(prefix='completion-', ignore_cleanup_errors=True) as directory,
      tempfile.TemporaryFile() as request,
  ):
    request.write(json.dumps(_request(mode, program, limits, directory)).encode())
    request.seek(0)
    report_read, report_write = os.pipe()
    try:
      process = subprocess.Popen(
          [sys.executable, '-I', '-S', '-B', '-u', '-X', 'utf8', CHILD, str(report_write)], stdin=request,
          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[report_write], env=ENVIRONMENT, cwd=directory,
          start_new_session=True)
    except OSError as error:
      os.close(report_read)
      return _harness_error(f'cannot start {sys.executable}: {error}'), ''
    finally:
      os.close(report_write)
    try:
      report, output = _listen(process, report_read, limits.seconds + GRACE_SECONDS)
    finally:
      os.close(report_read)
      _end(process)
  return _parse(report, output, process.returncode), output.decode(errors='replace')


def _request(mode: str, program: str, limits: Limits, directory: str) -> dict:
  paths = sysconfig.get_paths()
  return {
      'mode': mode, 'program': program, 'directory': directory, 'wall_seconds': limits.seconds,
      'cpu_seconds': math.ceil(limits.seconds) + 1, 'memory_bytes': limits.memory_bytes,
      'file_bytes': limits.file_bytes, 'disk_bytes': limits.disk_bytes, 'processes': limits.processes,
      'open_files': limits.open_files, 'libraries': sorted({paths['purelib'], paths['platlib']})}


def _listen(process: subprocess.Popen, report_fd: int, seconds: float) -> tuple[bytes | None, bytes]:
  """The report, once its writers are gone (None after `seconds`); output beyond the cap is read and dropped."""
  received = {report_fd: b'', process.stdout.fileno(): b''}
  with selectors.DefaultSelector() as selector:
    for fd in received:
      selector.register(fd, selectors.EVENT_READ)
    while report_fd in selector.get_map() and seconds > 0:
      start = time.monotonic()
      for key, _ in selector.select(min(seconds, 1.0)):
        data = os.read(key.fd, 65536)
        received[key.fd] = (received[key.fd] + data)[:OUTPUT_BYTES]
        if not data:
          selector.unregister(key.fd)
      seconds -= min(time.monotonic() - start, 1.0)  # a machine that stood still meanwhile costs a second at most
    ended = report_fd not in selector.get_map()
  return received[report_fd] if ended else None, received[process.stdout.fileno()]


def _end(process: subprocess.Popen):
  """Ends the launcher and, by the pid namespace or its death signal, all below it."""
  try:
    process.wait(timeout=1)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
  process.stdout.close()
  process.wait()


def _parse(report: bytes | None, output: bytes, returncode: int) -> dict:
  if report:
    return json.loads(report)
  if report is None:
    return _harness_error(f'the processes around the program did not end within {GRACE_SECONDS:g} s')
  if returncode == -signal.SIGKILL:
    return _harness_error('the process that watches the program was killed, by it or for want of memory')
  return _harness_error(f'exit status {returncode}: {output.decode(errors="replace").strip()[-300:]}')


def _harness_error(detail: str) -> dict:
  return {'kind': 'harness_error', 'detail': detail, 'seconds': 0.0}
