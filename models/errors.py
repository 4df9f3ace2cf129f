"""The one exception that a user can cause and mend."""


class InputError(ValueError):
  """Wrong input. The message is one line that says what to change.

  Commands print it without a traceback and end with exit status 2.
  """
