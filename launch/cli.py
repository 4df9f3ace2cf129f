"""What every command shares: flags, one-line errors, exit statuses, JSON output.

Exit status 2: the user can mend it (one line says how). Status 1: the run itself failed. 0: all well.
"""

from collections.abc import Callable, Sequence
import functools
import os
import sys
from typing import Any, TextIO

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from launch import results
from models.errors import InputError

JSON_OUT = flags.DEFINE_string('json_out', None, 'Write the result as JSON to this file; - for standard output.')


def define_config(default: str | None = None) -> flags.FlagHolder:
  """Defines `--config=FILE:variant`, with dotted overrides such as --config.engine.gamma=7."""
  return config_flags.DEFINE_config_file('config', default, 'Config file, with an optional :variant.', lock_config=True)


def config_of(holder: flags.FlagHolder) -> ConfigDict:
  """The config that was asked for.

  Raises:
    InputError: if none was.
  """
  config = holder.value
  if config is None:
    raise InputError('no config: pass --config=FILE:variant, for example --config=configs/smollm2.py:lookup')
  if not isinstance(config, ConfigDict):  # config_flags hands out a stand-in when it cannot load the file
    path = config_flags.get_config_filename(flags.FLAGS[holder.name])
    raise InputError(f'cannot load the config file {path}: check the path and that it defines get_config')
  return config


def run(main: Callable[[], int | None]) -> None:
  """Parses the flags, runs `main` and exits with its status; wrong input ends in one line and status 2."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  logging.set_verbosity(logging.WARNING)
  app.run(functools.partial(_guarded, main), flags_parser=_parse_flags)


def _guarded(main: Callable[[], int | None], argv: Sequence[str]) -> None:
  try:
    if len(argv) > 1:
      raise InputError(f'unexpected argument {argv[1]!r}: options start with --')
    results.check_writable(JSON_OUT.value)
    status = main()
  except InputError as error:
    _fail(error)
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone; nothing is left to say
    status = 0
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    status = 130
  sys.exit(status or 0)


def _parse_flags(argv: Sequence[str]) -> list[str]:
  """Anything that goes wrong here, in a config file's get_config included, is what the user passed."""
  try:
    return flags.FLAGS(list(argv))
  except Exception as error:
    _fail(error)


def _fail(error: Exception) -> None:
  print(f'error: {_one_line(error)}', file=sys.stderr)
  sys.exit(2)


def _one_line(error: Exception) -> str:
  """The message without line breaks; of a traceback inside it (config files) the last line."""
  message = str(error.args[0] if error.args else error).strip()
  if 'Traceback' in message:
    message = message.splitlines()[-1].partition(': ')[2]
  if isinstance(error, KeyError | AttributeError):  # quoted twice on its way here
    message = 'no such config field: ' + message.replace('\\n', ' ').replace('\\', '').strip('"\'')
  return ' '.join(message.split()) or type(error).__name__


def output() -> TextIO:
  """Where text for a person goes: standard output, or beside it when the JSON goes there."""
  return sys.stderr if JSON_OUT.value == '-' else sys.stdout


def say(*parts: Any) -> None:
  print(*parts, file=output(), flush=True)


def write_json(payload: Any) -> None:
  """Writes the payload where --json_out says, if anywhere."""
  if JSON_OUT.value is not None:
    results.write_json(JSON_OUT.value, payload)
