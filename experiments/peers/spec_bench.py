"""Spec-Bench's protocol and metrics (Xia et al., 2024, arXiv 2401.07851) on the contestants of `peers.timing`.

    python -m experiments.peers.spec_bench --config=configs/peers.py --questions=question.jsonl \\
        --config.new_tokens=1024 --config.capacity=4096 --out=spec_bench.jsonl --units_dir=spec_bench
    python -m experiments.peers.spec_bench --config=configs/peers.py:quick          our own prompts

Greedy, batch 1, three warm-ups, the mean of three runs; a second turn follows the contestant's own first answer. As in
Spec-Bench, and unlike elsewhere here, the prompt is part of the time. Its question file is not part of this project;
without it the tasks of the config are the categories. Fields of a row, all measured:

    software, drafter, setting, category    'overall' is all questions together
    questions
    tokens_per_second       mean over questions and runs
    speedup                 over the mean of the same software's plain decoding
    mean_accepted_tokens    MAT: tokens per target pass, the target's own included (1 for plain decoding); null where
                            the software does not tell
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib
import tempfile
from typing import Any

from absl import flags
import jax
import numpy as np

from experiments.peers import timing as peers
from experiments.peers.contestant import Contestant
from launch import cli, results
from launch.progress import track
from launch.prompts import load_prompts
from launch.table import Column, print_table
from launch.timing import measure
from launch.work_units import WorkUnits
from models.errors import InputError
from models.tokenizer import Tokenizer

WARMUPS, RUNS = 3, 3
OVERALL = 'overall'
COLUMNS = (Column('category'), Column('software'), Column('drafter'), Column('setting'), Column('questions'),
           Column('tokens_per_second', 'tokens/s', '.1f'), Column('speedup', 'speed-up', '.2f'),
           Column('mean_accepted_tokens', 'MAT', '.2f'))


@dataclasses.dataclass(frozen=True)
class Question:
  """One conversation.

  Attributes:
    id: of the file.
    category: that results are kept by.
    turns: what the user says, one after the other.
  """

  id: str
  category: str
  turns: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Answered:
  """A question answered by a contestant: tokens of all turns, seconds of each run, target passes if known."""

  tokens: int
  seconds_R: tuple[float, ...]
  passes: int | None


def read_questions(path: str) -> list[Question]:
  """Spec-Bench's question.jsonl: question_id, category, turns.

  Raises:
    InputError: a file that cannot be read, or a line that is no question.
  """
  try:
    lines = pathlib.Path(path).expanduser().read_text(encoding='utf-8').splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise InputError(f'--questions={path} cannot be read ({error}): name the question.jsonl of Spec-Bench') from error
  questions = [_question(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
  if not questions:
    raise InputError(f'--questions={path} holds no question')
  return questions


def _question(path: str, number: int, line: str) -> Question:
  try:
    row = json.loads(line)
    turns, category = row['turns'], row['category']
    if not (isinstance(category, str) and turns and isinstance(turns, list) and all(isinstance(t, str) for t in turns)):
      raise TypeError
    return Question(str(row['question_id']), category, tuple(turns))
  except (ValueError, KeyError, TypeError) as error:
    raise InputError(f'{path}, line {number}: give question_id, category (a text) and turns (texts)') from error


def own_questions(config: Any) -> list[Question]:
  """The prompts of the config's tasks, one turn each."""
  found = []
  for task in config.tasks:
    data = peers.data_of(config, task)
    found += [Question(prompt.id, task, (prompt.text,)) for prompt in load_prompts(data)]
  return found


def check_room(questions: Sequence[Question], tokenizer: Tokenizer, config: Any) -> None:
  """Refuses conversations that could outgrow the capacity, before the first is held.

  Raises:
    InputError: see above.
  """
  for question in questions:
    turn = len(question.turns) - 1
    most = len(_tokens(question, [''] * turn, turn, tokenizer)) + (turn + 1) * config.new_tokens
    if most > config.capacity:
      raise InputError(f'question {question.id} may come to {most} tokens, answers included: raise capacity to that, '
                       'or lower new_tokens')


def answers(everyone: Sequence[Contestant], questions: Sequence[Question], tokenizer: Tokenizer, config: Any,
            units_dir: str | None) -> list[tuple[Question, dict[str, Answered]]]:
  """All questions answered; with `units_dir` each is a unit of work there, and those that are done stay.

  Raises:
    InputError: a conversation that `capacity` has no room for, or a directory of other work.
  """
  check_room(questions, tokenizer, config)
  done = []

  def work(number: int) -> dict[str, Answered]:
    done.append(number)
    return answer(everyone, questions[number], tokenizer, config, 1 if len(done) > 1 else WARMUPS)

  if units_dir is None:
    found = [work(number) for number in track(range(len(questions)), len(questions), 'questions')]
    return list(zip(questions, found, strict=True))
  about = {'config': config, 'questions': questions, 'cpu_model': results.cpu_model(),
           'contestants': [f'{contestant.name}, {contestant.version}' for contestant in everyone]}
  units = WorkUnits(units_dir, about, len(questions))
  if units.num_done:
    cli.say(f'{units.num_done} of {units.count} questions are in {units_dir} already')
  found = [{name: Answered(one['tokens'], tuple(one['seconds_R']), one['passes']) for name, one in unit.items()}
           for unit in units.run(work)]
  return list(zip(questions, found, strict=True))


