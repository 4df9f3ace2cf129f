"""A corpus of a target's own answers, as `experiments.make_corpus` writes it, and the rows that drafts are trained on.

    DIR/about.json            what was asked for
    DIR/unit-00000-of-00120.json, ...    texts: id, kind, temperature, prompt_length, tokens
"""

from collections.abc import Iterable, Sequence
import dataclasses
import hashlib
import json
import pathlib
import re

import numpy as np

from models.errors import InputError
from models.loading.safetensors import read_json

ABOUT = 'about.json'
UNITS = 'unit-*-of-*.json'
HELD_OUT = 20  # one text in so many is not trained on
OPEN_ROWS = 64  # that a text may still go into
LEARN = ('answers', 'all')  # of a text
MOST_IDS = 2**31  # tokens are kept in 32 bits


@dataclasses.dataclass(frozen=True)
class Text:
  """A prompt and what the target said.

  Attributes:
    id: of the prompt.
    kind: 'chat', 'function' or 'story'; 'source' or 'article' of one that the target read and did not answer.
    temperature: that the answer was drawn at.
    prompt_length: tokens that the target did not choose.
    tokens: ids, the prompt's first.
  """

  id: str
  kind: str
  temperature: float
  prompt_length: int
  tokens: tuple[int, ...]

  @property
  def answered(self) -> bool:
    return self.prompt_length < len(self.tokens)

  @property
  def held_out(self) -> bool:
    """By a hash of the prompt's id: answers to one prompt stay together, whatever else is in the corpus.

    A text without an answer is never held out, since drafts are judged by answers.
    """
    return self.answered and int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:4], 'big') % HELD_OUT == 0


def read_texts(directory: str) -> list[Text]:
  """All texts of a finished corpus and of those in its folder, unit by unit.

  Raises:
    InputError: no corpus, one that is not finished, or one that holds something else.
  """
  return [text for folder in corpora(directory) for text in _read_corpus(folder)]


def corpora(directory: str) -> list[pathlib.Path]:
  """The folder itself and those in it, as far as they have units.

  Raises:
    InputError: there are none.
  """
  folder = pathlib.Path(directory).expanduser()
  found = [one for one in (folder, *sorted(folder.glob('*/'))) if any(one.glob(UNITS))]
  if not found:
    raise InputError(f'{folder} holds no corpus: make one with python -m experiments.make_corpus --out={folder}')
  return found


def _read_corpus(folder: pathlib.Path) -> list[Text]:
  paths = sorted(folder.glob(UNITS))
  named = re.fullmatch(r'unit-\d{5,9}-of-(\d{5,9})\.json', paths[0].name)
  count = int(named[1]) if named else 0
  for path in paths:
    if not re.fullmatch(rf'unit-\d{{5,9}}-of-{count:05d}\.json', path.name):
      raise InputError(f'{path} is no unit of the corpus that {paths[-1].name} belongs to: keep the units of one alone')
  if len(paths) != count:
    raise InputError(f'{folder} has {len(paths)} of {count} units: finish it by the command that began it')
  return [text for path in paths for text in _read_unit(path)]


def check_made_by(directory: str, source: str) -> None:
  """Refuses a corpus of another target's answers. One that was made by hand, without about.json, is taken as it is.

  Raises:
    InputError: names both targets.
  """
  for folder in corpora(directory):
    path = folder / ABOUT
    target = read_json(path).get('target') if path.exists() else None
    its = target.get('source') if isinstance(target, dict) else None
    if isinstance(its, str) and _place(its) != _place(source):
      raise InputError(f'{folder} holds answers of target.source={its!r}, not {source!r}: name that target, or make a '
                       f'corpus of this one (if they are one model, moved, say so in {path.name})')


def _place(source: str) -> str:
  path = pathlib.Path(source).expanduser()
  return str(path.resolve()) if path.exists() else source


def check_ids(directory: str, texts: Iterable[Text], num_tokens: int) -> None:
  """Refuses a corpus with tokens that a target does not have.

  Raises:
    InputError: names the text and the token.
  """
  for text in texts:
    if max(text.tokens, default=0) >= num_tokens:
      raise InputError(f'{directory}: text {text.id!r} has the token {max(text.tokens)}, and the target {num_tokens} '
                       'tokens: make a corpus of its own answers')


