"""A corpus of the target's own answers, to train its drafts on: resumable, and clean of what drafts are evaluated on.

    python -m experiments.make_corpus --out=results/corpus --chat=640 --function=768 --story=448 \
        --source=384 --article=384

Prompts are made here (`experiments.corpus_prompts`), whatever `data.kind` is; `data.form=raw` is for a target without a
chat template, which completes functions and stories and cannot be asked for chats. Where there are fewer prompts
than texts wanted they are asked again. The first answer to a prompt is greedy or, for a share of the prompts, drawn;
others are drawn. A text that shares 13 words with HumanEval or the evaluation stories is left out. `launch.corpus`
reads the result. Besides, the target may read texts that it did not write (`experiments.corpus_readings`), in pieces of
`--capacity` tokens: they have no answer, and a draft learns from them if its config says data.learn='all'.

`--skip=N` passes over the first N of each kind: a further corpus begins where the first ended. Folders in a corpus are
part of it.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import hashlib
import itertools
import platform
import time
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from experiments.corpus_prompts import KINDS, prompts_of, user_opening
from experiments.corpus_readings import READINGS
from launch import cli, distributed, results
from launch.corpus import Text
from launch.evaluation_texts import shared_with
from launch.progress import track
from launch.prompts import Prompt
from launch.session import Session
from launch.work_units import WorkUnits, seeds_for
from models.errors import InputError
from models.tokenizer import Tokenizer
from specdec.engine import Request
from specdec.warp import Sampling

USER_TOP_P = 0.95  # of what the target says as a user, at temperature 1
USER_TOKENS = 96


@dataclasses.dataclass(frozen=True)
class Asked:
  """A prompt that one text answers.

  Attributes:
    prompt: its text is still to be written if its kind is 'chat'.
    kind: of `KINDS`.
    temperature: of the answer.
    seed: of all that is drawn for it.
  """

  prompt: Prompt
  kind: str
  temperature: float
  seed: int


def asked(kind: str, count: int, prompts: Sequence[Prompt], share: float, temperature: float, seed: int,
          skip: int) -> list[Asked]:
  """`count` prompts of a kind after the first `skip`, a fair sample where there are more; by temperature."""
  if kind == 'chat':
    prompts = [Prompt(f'chat/{seed}/{number}', '', True) for number in range(skip + count)]
  else:
    prompts = sorted(prompts, key=lambda prompt: _fraction('place', prompt.id))
  again = list(itertools.islice(itertools.cycle(prompts), skip + count))
  seeds = seeds_for(seed, again)
  drawn = [number >= len(prompts) or _fraction('drawn', prompt.id) < share for number, prompt in enumerate(again)]
  made = [Asked(prompt, kind, temperature if is_drawn else 0.0, its)
          for prompt, is_drawn, its in zip(again, drawn, seeds, strict=True)]
  return sorted(made[skip:], key=lambda one: one.temperature)


def _fraction(of: str, name: str) -> float:
  """A number below 1 that stands for a name."""
  return int.from_bytes(hashlib.sha256(f'{of} {name}'.encode()).digest()[:4], 'big') / 2 ** 32


def batches(wanted: Sequence[Asked], size: int, length_of: dict[str, int]) -> list[list[Asked]]:
  """Batches of one kind and temperature, of prompts of like length."""
  made = []
  for _, group in itertools.groupby(wanted, key=lambda one: one.temperature):
    ordered = sorted(group, key=lambda one: length_of.get(one.prompt.id, 0))
    made += [ordered[start:start + size] for start in range(0, len(ordered), size)]
  return made


def pieces(kind: str, count: int, tokenizer: Tokenizer, length: int, skip: int) -> list[Text]:
  """`count` texts of `length` tokens to read after the first `skip`, or all there are: a fair sample, whole pieces."""
  made = []
  for name, text in READINGS[kind]() if count else ():
    tokens = tokenizer.encode(text)
    made += [Text(f'{kind}/{name}#{number}', kind, 0.0, length, tuple(tokens[start:start + length]))
             for number, start in enumerate(range(0, len(tokens) - length + 1, length))]
  return sorted(made, key=lambda piece: _fraction('place', piece.id))[skip:skip + count]


class Answers:
  """The target's answers to batches of prompts, with one program for all batches of a width."""

  def __init__(self, session: Session, max_new_tokens: int):
    self._session, self._max_new_tokens = session, max_new_tokens
    self._size = session.config.engine.batch

  def __call__(self, unit: Sequence[Asked]) -> dict[str, Any]:
    """A unit of the corpus, as JSON holds it."""
    start = time.monotonic()
    prompts = self._user_messages(unit) if unit[0].kind == 'chat' else [one.prompt for one in unit]
    pairs = [(one, self._session.token_ids(prompt)) for one, prompt in zip(unit, prompts, strict=True) if prompt.text]
    said = len(pairs)
    pairs = [(one, ids) for one, ids in pairs if len(ids) + self._max_new_tokens <= self._session.engine.capacity]
    answers = self._decode([ids for _, ids in pairs], [one.seed for one, _ in pairs],
                           Sampling.create(unit[0].temperature), self._max_new_tokens)
    texts = [Text(one.prompt.id, one.kind, one.temperature, len(ids), (*ids, *answer))
             for (one, ids), answer in zip(pairs, answers, strict=True)]
    return clean(texts, self._session.tokenizer) | {
        'empty': len(unit) - said, 'too_long': said - len(texts), 'seconds': time.monotonic() - start}

  def _user_messages(self, unit: Sequence[Asked]) -> list[Prompt]:
    """What the target says in the user's place; empty where it says nothing."""
    tokenizer = self._session.tokenizer
    opening = user_opening(tokenizer)
    said = self._decode([opening] * len(unit), [one.seed ^ 1 << 31 for one in unit],
                        Sampling.create(1.0, 0, USER_TOP_P), USER_TOKENS)
    return [Prompt(one.prompt.id, tokenizer.decode(ids).strip(), chat=True)
            for one, ids in zip(unit, said, strict=True)]

  def _decode(self, prompts: list[list[int]], seeds: list[int], law: Sampling,
              max_new_tokens: int) -> list[list[int]]:
    """Answers, the token that ended them included; a short batch is filled up with its last prompt."""
    if not prompts:
      return []
    session, missing = self._session, self._size - len(prompts)
    request = Request(prompts + prompts[-1:] * missing, seeds + seeds[-1:] * missing, law, max_new_tokens,
                      sorted(session.tokenizer.eos_ids))
    return session.engine.generate(session.params, request).tokens[:len(prompts)]