def answer(everyone: Sequence[Contestant], question: Question, tokenizer: Tokenizer, config: Any,
           warmups: int) -> dict[str, Answered]:
  """Every contestant's answer to all turns, in turns with the others.

  Raises:
    InputError: a conversation that `capacity` has no room for.
  """
  said: dict[str, list[str]] = {contestant.name: [] for contestant in everyone}
  totals = {contestant.name: Answered(0, (0.0,) * RUNS, 0) for contestant in everyone}
  for turn in range(len(question.turns)):
    ids = {name: _ids(question, texts, turn, tokenizer, config) for name, texts in said.items()}
    functions = {contestant.name: _whole(contestant, ids[contestant.name]) for contestant in everyone}
    timings = measure(functions, RUNS, warmups)
    for contestant in everyone:
      name, timed = contestant.name, timings[contestant.name]
      tokens, total = contestant.tokens(timed.result), totals[contestant.name]
      passes = None
      if contestant.passes and total.passes is not None:
        passes = total.passes + contestant.passes(contestant.decode, contestant.prepare(ids[name]))
      seconds_R = tuple(np.add(total.seconds_R, timed.seconds).tolist())
      totals[name] = Answered(total.tokens + len(tokens), seconds_R, passes)
      said[name].append(tokenizer.decode(tokens))
  return totals


def _ids(question: Question, said: Sequence[str], turn: int, tokenizer: Tokenizer, config: Any) -> list[int]:
  ids = _tokens(question, said, turn, tokenizer)
  if len(ids) + config.new_tokens > config.capacity:
    raise InputError(f'question {question.id} has {len(ids)} tokens: raise capacity above '
                     f'{len(ids) + config.new_tokens}')
  return ids


def _tokens(question: Question, said: Sequence[str], turn: int, tokenizer: Tokenizer) -> list[int]:
  """The conversation up to what the user says in this turn."""
  messages = []
  for place in range(turn):
    messages += [{'role': 'user', 'content': question.turns[place]},
                 {'role': 'assistant', 'content': said[place].strip()}]
  messages.append({'role': 'user', 'content': question.turns[turn]})
  return tokenizer.encode(tokenizer.apply_chat(messages), parse_special=True)


def _whole(contestant: Contestant, ids: list[int]) -> Callable[[], Any]:
  def run() -> Any:
    with jax.transfer_guard('allow'):  # the prompt goes to the device within the time
      return contestant.decode(contestant.prepare(ids))

  return run


def rows_of(everyone: Sequence[Contestant], answered: Sequence[tuple[Question, dict[str, Answered]]]) -> list[dict]:
  """A row for each contestant and category, and overall."""
  rows = []
  for category in (*dict.fromkeys(question.category for question, _ in answered), OVERALL):
    some = [by_name for question, by_name in answered if category in (question.category, OVERALL)]
    speed = {contestant.name: _speed([by_name[contestant.name] for by_name in some]) for contestant in everyone}
    plain = {contestant.software: speed[contestant.name] for contestant in everyone if contestant.drafter == 'none'}
    for contestant in everyone:
      passes = [by_name[contestant.name].passes for by_name in some]
      tokens = sum(by_name[contestant.name].tokens for by_name in some)
      rows.append({
          'category': category, 'software': contestant.software, 'version': contestant.version,
          'drafter': contestant.drafter, 'setting': ', '.join(f'{k} {v}' for k, v in contestant.settings.items()),
          'questions': len(some), 'tokens_per_second': speed[contestant.name],
          'speedup': speed[contestant.name] / plain[contestant.software],
          'mean_accepted_tokens': None if None in passes or not sum(passes) else tokens / sum(passes)})
  return rows


def _speed(some: Sequence[Answered]) -> float:
  """Tokens per second: the mean over questions of each run, and of that the mean over runs."""
  return float(np.mean([[one.tokens / seconds for seconds in one.seconds_R] for one in some]))


def main() -> None:
  config = cli.config_of(CONFIG, peers.SECTIONS)
  results.check_rows(OUT.value)
  peers.check(config)
  questions = read_questions(QUESTIONS.value) if QUESTIONS.value else own_questions(config)
  with tempfile.TemporaryDirectory() as directory:
    everyone, tokenizer = peers.contestants(config, directory)
    answered = answers(everyone, questions, tokenizer, config, UNITS_DIR.value)
  rows = rows_of(everyone, answered)
  for row in rows if OUT.value else ():
    results.append_row(OUT.value, row | results.environment())
  print_table(rows, COLUMNS, 'Greedy, float32, batch 1; prompts included', file=cli.output())
  cli.write_json({'rows': rows} | results.environment())


if __name__ == '__main__':
  CONFIG = cli.define_config('configs/peers.py')
  QUESTIONS = flags.DEFINE_string('questions', None, "Spec-Bench's question.jsonl; the config's tasks without it.")
  OUT = flags.DEFINE_string('out', None, 'JSON lines to append rows to.')
  UNITS_DIR = flags.DEFINE_string('units_dir', None, 'Keep each answered question here, and go on from them.')
  cli.run(main)
