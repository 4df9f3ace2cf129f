"""SIGTERM, the notice that this machine will be taken away: a run ends soon, and asks to be started again.

A command ends at once, unless it is in a block that `finishing` opened: then it is given some seconds to come to a
point from which a restart can go on. Programs on the device let no Python run in the main thread, so a thread of its
own waits for the signal.
"""

from collections.abc import Iterator
import contextlib
import os
import signal
import sys
import threading

RESTART_STATUS = 42  # by convention of TPU job managers: start me again; other statuses below 127 are final
GRACE_SECONDS = 20.0  # of the 30 s that Kubernetes leaves between SIGTERM and SIGKILL

_requested = threading.Event()
_finishing = threading.Event()


class Preempted(Exception):
  """The run stops here because of SIGTERM. Commands end with RESTART_STATUS."""

  def __str__(self) -> str:
    return 'ended by SIGTERM: start the same command again to go on'


def watch() -> None:
  """From now on SIGTERM is dealt with. To be called in the main thread, after JAX has joined a job and taken it."""
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  signal.signal(signal.SIGTERM, lambda number, frame: None)
  signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # written to by the C handler, whatever the threads do
  threading.Thread(target=_wait, args=(reader,), daemon=True).start()


def requested() -> bool:
  """Whether SIGTERM has come."""
  return _requested.is_set()


@contextlib.contextmanager
def finishing() -> Iterator[None]:
  """A block in which SIGTERM leaves GRACE_SECONDS to see `requested` and raise `Preempted`."""
  _finishing.set()
  try:
    yield
  finally:
    _finishing.clear()


def _wait(reader: int) -> None:
  while signal.SIGTERM not in os.read(reader, 64):
    pass
  _requested.set()
  if _finishing.is_set():
    threading.Event().wait(GRACE_SECONDS)
  print(Preempted(), file=sys.stderr, flush=True)
  os._exit(RESTART_STATUS)
