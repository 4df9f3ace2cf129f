"""Finds out whether all processes of a job are there, and which are not, before JAX connects them.

JAX's own connection ends a process that waited in vain with a stack trace that names nobody. Process 0 listens where
its coordinator will; the others say who they are, and all are told the same outcome.
"""

import contextlib
import os
import socket
import time

from models.errors import InputError

RETRY_SECONDS = 0.2
HELLO_SECONDS = 5  # a caller that says nothing for so long is none of ours
SLACK_SECONDS = 10  # beyond the timeout, for an outcome to travel
ALL_HERE = 'all here'
REMEDY = 'start the same command on every host (on TPU VMs with --worker=all), and let all of them reach'


def call_roll(coordinator: str, num_processes: int, process_id: int, timeout: float) -> None:
  """Returns, in every process, when all have come.

  Args:
    coordinator: host:port of process 0.
    num_processes, process_id: of this process; ids start at 0.
    timeout: seconds that process 0 waits for the others, and the others for process 0.

  Raises:
    InputError: where some have not; it names them.
  """
  host, _, port = coordinator.rpartition(':')
  host = host.strip('[]')
  if process_id == 0:
    outcome = _collect(int(port), num_processes, timeout)
  else:
    outcome = _report(host, int(port), f'{process_id} of {num_processes}', timeout)
  if outcome != ALL_HERE:
    raise InputError(f'{outcome}: {REMEDY} {coordinator}')


def _collect(port: int, num_processes: int, timeout: float) -> str:
  """Process 0: waits for the others, tells them the outcome and returns it."""
  deadline = time.monotonic() + timeout
  here: dict[int, socket.socket] = {}
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(_listen(port))
    outcome = ALL_HERE
    while outcome == ALL_HERE and len(here) < num_processes - 1:
      server.settimeout(max(deadline - time.monotonic(), 0.001))
      try:
        caller = stack.enter_context(server.accept()[0])
      except TimeoutError:
        outcome = _absent(here, num_processes, timeout)
        break
      outcome = _welcome(caller, here, num_processes)
    for caller in here.values():
      with contextlib.suppress(OSError):
        caller.sendall(f'{outcome}\n'.encode())
    for caller in here.values():  # they hang up first, so that the port is free at once
      with contextlib.suppress(OSError):
        caller.recv(1)
  return outcome


def _listen(port: int) -> socket.socket:
  dual = socket.has_dualstack_ipv6()
  try:
    return socket.create_server(('', port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual)
  except OSError as error:
    raise InputError(f'cannot listen on port {port} for the others: {os.strerror(error.errno)}; choose another '
                     'port with --coordinator') from error


def _welcome(caller: socket.socket, here: dict[int, socket.socket], num_processes: int) -> str:
  """Notes who has come; the outcome if that settles it. Callers who say anything else are passed over."""
  caller.settimeout(HELLO_SECONDS)
  try:
    words = caller.makefile('r', encoding='ascii', newline='\n').readline(64).split()
    process_id, count = int(words[0]), int(words[2])
  except (OSError, ValueError, IndexError):
    return ALL_HERE
  here.setdefault(process_id, caller)
  if count != num_processes:
    return f'process {process_id} was started as one of {count} processes, process 0 as one of {num_processes}'
  if here[process_id] is not caller:
    caller.sendall(f'two processes were started as process {process_id}\n'.encode())
    return f'two processes were started as process {process_id}'
  return ALL_HERE


def _absent(here: dict[int, socket.socket], num_processes: int, timeout: float) -> str:
  missing = [str(process) for process in range(1, num_processes) if process not in here]
  names = f'process {missing[0]}' if len(missing) == 1 else f'processes {", ".join(missing)}'
  return f'{names} of {num_processes} did not join within {timeout:g} s'


def _report(host: str, port: int, hello: str, timeout: float) -> str:
  """The other processes: says who this is and returns the outcome."""
  deadline = time.monotonic() + timeout
  while time.monotonic() < deadline:
    try:
      with socket.create_connection((host, port), timeout=HELLO_SECONDS) as connection:
        connection.sendall(f'{hello}\n'.encode())
        connection.settimeout(timeout + SLACK_SECONDS)
        if outcome := connection.makefile('r', encoding='utf-8').readline().strip():
          return outcome
    except OSError:
      pass
    time.sleep(RETRY_SECONDS)
  return f'process 0 of {hello.rpartition(" ")[2]} did not answer within {timeout:g} s'
