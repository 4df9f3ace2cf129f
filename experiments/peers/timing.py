"""Times this project next to transformers and llama.cpp: the same float32 weights, prompts, machine and process.

    pip install -e .[peers,data]
    python -m experiments.peers.timing --config=configs/peers.py [--out=peers.jsonl]

Each piece of software runs its own greedy `generate` on all cores: plain, with its own prompt lookup at several
settings and, but for llama.cpp, with the same draft model. Times are of new tokens only: the prompt is in the cache
before the clock starts, or its time is taken off.
Contestants take turns on each prompt; medians are summed over the prompts of a task. `first_divergence` is where a
contestant's text first differs from this project's plain text (rounding differs, so near-ties may fall either way).
"""

from collections.abc import Sequence
import dataclasses
import functools
import importlib.util
import os
import tempfile
import types
from typing import Any

from absl import flags
import numpy as np

from experiments.peers import hugging_face, llama_cpp, ours
from experiments.peers.contestant import Contestant
from launch import cli, prompts, results, timing
from launch.errors import RunError
from launch.progress import track
from launch.table import Column, print_table
from models.errors import InputError
from models.loading import embedded_model, export_gguf, export_hf, load_decoder
from models.tokenizer import Tokenizer

PACKAGES = {'specdec': (), 'transformers': ('torch', 'transformers'), 'llama.cpp': ('llama_cpp',)}
SECTIONS = ('model', 'tasks', 'form', 'prompts', 'new_tokens', 'capacity', 'repeats', 'software', 'ours',
            'transformers', 'llama_cpp', 'draft', 'draft_layers', 'ours_draft', 'assisted')
COLUMNS = (
    Column('task'), Column('software'), Column('drafter'), Column('setting'), Column('ms_per_token', 'ms/token', '.2f'),
    Column('ms_per_token_p10', 'p10', '.2f'), Column('ms_per_token_p90', 'p90', '.2f'),
    Column('own_speedup', 'over own plain', '.2f'), Column('ours_over_it', 'specdec faster by', '.2f'),
    Column('same_text', 'same text'))


def check(config: Any) -> None:
  """Raises InputError for whatever can be known before the work starts."""
  for software in config.software:
    if software not in PACKAGES:
      raise InputError(f'software={software!r} is not known: use {", ".join(PACKAGES)}')
    for package in PACKAGES[software]:
      if importlib.util.find_spec(package) is None:
        raise InputError(f'{software} needs the package {package}: pip install -e .[peers]')
  if 'specdec' not in config.software:
    raise InputError("software must hold 'specdec': the others are compared with it")


def contestants(config: Any, directory: str) -> tuple[list[Contestant], Tokenizer]:
  """Everything that runs, over weights exported to `directory`."""
  path = config.model or embedded_model()
  decoder, _ = load_decoder(path)
  tokenizer = Tokenizer.from_gguf(path)
  eos_ids = sorted(tokenizer.eos_ids)
  draft = load_decoder(config.draft)[0] if config.draft else decoder.first_layers(config.draft_layers)
  found = ours.contestants(decoder, tokenizer, _plain(config.ours), config.new_tokens, config.capacity, draft,
                           config.ours_draft)
  if 'transformers' in config.software:
    target_files, draft_files = (os.path.join(directory, name) for name in ('target', 'draft'))
    export_hf(decoder, target_files)
    export_hf(draft, draft_files)
    found += hugging_face.contestants(target_files, eos_ids, _plain(config.transformers), config.new_tokens,
                                      draft_files, _plain(config.assisted))
  if 'llama.cpp' in config.software:
    file = os.path.join(directory, 'model.gguf')
    export_gguf(decoder, file, path)
    found += llama_cpp.contestants(file, eos_ids, _plain(config.llama_cpp), config.new_tokens, config.capacity)
  return found, tokenizer


def _plain(settings: Any) -> list[dict[str, Any]]:
  return results.plain(settings)


def data_of(config: Any, task: str) -> types.SimpleNamespace:
  """The `data` section of a task's prompts."""
  return types.SimpleNamespace(kind=task, form=config.form, limit=config.prompts, offset=0)


def run_task(config: Any, task: str, all_contestants: Sequence[Contestant], tokenizer: Tokenizer) -> list[dict]:
  """Times all contestants on the prompts of one task: one row each."""
  all_ids = [encode(prompt, tokenizer, config) for prompt in prompts.load_prompts(data_of(config, task))]
  timings = [_measure(all_contestants, ids, config.repeats) for ids in track(all_ids, len(all_ids), task)]
  rows = [_row(contestant, task, [timed[contestant.name] for timed in timings]) for contestant in all_contestants]
  return _compared(rows)


@dataclasses.dataclass(frozen=True)
class _Timed:
  """One contestant on one prompt: the ids it generated, and the time of `counted` of them."""

  ids: list[int]
  counted: int
  seconds: float


