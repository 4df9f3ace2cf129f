"""The inside of `experiments/sandbox.py`: isolates itself, runs one program, reports how it ended.

Started as `python -I -S sandbox_child.py REPORT_FD` with the request as JSON on standard input. Standard library
only, since it runs before and without everything else. Up to three processes:

    launcher    enters the namespaces and waits; outside, so that the program cannot see it
    monitor     pid 1 of the new pid namespace: when it ends, the kernel kills whatever the program left running
    program     the code under test, without privileges and under limits

Under Landlock launcher and monitor are one, and an audit hook refuses what Landlock does not cover: new processes,
modes of files, datagrams. Sockets are refused by the hook in both modes.
"""

import json
import os
import resource
import signal
import sys
import time
import types

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
import sandbox_isolation

sys.path.pop()

DETAIL_CHARS = 300

# Audit events that end in PermissionError: always, and where Landlock alone guards the rest.
REFUSED = ('socket.',)
REFUSED_UNDER_LANDLOCK = (
    'ctypes.', 'os.fork', 'os.posix_spawn', 'os.system', 'os.exec', 'subprocess.', 'pty.', 'os.kill',
    'signal.pthread_kill', 'os.truncate', 'os.chmod', 'os.chown', 'os.utime', 'os.setxattr', 'os.removexattr')


# The program


def limit_resources(request: dict):
  if os.getuid() == 0:
    raise PermissionError('the kernel does not limit the processes of user 0')
  cpu = request['cpu_seconds']
  limits = {
      resource.RLIMIT_CPU: (cpu, cpu + 1), resource.RLIMIT_AS: request['memory_bytes'],
      resource.RLIMIT_FSIZE: request['file_bytes'], resource.RLIMIT_NPROC: request['processes'],
      resource.RLIMIT_NOFILE: request['open_files'], resource.RLIMIT_CORE: 0}
  for name, value in limits.items():
    soft, hard = value if isinstance(value, tuple) else (value, value)
    ceiling = resource.getrlimit(name)[1]
    if ceiling != resource.RLIM_INFINITY:
      soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(name, (soft, hard))


def refuse_events(prefixes: tuple[str, ...]):
  def hook(event, _):
    if event.startswith(prefixes):
      raise PermissionError(f'{event} is refused in the sandbox')
  sys.addaudithook(hook)


def describe(error: BaseException) -> str:
  try:
    return f'{type(error).__name__}: {error}'[:DETAIL_CHARS]
  except BaseException:
    return type(error).__name__[:DETAIL_CHARS]


def execute(source: str) -> tuple[str, str]:
  """Runs the source as a module named `program`, as the benchmark does: not as `__main__`."""
  module = types.ModuleType('program')
  sys.modules['program'] = module
  try:
    exec(compile(source, 'program.py', 'exec'), module.__dict__)
    return 'passed', ''
  except AssertionError as error:
    return 'wrong', describe(error)
  except BaseException as error:
    return 'exception', describe(error)


def run_program(request: dict, verdict_fd: int, token: str):
  """Never returns. Without a verdict that carries the token the program has not passed, whatever its exit status."""
  try:
    os.setsid()
    sandbox_isolation.confine_program(request)
    limit_resources(request)
    sys.path += request['libraries']
    landlock = 'landlock_abi' in request
    refuse_events(REFUSED + (REFUSED_UNDER_LANDLOCK if landlock else ()))
  except BaseException as error:
    kind, detail = 'harness_error', describe(error)
  else:
    pid = os.getpid()
    kind, detail = execute(request['program'])
    if os.getpid() != pid:
      os._exit(0)  # a child that the program forked has come to its end
  os.write(verdict_fd, json.dumps([token, kind, detail]).encode())
  os._exit(0)


# The monitor


def descendants() -> list[int]:
  """Processes whose parent is this one: orphans too, since a subreaper inherits them."""
  found = []
  for name in filter(str.isdigit, os.listdir('/proc')):
    try:
      with open(f'/proc/{name}/stat') as file:
        if int(file.read().rpartition(')')[2].split()[1]) == os.getpid():
          found.append(int(name))
    except OSError:
      continue  # ended meanwhile
  return found


