"""Decodes prompts and shows the texts, with what speculation did to them.

    python -m launch.generate --config=configs/smollm2.py:lookup --prompt="Write a haiku about the sea."
    python -m launch.generate --config=configs/smollm2.py --prompts=FILE.txt --raw --json_out=-

A text is shown as it grows; with engine.batch above 1 so many prompts are decoded together, and their texts are shown
when all have ended. On a terminal, accepted drafted tokens are green, corrections after a rejection red, bonus tokens
blue; tokens of steps without a draft are plain.
"""

from collections.abc import Sequence
import itertools
import sys
from typing import Any

from absl import flags
import jax

from launch import cli
from launch.prompts import Prompt, load_prompts
from launch.session import Session, reason_name
from launch.table import is_terminal
from launch.up_to_stop import UpToStop
from models.errors import InputError
from models.tokenizer import StreamDecoder
from specdec.commit import Origin
from specdec.engine import Request, Result, to_result
from specdec.metrics import Metrics

COLOURS = {Origin.ACCEPTED: '\033[32m', Origin.CORRECTED: '\033[31m', Origin.BONUS: '\033[34m'}
RESET = '\033[0m'
LEGEND = f'{COLOURS[Origin.ACCEPTED]}accepted{RESET} {COLOURS[Origin.CORRECTED]}corrected{RESET} ' \
         f'{COLOURS[Origin.BONUS]}bonus{RESET} plain'


class Display:
  """Shows the text of one row as its tokens come: what `Session.text` makes of them, in colours of their origins."""

  def __init__(self, session: Session, colour: bool):
    self._decoder, self._cut = StreamDecoder(session.tokenizer, continues=True), UpToStop(session.stops)
    self._colour = colour
    self._origins: list[Origin] = []  # of the characters that are decoded and not shown yet

  def add(self, tokens: Sequence[int], origins: Sequence[Origin]) -> None:
    for token, origin in zip(tokens, origins, strict=True):
      self._feed(self._decoder.feed([token]), origin)

  def finish(self) -> None:
    self._feed(self._decoder.finish(), Origin.PLAIN)
    self._show(self._cut.finish())
    cli.say()

  def _feed(self, text: str, origin: Origin) -> None:
    self._origins += [origin] * len(text)
    self._show(self._cut.feed(text))

  def _show(self, text: str) -> None:
    origins, self._origins = self._origins[:len(text)], self._origins[len(text):]
    out = cli.output()
    for origin, run in itertools.groupby(zip(text, origins, strict=True), key=lambda pair: pair[1]):
      part = ''.join(character for character, _ in run)
      out.write(f'{COLOURS[origin]}{part}{RESET}' if self._colour and origin in COLOURS else part)
    out.flush()


def main() -> int:
  config = cli.config_of(CONFIG)
  with config.unlocked():
    _apply_flags(config)
  prompts = load_prompts(config.data)
  session = Session.from_config(config)
  batches = session.requests(prompts)
  colour = is_terminal(cli.output()) if COLOUR.value is None else COLOUR.value
  if colour:
    cli.say(LEGEND)
  if PROFILE_DIR.value is not None:
    _profile(session, batches[0][1], PROFILE_DIR.value)
  rows = [row for chunk, request in batches for row in _decode(session, chunk, request, colour)]
  cli.write_json(rows)
  return 1 if any(row['reason'] == 'error' for row in rows) else 0


def _profile(session: Session, request: Request, directory: str) -> None:
  """Traces the decoding of one batch, compiled before; what is timed under the profiler is slower than it is."""
  session.warm_up(request)
  params = session.params_for(request)
  with jax.profiler.trace(directory):
    session.engine.generate(params, request)


def _apply_flags(config) -> None:
  """Flags are shorthands for fields of `data`."""
  if PROMPT.value is not None and PROMPTS.value is not None:
    raise InputError('--prompt and --prompts exclude each other: leave one out')
  if PROMPT.value is not None:
    config.data.kind, config.data.text = 'text', PROMPT.value
  if PROMPTS.value is not None:
    config.data.kind, config.data.path, config.data.limit = 'file', PROMPTS.value, None
  if RAW.value is not None:
    config.data.form = 'raw' if RAW.value else 'chat'


def _decode(session: Session, prompts: Sequence[Prompt], request: Request, colour: bool) -> list[dict[str, Any]]:
  """Decodes and shows one batch; its facts as JSON rows."""
  if len(request.prompts) == 1:
    result = _stream(session, request, Display(session, colour))
    _say_counts(session, result, 0)
  else:
    result = session.engine.generate(session.params_for(request), request)
    for row in range(len(prompts)):
      display = Display(session, colour)
      display.add(result.tokens[row], result.origins[row])
      display.finish()
      _say_counts(session, result, row)
  return [_facts(session, prompt, result, row) for row, prompt in enumerate(prompts)]


def _stream(session: Session, request: Request, display: Display) -> Result:
  """Decodes a single row, which is shown step by step."""
  seen = 0
  for state in session.stream(request):
    result = to_result(state)
    display.add(result.tokens[0][seen:], result.origins[0][seen:])
    seen = len(result.tokens[0])
  display.finish()
  return result


def _say_counts(session: Session, result: Result, row: int) -> None:
  metrics = result.metrics[row]
  cli.say(f'[{metrics.emitted} tokens in {metrics.passes} target passes: {metrics.tokens_per_pass:.2f} tokens per '
          f'pass; drafted {metrics.drafted}, accepted {metrics.accepted}; '
          f'ended by {reason_name(result.reasons[row])}]')
  _warn_if_idle(session, metrics)


def _warn_if_idle(session: Session, metrics: Metrics) -> None:
  if session.engine.gamma > 0 and metrics.drafted == 0 and metrics.emitted > 1:
    print('warning: speculation was asked for, but nothing was drafted: this was plain decoding', file=sys.stderr)


def _facts(session: Session, prompt: Prompt, result: Result, row: int) -> dict[str, Any]:
  metrics, tokens = result.metrics[row], result.tokens[row]
  return {
      'id': prompt.id, 'prompt': prompt.text, 'text': session.text(tokens), 'token_ids': tokens,
      'origins': [origin.name.lower() for origin in result.origins[row]],
      'logprobs': result.logprobs[row] if result.logprobs else None, 'reason': reason_name(result.reasons[row]),
      'drafter': session.config.drafter.name, 'rule': session.engine.rule.name, 'gamma': session.engine.gamma,
      'tokens_per_pass': metrics.tokens_per_pass, 'passes': metrics.passes, 'drafted': metrics.drafted,
      'accepted': metrics.accepted, 'accepted_per_position': metrics.accepted_per_position}


if __name__ == '__main__':
  CONFIG = cli.define_config()
  PROMPT = flags.DEFINE_string('prompt', None, 'Text to continue or, in chat form, to answer.')
  PROMPTS = flags.DEFINE_string('prompts', None, 'File of prompts: .txt with one a line, or .jsonl.')
  RAW = flags.DEFINE_bool('raw', None, 'Continue the text as it is; --noraw wraps it in the chat template.')
  COLOUR = flags.DEFINE_bool('colour', None, 'Colours; on a terminal by default.')
  PROFILE_DIR = flags.DEFINE_string(
      'profile_dir', None, 'Trace one decoding of the first batch into this directory; to look at it: '
      'pip install xprof, xprof --logdir=DIRECTORY.')
  cli.run(main)
