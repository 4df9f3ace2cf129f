"""Chat templates: messages -> text, by the Jinja source that a model comes with."""

from collections.abc import Sequence
import datetime
import json

from jinja2 import ext, nodes, sandbox

from models.errors import InputError


def _raise_exception(message: str):
  raise InputError(f'the chat template refuses these messages: {message}')


def _strftime_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


def _tojson(value, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
  """Jinja's own `tojson` escapes for HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(ext.Extension):
  """`{% generation %}` marks what the model wrote, for training; here it changes nothing."""

  tags = frozenset({'generation'})

  def parse(self, parser):
    line = next(parser.stream).lineno
    body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
    return nodes.CallBlock(self.call_method('_body'), [], [], body).set_lineno(line)

  def _body(self, caller) -> str:
    return caller()


def render(template: str, messages: Sequence[dict[str, str]], **variables) -> str:
  """Renders a chat template in a sandbox.

  Raises:
    InputError: if the template is at fault or refuses the messages.
  """
  environment = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation])
  environment.filters['tojson'] = _tojson
  environment.globals |= {'raise_exception': _raise_exception, 'strftime_now': _strftime_now}
  try:
    return environment.from_string(template).render(messages=messages, **variables)
  except InputError:
    raise
  except Exception as error:  # a template may do anything: add a string to nothing, for example
    raise InputError(f'the chat template cannot be rendered: {error}') from None