def whole(texts: Iterable[Text], length: int) -> list[Text]:
  """Those that fit into a row: of others `rows` drops the beginning, which the target has read when it decodes."""
  return [text for text in texts if len(text.tokens) <= length]


def _read_unit(path: pathlib.Path) -> list[Text]:
  try:
    return [_text(**entry) for entry in json.loads(path.read_text())['texts']]
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
    raise InputError(f'{path} is no unit of a corpus ({error}): make it again') from error


def _text(id: str, kind: str, temperature: float, prompt_length: int, tokens: list[int]) -> Text:
  """A text of a unit, its fields checked: a ValueError says which is wrong."""
  is_id = lambda value: type(value) is int and 0 <= value < MOST_IDS
  right = {
      'id': isinstance(id, str), 'kind': isinstance(kind, str), 'temperature': type(temperature) in (int, float),
      'tokens': isinstance(tokens, list) and all(map(is_id, tokens)),
      'prompt_length': is_id(prompt_length) and prompt_length <= len(tokens)}
  for name, fits in right.items():
    if not fits:
      raise ValueError(f'{name} of a text is wrong')
  id.encode()  # half of a character has no hash
  return Text(id, kind, temperature, prompt_length, tuple(tokens))


def rows(texts: Iterable[Text], length: int, learn: str = 'answers') -> list[dict[str, np.ndarray]]:
  """Rows of `length` tokens with the fields of `specdec.training.frozen`, several texts in one as far as they fit.

  Of a text that is longer the end is kept, since the answer is there: it then begins in the middle of its prompt.

  Args:
    texts: those without an answer are passed over where only answers are learnt.
    length: of a row.
    learn: 'answers'; or 'all', prompts too.

  Raises:
    InputError: no text, or none that has a token to be learnt; `learn` is neither.
  """
  if learn not in LEARN:
    raise InputError(f'data.learn={learn!r} is unknown: use one of {", ".join(LEARN)}')
  texts = [text for text in texts if learn == 'all' or text.answered]
  finished: list[list[Text]] = []
  filling: list[tuple[int, list[Text]]] = []
  for text in texts:
    size = min(len(text.tokens), length)
    place = next((i for i, (room, _) in enumerate(filling) if room >= size), None)
    if place is None:
      filling.append((length, []))
      place = len(filling) - 1
    room, row = filling[place]
    filling[place] = room - size, [*row, text]
    if len(filling) > OPEN_ROWS:
      fullest = min(range(len(filling)), key=lambda i: filling[i][0])
      finished.append(filling.pop(fullest)[1])
  made = [_row(texts, length, learn) for texts in finished + [row for _, row in filling]]
  if not any(row['trains'].any() for row in made):
    raise InputError('the corpus has no answers to train on: make a larger one')
  return made


def _row(texts: Sequence[Text], length: int, learn: str) -> dict[str, np.ndarray]:
  tokens, segments, positions = (np.zeros(length, np.int32) for _ in range(3))
  trains = np.zeros(length, bool)
  start = 0
  for number, text in enumerate(texts, start=1):
    cut = max(len(text.tokens) - length, 0)
    end = start + len(text.tokens) - cut
    tokens[start:end], segments[start:end] = text.tokens[cut:], number
    positions[start:end] = np.arange(end - start)
    trains[start + (max(text.prompt_length - cut, 0) if learn == 'answers' else 0):end] = True
    start = end
  return {'tokens': tokens, 'segments': segments, 'positions': positions, 'trains': trains}


def frequent_tokens(texts: Iterable[Text], count: int, num_tokens: int) -> np.ndarray:
  """[U] ascending int32: the tokens that answers hold most (Zhao et al., 2025, FR-Spec), of equals the lower id.

  Raises:
    InputError: more than there are.
  """
  if not 1 <= count <= num_tokens:
    raise InputError(f'a draft vocabulary of {count} tokens: the target has {num_tokens}')
  times_V = np.zeros(num_tokens, np.int64)
  for text in texts:
    np.add.at(times_V, np.asarray(text.tokens[text.prompt_length:], np.int64), 1)
  return np.sort(np.argsort(-times_V, kind='stable')[:count]).astype(np.int32)
