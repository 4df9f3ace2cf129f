"""Decodes prompts and shows the text as it grows, with what speculation did to it.

    python -m launch.generate --config=configs/smollm2.py:lookup --prompt="Write a haiku about the sea."
    python -m launch.generate --config=configs/smollm2.py --prompts=FILE.txt --raw --json_out=-

On a terminal, accepted drafted tokens are green, corrections after a rejection red, bonus tokens blue; tokens of steps
without a draft are plain.
"""

from collections.abc import Iterator
import dataclasses
import sys

from absl import flags
import jax

from launch import cli
from launch.prompts import Prompt, load_prompts
from launch.session import Session, reason_name
from models.tokenizer import StreamDecoder
from specdec.commit import Origin, Reason
from specdec.engine import Request
from specdec.metrics import Metrics

CONFIG = cli.define_config()
PROMPT = flags.DEFINE_string('prompt', None, 'Text to continue or, in chat form, to answer.')
PROMPTS = flags.DEFINE_string('prompts', None, 'File of prompts: .txt with one a line, or .jsonl.')
RAW = flags.DEFINE_bool('raw', None, 'Continue the text as it is; --noraw wraps it in the chat template.')
COLOUR = flags.DEFINE_bool('colour', None, 'Colours; on a terminal by default.')

COLOURS = {Origin.ACCEPTED: '\033[32m', Origin.CORRECTED: '\033[31m', Origin.BONUS: '\033[34m'}
RESET = '\033[0m'
LEGEND = f'{COLOURS[Origin.ACCEPTED]}accepted{RESET} {COLOURS[Origin.CORRECTED]}corrected{RESET} ' \
         f'{COLOURS[Origin.BONUS]}bonus{RESET} plain'


@dataclasses.dataclass
class Live:
  """The state of one streamed row, read back after each step."""

  tokens: list[int]
  origins: list[Origin]
  reason: Reason
  metrics: Metrics | None


def main() -> int:
  config = cli.config_of(CONFIG)
  with config.unlocked():
    _apply_flags(config)
  prompts = load_prompts(config.data)
  session = Session.from_config(config)
  colour = COLOUR.value if COLOUR.value is not None else cli.output().isatty()
  if colour:
    cli.say(LEGEND)
  rows = [_decode(session, prompt, index, colour) for index, prompt in enumerate(prompts)]
  cli.write_json(rows)
  return 1 if any(row['reason'] == 'error' for row in rows) else 0


def _apply_flags(config) -> None:
  """Flags are shorthands for fields of `data`."""
  if PROMPT.value is not None:
    config.data.kind, config.data.text = 'text', PROMPT.value
  if PROMPTS.value is not None:
    config.data.kind, config.data.path, config.data.limit = 'file', PROMPTS.value, None
  if RAW.value is not None:
    config.data.form = 'raw' if RAW.value else 'chat'


def _decode(session: Session, prompt: Prompt, index: int, colour: bool) -> dict:
  """Streams one prompt to the terminal; its facts as a JSON row."""
  request = session.request([prompt], [session.config.sampling.seed + index])
  decoder = StreamDecoder(session.tokenizer)
  for row, fresh in _watch(session, request):
    live = row
    for token, origin in fresh:
      _show(decoder.feed([token]), origin, colour)
  _show(decoder.finish() + '\n', Origin.PLAIN, colour)
  metrics = live.metrics
  cli.say(f'[{metrics.emitted} tokens in {metrics.passes} target passes: {metrics.tokens_per_pass:.2f} tokens per '
          f'pass; drafted {metrics.drafted}, accepted {metrics.accepted}; ended by {reason_name(live.reason)}]')
  _warn_if_idle(session, metrics)
  return {
      'id': prompt.id, 'prompt': prompt.text, 'text': session.text(live.tokens), 'token_ids': live.tokens,
      'origins': [origin.name.lower() for origin in live.origins], 'reason': reason_name(live.reason),
      'drafter': session.engine.drafter.name, 'rule': session.engine.rule.name, 'gamma': session.engine.gamma,
      'tokens_per_pass': metrics.tokens_per_pass, 'passes': metrics.passes, 'drafted': metrics.drafted,
      'accepted': metrics.accepted, 'accepted_per_position': metrics.accepted_per_position}


def _watch(session: Session, request: Request) -> Iterator[tuple[Live, list[tuple[int, Origin]]]]:
  """After each step: the row so far, and the tokens that the step added."""
  seen = 0
  for state in session.stream(request):
    tokens, origins, start, end, reason, counters = jax.device_get(
        (state.tokens_BL[0], state.origin_BL[0], state.prompt_length_B[0], state.length_B[0], state.reason_B[0],
         state.counters))
    live = Live(tokens[start:end].tolist(), [Origin(o) for o in origins[start:end]], Reason(int(reason)),
                Metrics.from_counters(counters))
    yield live, list(zip(live.tokens, live.origins, strict=True))[seen:]
    seen = len(live.tokens)


def _show(text: str, origin: Origin, colour: bool) -> None:
  out = cli.output()
  out.write(f'{COLOURS[origin]}{text}{RESET}' if colour and origin in COLOURS else text)
  out.flush()


def _warn_if_idle(session: Session, metrics: Metrics) -> None:
  if session.engine.gamma > 0 and metrics.drafted == 0 and metrics.emitted > 1:
    print('warning: speculation was asked for, but nothing was drafted: this was plain decoding', file=sys.stderr)


if __name__ == '__main__':
  cli.run(main)
