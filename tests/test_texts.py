"""Training texts: every kind, and what is held out."""

import importlib.machinery
import json
from pathlib import Path
import sys
import types

from ml_collections import ConfigDict
import pytest

from launch.bpe import END, train_tokenizer
from launch.texts import is_held_out, texts
from models.errors import InputError
from models.tokenizer import Tokenizer


def data(**changes) -> ConfigDict:
  fields = {'kind': 'stdlib', 'path': '', 'name': '', 'split': 'train', 'field': 'text', 'limit': 0, 'held_out': 0.2}
  return ConfigDict(fields | changes)


def test_the_standard_library():
  """Sources that every Python has: no tests, no site-packages; parts that do not meet and are all of it."""
  trained, held_out = ([*texts(data(), part)] for part in (False, True))
  assert len(trained) > 300 and not set(trained) & set(held_out)
  assert 0.1 < len(held_out) / (len(trained) + len(held_out)) < 0.3
  assert not any('import jax' in text for text in trained)
  assert any('class JSONDecoder' in text for text in trained + held_out)


def test_held_out_by_hash():
  texts = [f'text number {i}' for i in range(2000)]
  shares = [sum(is_held_out(text, share) for text in texts) / len(texts) for share in (0.0, 0.05, 0.5)]
  assert shares[0] == 0 and shares[1] == pytest.approx(0.05, abs=0.02) and shares[2] == pytest.approx(0.5, abs=0.05)
  assert all(is_held_out(text, 0.5) for text in texts if is_held_out(text, 0.05))


def test_files(tmp_path):
  for i in range(20):
    (tmp_path / f'{i}.txt').write_text(f'text {i}')
  (tmp_path / 'empty.txt').write_text(' \n')
  found = [*texts(data(kind='text', path=f'{tmp_path}/*.txt', held_out=0.0), False)]
  assert sorted(found) == sorted(f'text {i}' for i in range(20))
  assert len([*texts(data(kind='text', path=f'{tmp_path}/*.txt', held_out=0.0, limit=5), False)]) == 5


def test_json_lines(tmp_path):
  path = tmp_path / 'texts.jsonl'
  path.write_text('\n'.join(json.dumps({'body': f'text {i}'}) for i in range(9)) + '\n\n')
  assert [*texts(data(kind='jsonl', path=str(path), field='body', held_out=0.0), False)] == [
      f'text {i}' for i in range(9)]
  with pytest.raises(InputError, match=r"line 1 of .* has no text in the field data\.field='text'"):
    [*texts(data(kind='jsonl', path=str(path)), False)]


@pytest.mark.parametrize('changes, said', [
    ({'kind': 'books'}, "data.kind='books' is unknown: use one of stdlib, text, jsonl, datasets"),
    ({'held_out': 1.0}, 'must lie in'), ({'limit': -1}, 'must be 0 or more'),
    ({'kind': 'text', 'path': '/nowhere/*.txt'}, 'no file matches'),
    ({'kind': 'jsonl', 'path': '/nowhere.jsonl'}, 'cannot be read'), ({'held_out': 0.0}, 'gives no held-out text')])
def test_wrong_input(changes, said):
  with pytest.raises(InputError) as caught:
    [*texts(data(**changes), True)]
  assert said in str(caught.value) and '\n' not in str(caught.value)


def test_datasets(monkeypatch):
  """As the package is called; it needs a network, so this one is made up."""
  package = types.ModuleType('datasets')
  package.__spec__ = importlib.machinery.ModuleSpec('datasets', None)

  def load_dataset(name: str, part: str | None, split: str, streaming: bool) -> list[dict]:
    if name == 'nothing':
      raise FileNotFoundError('no such dataset\non this hub')
    return [{'text': f'{name} {part} {split} {streaming}'}, {'text': 'two'}]

  package.load_dataset = load_dataset
  monkeypatch.setitem(sys.modules, 'datasets', package)
  section = data(kind='datasets', name='some', held_out=0.0)
  assert [*texts(section, False)] == ['some None train True', 'two']
  with pytest.raises(InputError, match=r"data\.name='nothing' cannot be loaded: no such dataset$"):
    [*texts(data(kind='datasets', name='nothing'), False)]
  with pytest.raises(InputError, match=r"no text in the field data\.field='body': it has text"):
    [*texts(data(kind='datasets', name='some', field='body'), False)]


def test_without_datasets(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(InputError, match='pip install datasets'):
    [*texts(data(kind='datasets', name='some'), False)]


def test_vocabulary(tmp_path):
  """Of its own making, and lossless on any text; the end of a text begins every document."""
  train_tokenizer(['def one():\n  return 1\n'] * 3 + ['été'], 270, tmp_path / 'it')
  tokenizer = Tokenizer.from_hf(tmp_path / 'it')
  end = tokenizer.eos_id
  assert tokenizer.vocab[end] == END and tokenizer.eos_ids == {end} and 257 <= tokenizer.num_tokens <= 270
  for text in ('def one():\n  return 1\n', 'Größe 漢字 \x00 🙂', ' leading space'):
    ids = tokenizer.encode(text, add_special=True)
    assert ids[0] == end and tokenizer.decode(ids) == text
  again = Path(tmp_path / 'again')
  train_tokenizer(['def one():\n  return 1\n'] * 3 + ['été'], 270, again)
  assert (again / 'tokenizer.json').read_bytes() == (tmp_path / 'it' / 'tokenizer.json').read_bytes()
  with pytest.raises(InputError, match='too small'):
    train_tokenizer(['a'], 100, tmp_path / 'small')