def _measure(all_contestants: Sequence[Contestant], ids: list[int], repeats: int) -> dict[str, _Timed]:
  functions, prepare = {}, {}
  for contestant in all_contestants:
    functions[contestant.name] = contestant.decode
    if contestant.first:
      functions[_first(contestant)] = contestant.first
    for name in (contestant.name, _first(contestant)):
      prepare[name] = functools.partial(contestant.prepare, ids)
  timings = timing.measure(functions, repeats, prepare=prepare)
  found = {}
  for contestant in all_contestants:
    timed = timings[contestant.name]
    text, seconds = contestant.tokens(timed.result), timed.median
    if contestant.first:
      seconds -= timings[_first(contestant)].median
    found[contestant.name] = _Timed(text, len(text) - bool(contestant.first), seconds)
  return found


def _first(contestant: Contestant) -> str:
  return f'{contestant.name}, first token'


def encode(prompt: prompts.Prompt, tokenizer: Tokenizer, config: Any) -> list[int]:
  text = tokenizer.apply_chat([{'role': 'user', 'content': prompt.text}]) if prompt.chat else prompt.text
  ids = tokenizer.encode(text, add_special=not prompt.chat, parse_special=prompt.chat)
  if len(ids) + config.new_tokens > config.capacity:
    raise InputError(f'{prompt.id} has {len(ids)} tokens: raise capacity above {len(ids) + config.new_tokens}')
  return ids


def _row(contestant: Contestant, task: str, timed: Sequence[_Timed]) -> dict[str, Any]:
  """Times are of the prompts that were answered by more than the token that is not counted.

  Raises:
    RunError: there is none.
  """
  counted = [one for one in timed if one.counted > 0]
  if not counted:
    raise RunError(f'{contestant.name} ended every text of {task} at its first token, so there is nothing to time')
  per_token = [1e3 * one.seconds / one.counted for one in counted]
  return {
      'task': task, 'software': contestant.software, 'version': contestant.version, 'drafter': contestant.drafter,
      'settings': contestant.settings, 'setting': ', '.join(f'{k} {v}' for k, v in contestant.settings.items()),
      'prompts': len(timed), 'new_tokens': sum(len(one.ids) for one in timed),
      'ms_per_token': 1e3 * sum(one.seconds for one in counted) / sum(one.counted for one in counted),
      'ms_per_token_p10': float(np.percentile(per_token, 10)), 'ms_per_token_p90': float(np.percentile(per_token, 90)),
      'texts': [one.ids for one in timed]}


def _compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Adds what follows from rows together; the texts themselves are dropped."""
  plain = {row['software']: row for row in rows if row['drafter'] == 'none'}
  reference = plain['specdec']['texts']
  best: dict[str, float] = {}
  for row in rows:
    if row['software'] == 'specdec':
      best[row['drafter']] = min(row['ms_per_token'], best.get(row['drafter'], float('inf')))
  for row in rows:
    divergences = [first_divergence(text, other) for text, other in zip(row['texts'], reference, strict=True)]
    row['own_speedup'] = plain[row['software']]['ms_per_token'] / row['ms_per_token']
    row['ours_over_it'] = row['ms_per_token'] / best[row['drafter']] if row['drafter'] in best else None
    row['first_divergence'] = divergences
    row['same_text'] = f'{divergences.count(None)} of {len(divergences)}'
  return [{name: value for name, value in row.items() if name != 'texts'} for row in rows]


def first_divergence(text: Sequence[int], other: Sequence[int]) -> int | None:
  """Index of the first id that differs, the end of the shorter text included; None for equal texts."""
  if list(text) == list(other):
    return None
  pairs = zip(text, other, strict=False)
  return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(text), len(other)))


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
  """Plain against plain, best lookup against best lookup, best draft against best draft, by task."""
  lines = []
  for task in dict.fromkeys(row['task'] for row in rows):
    best: dict[tuple[str, str], dict] = {}
    for row in rows:
      key = row['software'], row['drafter']
      if row['task'] == task and (key not in best or row['ms_per_token'] < best[key]['ms_per_token']):
        best[key] = row
    for (software, drafter), row in best.items():
      if software != 'specdec' and ('specdec', drafter) in best:
        ours_ms = best['specdec', drafter]['ms_per_token']
        kind = 'plain' if drafter == 'none' else f'best {drafter}'
        lines.append(f"{task}, {kind}: specdec {ours_ms:.2f} ms/token, {software} {row['ms_per_token']:.2f}: "
                     f"{ours_ms / row['ms_per_token']:.2f} of its time")
  return lines


def main() -> int:
  config = cli.config_of(CONFIG, SECTIONS)
  results.check_rows(OUT.value)
  check(config)
  rows = []
  with tempfile.TemporaryDirectory() as directory:
    everyone, tokenizer = contestants(config, directory)
    for task in config.tasks:
      rows += run_task(config, task, everyone, tokenizer)
      for row in rows[-len(everyone):] if OUT.value else ():
        results.append_row(OUT.value, row | results.environment())
  print_table(rows, COLUMNS, 'Greedy, float32, batch 1; new tokens only', file=cli.output())
  for line in summary(rows):
    cli.say(line)
  cli.write_json({'rows': rows} | results.environment())
  return 0


if __name__ == '__main__':
  CONFIG = cli.define_config('configs/peers.py')
  OUT = flags.DEFINE_string('out', None, 'JSON lines to append rows to.')
  cli.run(main)