def clean(texts: Sequence[Text], tokenizer: Tokenizer) -> dict[str, Any]:
  """Those that share nothing with what is evaluated on, as a unit holds them, and how many do."""
  kept = [text for text in texts if shared_with(tokenizer.decode(text.tokens)) is None]
  return {'texts': [dataclasses.asdict(text) for text in kept], 'left_out': len(texts) - len(kept)}


def make(session: Session, wanted: dict[str, int], flags_: dict[str, Any], directory: str) -> list[dict[str, Any]]:
  """All units, those that are missing made now.

  Args:
    session: of a config without a draft.
    wanted: texts of each kind, asked for or read.
    flags_: share, temperature, max_new_tokens, seed, skip.
    directory: where the units are.
  """
  work: list[list[Asked] | list[Text]] = []
  size, answers = session.config.engine.batch, Answers(session, flags_['max_new_tokens'])
  chat = session.config.data.form == 'chat'
  if wanted.get('chat') and not chat:
    raise InputError('--chat: data.form=raw is for a target without a chat template: ask for no chats')
  for kind in KINDS:
    prompts = prompts_of(kind, chat) if kind != 'chat' and wanted.get(kind) else []
    lengths = {prompt.id: len(prompt.text) for prompt in prompts}
    work += batches(asked(kind, wanted.get(kind, 0), prompts, flags_['share'], flags_['temperature'], flags_['seed'],
                          flags_['skip']), size, lengths)
  for kind in READINGS:
    read = pieces(kind, wanted.get(kind, 0), session.tokenizer, session.engine.capacity, flags_['skip'])
    work += [read[start:start + size] for start in range(0, len(read), size)]
  if not work:
    raise InputError(f'nothing is asked for: give {", ".join(f"--{kind}" for kind in (*KINDS, *READINGS))} more than 0')
  about = {'wanted': wanted, **flags_, 'form': session.config.data.form, 'target': session.config.target,
           'engine': session.config.engine, 'python': platform.python_version(), 'prompts': results.digest(work)}
  units = WorkUnits(directory, about, len(work))
  with_bar = _Bar(len(work), units.num_done)

  def unit(number: int) -> dict[str, Any]:
    texts = work[number]
    return with_bar(clean(texts, session.tokenizer) if isinstance(texts[0], Text) else answers(texts))

  return units.run(unit)