def kill_descendants():
  while children := descendants():
    for pid in children:
      os.kill(pid, signal.SIGKILL)
    for pid in children:
      os.waitpid(pid, 0)


def bytes_below(directory: str) -> int:
  total = 0
  for parent, _, names in os.walk(directory):
    for name in names:
      try:
        total += os.lstat(os.path.join(parent, name)).st_blocks * 512
      except OSError:
        continue  # gone meanwhile
  return total


def watch(pid: int, request: dict) -> tuple[int, float] | str:
  """Wait status and CPU seconds of `pid`, or the limit it broke. Reaps orphans on the way."""
  left, pause = request['wall_seconds'], 0.001
  while left > 0:
    start = time.monotonic()
    ended, status, usage = os.wait4(-1, os.WNOHANG)
    if ended == pid:
      return status, usage.ru_utime + usage.ru_stime
    if not ended:
      time.sleep(pause)
      pause = min(2 * pause, 0.02)
      if 'landlock_abi' in request and bytes_below(request['directory']) > request['disk_bytes']:
        return 'disk'
    left -= min(time.monotonic() - start, 1.0)  # a machine that stood still meanwhile costs a second at most
  return 'time'


def read_verdict(verdict_fd: int, token: str) -> tuple[str, str] | None:
  os.set_blocking(verdict_fd, False)
  try:
    received, kind, detail = json.loads(os.read(verdict_fd, 65536))
    return (kind, detail) if received == token else None
  except (OSError, ValueError, TypeError):
    return None


def judge(outcome: tuple[int, float] | str, verdict: tuple[str, str] | None, request: dict) -> tuple[str, str]:
  if outcome == 'time':
    return 'timeout', f'ran past {request["wall_seconds"]:g} s'
  if outcome == 'disk':
    return 'exception', f'wrote more than {request["disk_bytes"]} bytes'
  status, cpu = outcome
  if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) == signal.SIGXCPU or cpu >= request['cpu_seconds']:
      return 'timeout', f'used {request["cpu_seconds"]} s of CPU time'
    return 'exception', f'ended by signal {os.WTERMSIG(status)} ({signal.strsignal(os.WTERMSIG(status))})'
  code = os.waitstatus_to_exitcode(status)
  return verdict if verdict and code == 0 else ('exception', f'exit status {code} before the tests had ended')


def monitor(request: dict) -> tuple[str, str, float]:
  verdict_read, verdict_write = os.pipe()
  token, start = os.urandom(16).hex(), time.monotonic()
  pid = os.fork()
  if not pid:
    os.close(request['report_fd'])
    os.close(verdict_read)
    run_program(request, verdict_write, token)
  os.close(verdict_write)
  outcome = watch(pid, request)
  seconds = time.monotonic() - start
  if 'landlock_abi' in request:
    kill_descendants()
  return *judge(outcome, read_verdict(verdict_read, token), request), seconds


def main(report_fd: int):
  os.umask(0o022)
  request = json.load(sys.stdin) | {'report_fd': report_fd}
  null = os.open('/dev/null', os.O_RDONLY)
  os.dup2(null, 0)
  os.close(null)
  sandbox_isolation.die_with_parent()
  try:
    isolation = sandbox_isolation.MODES[request['mode']](request)
  except (OSError, AttributeError, KeyError) as error:  # forbidden, or unknown to this kernel or libc
    report = {'kind': 'harness_error', 'detail': f'no isolation by {request["mode"]}: {error}', 'seconds': 0.0}
  else:
    kind, detail, seconds = monitor(request)
    report = {'kind': kind, 'detail': detail, 'seconds': seconds, 'isolation': isolation}
  os.write(report_fd, json.dumps(report).encode())
  os._exit(0)


if __name__ == '__main__':
  main(int(sys.argv[1]))
