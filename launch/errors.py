"""Failures of a run, as opposed to wrong input."""

import sys


class RunError(RuntimeError):
  """The run failed, or its numbers mean nothing. The message is one line.

  Commands print it without a traceback and end with exit status 1.
  """


def failed(error: RunError) -> int:
  """Says what failed, and gives the exit status."""
  print(f'error: {error}', file=sys.stderr)
  return 1