class _Bar:
  """Passes units on and shows how many there are."""

  def __init__(self, total: int, done: int):
    self._steps: Iterator[int] = iter(track(range(done, total), total - done, 'corpus'))

  def __call__(self, unit: dict[str, Any]) -> dict[str, Any]:
    next(self._steps, None)
    return unit


def summary(units: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """What came of it: texts, tokens and answered tokens of each kind, what was left out, and how fast answers came."""
  texts = [text for unit in units for text in unit['texts']]
  answered = lambda some: sum(len(text['tokens']) - text['prompt_length'] for text in some)
  sum_of = lambda name: sum(unit.get(name, 0) for unit in units)
  kinds = {kind: [text for text in texts if text['kind'] == kind] for kind in (*KINDS, *READINGS)}
  seconds = sum_of('seconds')  # of units with answers alone
  return {
      'texts': {kind: len(some) for kind, some in kinds.items()},
      'tokens': {kind: sum(len(text['tokens']) for text in some) for kind, some in kinds.items()},
      'answer_tokens': {kind: answered(some) for kind, some in kinds.items()},
      **{name: sum_of(name) for name in ('left_out', 'too_long', 'empty')},
      'tokens_per_second': answered(texts) / seconds if seconds else 0.0}


def _prepare(config: ConfigDict) -> None:
  with config.unlocked():
    config.engine.batch, config.engine.capacity = BATCH.value, CAPACITY.value
    if config.drafter.name != 'none':
      raise InputError(f'drafter.name={config.drafter.name!r}: a corpus is what the target says by itself; use the '
                       'variant none of the config')


def main() -> None:
  cli.refuse_job()
  config = cli.config_of(CONFIG)
  _prepare(config)
  wanted = {kind: count.value for kind, count in COUNTS.items()}
  drawn = {'share': SAMPLED.value, 'temperature': TEMPERATURE.value, 'max_new_tokens': MAX_NEW_TOKENS.value,
           'seed': SEED.value, 'skip': SKIP.value}
  units = make(Session.from_config(config), wanted, drawn, OUT.value)
  facts = summary(units)
  if distributed.speaks():
    for name, value in facts.items():
      cli.say(f'{name}: {value}')
  cli.write_json(facts)


if __name__ == '__main__':
  CONFIG = cli.define_config('configs/smollm2.py:none')
  OUT = flags.DEFINE_string('out', None, 'Directory of the corpus; what is there already is not made again.')
  COUNTS = {kind: flags.DEFINE_integer(kind, 0, f'Texts of the kind {kind}.', lower_bound=0)
            for kind in (*KINDS, *READINGS)}
  SAMPLED = flags.DEFINE_float('sampled', 0.5, 'Share of prompts whose first answer is drawn, not greedy.',
                               lower_bound=0, upper_bound=1)
  TEMPERATURE = flags.DEFINE_float('temperature', 0.8, 'Of drawn answers.', lower_bound=0.01)
  MAX_NEW_TOKENS = flags.DEFINE_integer('max_new_tokens', 192, 'Of an answer.', lower_bound=1)
  BATCH = flags.DEFINE_integer('batch', 64, 'Texts decoded at once.', lower_bound=1)
  CAPACITY = flags.DEFINE_integer('capacity', 768, 'Tokens of prompt and answer; longer prompts are passed over.',
                                  lower_bound=2)
  SKIP = flags.DEFINE_integer('skip', 0, 'Texts of each kind that another corpus has already.', lower_bound=0)
  SEED = flags.DEFINE_integer('seed', 0, 'Of all that is drawn.', lower_bound=0)
  flags.mark_flag_as_required('out')
  cli.run(main)
