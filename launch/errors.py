"""Failures of a run, as opposed to wrong input."""


class RunError(RuntimeError):
  """The run failed, or its numbers mean nothing. The message is one line.

  Commands print it without a traceback and end with exit status 1.
  """
