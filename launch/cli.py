"""What every command shares: flags, one-line errors, exit statuses, JSON output.

Exit status 2: the user can mend it (one line says how). Status 1: the run itself failed. 42: start it again (SIGTERM
came, or another process of the job was lost). 0: all well.
"""

from collections.abc import Callable, Sequence
import functools
import os
import sys
from typing import Any, TextIO

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from launch import distributed, results
from launch.errors import RunError
from launch.preemption import RESTART_STATUS, Preempted
from launch.start_up import blame, leave, leave_together, show_banner, start_up
from models.errors import InputError

OURS = ('launch.', 'experiments.')
# The sections of a config that decodes.
DECODING = ('target', 'drafter', 'accept', 'engine', 'mesh', 'sampling', 'data')

JSON_OUT = flags.DEFINE_string('json_out', None, 'Write the result as JSON to this file; - for standard output.')


def define_config(default: str | None = None) -> flags.FlagHolder:
  """Defines `--config=FILE:variant`, with dotted overrides such as --config.engine.gamma=7."""
  return config_flags.DEFINE_config_file('config', default, 'Config file, with an optional :variant.', lock_config=True)


def config_of(holder: flags.FlagHolder, sections: Sequence[str] = DECODING) -> ConfigDict:
  """The config that was asked for; `sections` are those that the command reads.

  Raises:
    InputError: if none was, or one of another kind.
  """
  config = holder.value
  if config is None:
    raise InputError('no config: pass --config=FILE:variant, for example --config=configs/smollm2.py:lookup')
  if not isinstance(config, ConfigDict):  # config_flags hands out a stand-in when it cannot load the file
    path = config_flags.get_config_filename(flags.FLAGS[holder.name])
    raise InputError(f'cannot load the config file {path}: check the path and that it defines get_config')
  missing = [section for section in sections if section not in config]
  if missing:
    path = config_flags.get_config_filename(flags.FLAGS[holder.name])
    raise InputError(f'{path} has no {missing[0]!r}, so it is no config of this command, which reads '
                     f'{", ".join(sections)}: pass another --config')
  show_banner(config)
  return config


def refuse_job() -> None:
  """For commands that one host runs.

  Raises:
    InputError: on several processes.
  """
  if distributed.joined():
    raise InputError('this command does not run on several processes: start it on one host')


def run(main: Callable[[], int | None], alone: bool = False) -> None:
  """Parses the flags, runs `main` and exits with its status; wrong input ends in one line and status 2.

  Args:
    main: the command.
    alone: it uses no devices, so it waits for no other processes.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  logging.set_verbosity(logging.WARNING)
  app.run(functools.partial(_guarded, main, alone), flags_parser=_parse_flags)


def _guarded(main: Callable[[], int | None], alone: bool, argv: Sequence[str]) -> None:
  try:
    if len(argv) > 1:
      raise InputError(f'unexpected argument {argv[1]!r}: options start with --')
    results.check_writable(JSON_OUT.value)
    start_up(alone)
    status = main()
  except InputError as error:
    _fail(error)
  except RunError as error:
    _fail(error, status=1)
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone; nothing is left to say
    status = 0
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    status = 130
  except Preempted as error:
    print(error, file=sys.stderr)
    status = RESTART_STATUS
  except Exception as error:
    if not distributed.joined():
      raise
    leave(blame(error))
  leave_together(status or 0)


class _Help(app.HelpFlag):
  """Lists the flags of all our modules, and ends with status 0: absl's own lists the main module's, and ends with 1."""

  def __init__(self):
    super().__init__()
    self.allow_override = True  # absl has defined its own by now

  def parse(self, argument: Any) -> None:
    if self._parse(argument):
      modules = [name for name in sorted(flags.FLAGS.flags_by_module_dict()) if name.startswith(OURS)]
      print(sys.modules['__main__'].__doc__, *map(flags.FLAGS.module_help, [sys.argv[0], *modules]), sep='\n')
      sys.exit(0)


def _parse_flags(argv: Sequence[str]) -> list[str]:
  """Anything that goes wrong here, in a config file's get_config included, is what the user passed."""
  flags.DEFINE_flag(_Help())
  try:
    return flags.FLAGS(list(argv))
  except Exception as error:
    _fail(error)


def _fail(error: Exception, status: int = 2) -> None:
  print(f'error: {_one_line(error)}', file=sys.stderr)
  leave(status)


def _one_line(error: Exception) -> str:
  """The message without line breaks; of a traceback inside it (config files) the last line."""
  while error.args and isinstance(error.args[0], Exception):  # ml_collections wraps a KeyError in an AttributeError
    error = error.args[0]
  message = str(error.args[0] if error.args else error).strip()
  if 'Traceback' in message:
    message = message.splitlines()[-1].partition(': ')[2]
  if isinstance(error, KeyError | AttributeError):
    name, _, suggestion = message.partition('\n')
    field = name.strip("'")
    message = '. '.join(filter(None, (f'no such config field: {field}', suggestion)))
  return ' '.join(message.split()) or type(error).__name__


def output() -> TextIO:
  """Where text for a person goes: standard output, or beside it when the JSON goes there.

  Of a job's processes one speaks.
  """
  if not distributed.speaks():
    return _nowhere()
  return sys.stderr if JSON_OUT.value == '-' else sys.stdout


@functools.cache
def _nowhere() -> TextIO:
  return open(os.devnull, 'w')


def say(*parts: Any) -> None:
  print(*parts, file=output(), flush=True)


def write_json(payload: Any) -> None:
  """Writes the payload where --json_out says, if anywhere."""
  if JSON_OUT.value is not None and distributed.speaks():
    results.write_json(JSON_OUT.value, payload)
