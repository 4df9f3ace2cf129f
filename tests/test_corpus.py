"""Corpora: rows of texts, what is held out, what must not be in them, and going on where a run ended."""

import dataclasses
import json
import pathlib

from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import tiny
from experiments import make_corpus
from experiments.corpus_prompts import _functions_of, library_files, prompts_of
from experiments.corpus_readings import articles, plain
from launch import evaluation_texts
from launch.corpus import LEARN, Text, check_ids, check_made_by, corpora, frequent_tokens, read_texts, rows, whole
from launch.prompts import Prompt, humaneval_problems, load_prompts
from launch.session import Session
from models.errors import InputError


def text(number: int, prompt: int, answer: int) -> Text:
  tokens = tuple(1 + (number * 37 + place) % 60 for place in range(prompt + answer))
  return Text(f'it/{number}', 'chat', 0.0, prompt, tokens)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=30), st.integers(4, 24),
       st.sampled_from(LEARN))
def test_rows(sizes, length, learn):
  """Every text is there once, whole or its end; segments, positions and what is learnt are its own."""
  texts = [text(number, *size) for number, size in enumerate(sizes)]
  found = []
  for row in rows(texts, length, learn):
    assert all(len(field) == length for field in row.values())
    for segment in range(1, row['segments'].max() + 1):
      places = np.flatnonzero(row['segments'] == segment)
      np.testing.assert_array_equal(np.diff(places), 1)
      np.testing.assert_array_equal(row['positions'][places], np.arange(len(places)))
      found.append((tuple(row['tokens'][places].tolist()), int(row['trains'][places].sum())))
    assert not row['trains'][row['segments'] == 0].any()
  learnt = lambda one: len(one.tokens) - (one.prompt_length if learn == 'answers' else 0)
  assert sorted(found) == sorted((one.tokens[-length:], min(learnt(one), length)) for one in texts)


def test_texts_without_an_answer():
  """They are learnt or passed over, and never held out."""
  read = [text(number, 7, 0) for number in range(100)]
  assert not any(one.held_out for one in read)
  assert len(rows([text(0, 2, 3), *read], 8)) == 1
  assert len(rows([text(0, 2, 3), *read], 8, 'all')) == 101
  with pytest.raises(InputError, match='no answers to train on'):
    rows(read, 8)
  with pytest.raises(InputError, match=r"data\.learn='some' is unknown: use one of answers, all"):
    rows(read, 8, 'some')


def test_held_out_by_prompt():
  """A twentieth, whatever else is in the corpus; all answers to a prompt fall on one side."""
  texts = [text(number, 1, 1) for number in range(2000)]
  share = np.mean([one.held_out for one in texts])
  assert 0.03 < share < 0.07
  assert all(one.held_out == dataclasses.replace(one, tokens=(9, 9), temperature=0.8).held_out for one in texts)


def test_frequent_tokens():
  texts = [Text('a', 'chat', 0.0, 2, (9, 9, 5, 5, 7)), Text('b', 'chat', 0.0, 1, (1, 7, 5, 3)),
           Text('read', 'source', 0.0, 2, (2, 2))]
  np.testing.assert_array_equal(frequent_tokens(texts, 3, 10), [3, 5, 7])
  np.testing.assert_array_equal(frequent_tokens(texts, 5, 10), [0, 1, 3, 5, 7])
  with pytest.raises(InputError, match='a draft vocabulary of 11 tokens: the target has 10'):
    frequent_tokens(texts, 11, 10)


def test_nothing_to_read(tmp_path):
  with pytest.raises(InputError, match='holds no corpus'):
    read_texts(str(tmp_path))
  (tmp_path / 'unit-00000-of-00002.json').write_text('{"texts": []}')
  with pytest.raises(InputError, match='has 1 of 2 units'):
    read_texts(str(tmp_path))
  (tmp_path / 'unit-00001-of-00002.json').write_text('{"texts": [{"id": 3}]}')
  with pytest.raises(InputError, match='is no unit of a corpus'):
    read_texts(str(tmp_path))
  with pytest.raises(InputError, match='no answers'):
    rows([], 8)


@pytest.mark.parametrize('names', [
    ('unit-00000-of-x.json',), ('unit-00000-of-00001.json', 'unit-00000-of-00002.json'),
    ('unit-00000-of-00002.json', 'unit-x-of-00002.json'), ('unit-00000-of-².json',)])
def test_units_of_several(names, tmp_path):
  for name in names:
    (tmp_path / name).write_text('{"texts": []}')
  with pytest.raises(InputError, match=r'is no unit of the corpus that .* belongs to: keep the units of one alone'):
    read_texts(str(tmp_path))


def test_a_corpus_of_another_target(tmp_path):
  """By its name and by its tokens; a name is a place, however it is written. Without about.json it is anybody's."""
  (tmp_path / 'unit-00000-of-00001.json').write_text('{"texts": []}')
  check_made_by(str(tmp_path), 'embedded')
  model = tmp_path / 'model'
  model.mkdir()
  (tmp_path / 'about.json').write_text(json.dumps({'target': {'source': str(model), 'dtype': 'float32'}}))
  check_made_by(str(tmp_path), f'{model}/../model')
  with pytest.raises(InputError, match=r"holds answers of target\.source='.*/model', not 'embedded'"):
    check_made_by(str(tmp_path), 'embedded')
  texts = [text(1, 2, 3)]
  most = max(texts[0].tokens)
  check_ids('it', texts, most + 1)
  with pytest.raises(InputError, match=f"text 'it/1' has the token {most}, and the target {most} tokens"):
    check_ids('it', texts, most)


def test_texts_that_fit():
  texts = [text(1, 4, 4), text(2, 4, 5), text(3, 1, 1)]
  assert whole(texts, 8) == [texts[0], texts[2]]


# What is evaluated on


def planted() -> dict[str, str]:
  """Pieces of what is evaluated on, somewhat rewritten."""
  problem = humaneval_problems()[1]
  story = load_prompts(ConfigDict({'kind': 'news', 'form': 'raw'}))[3]
  words = story.text.split()
  return {'a prompt': f'Please write this: {problem.prompt.upper()}', 'a solution': problem.canonical_solution,
          'a story': ' '.join(words[20:40]).replace(' ', '\n'), 'a summary': f'In short: {story.reference}'}


def test_clean_texts():
  """A text that shares 13 words is refused by name; one that shares 12 is not."""
  for name, leak in planted().items():
    with pytest.raises(InputError, match=rf"text '{name}' shares 13 words with \S+/\d+ "):
      evaluation_texts.check_clean([('fine', 'nothing to see'), (name, leak)])
  words = load_prompts(ConfigDict({'kind': 'news', 'form': 'raw'}))[3].text.split()
  evaluation_texts.check_clean([('short', ' '.join(words[20:31]))])


def test_prompts_are_clean():
  """The stories; functions of one module stand for all, which take a while."""
  stories = prompts_of('story', chat=True)
  assert 250 < len(stories) <= 300
  evaluation_texts.check_clean((prompt.id, prompt.text) for prompt in stories)
  source = pathlib.Path(dataclasses.__file__).read_text()
  functions = list(_functions_of('dataclasses', source, chat=True))
  names = {prompt.id for prompt in functions}
  assert 'function/dataclasses.asdict' in names and len(names) == len(functions)
  asdict = next(prompt for prompt in functions if prompt.id.endswith('.asdict'))
  assert 'def asdict(obj' in asdict.text and asdict.text.endswith('"""\n```') and asdict.chat
  assert '_asdict_inner(' not in asdict.text  # no body
  raw = next(prompt for prompt in _functions_of('dataclasses', source, chat=False) if prompt.id == asdict.id)
  assert raw.text.startswith('def asdict(obj') and raw.text in asdict.text and not raw.chat
  assert not any(prompt.chat or prompt.text.startswith('Summ') for prompt in prompts_of('story', chat=False))


# Making one


class Toy:
  """The toy pair, whose tokenizer has no chat template: it is given the plainest one."""

  @staticmethod
  def session() -> Session:
    config = tiny.get_config('none')
    with config.unlocked():
      config.data.form = 'chat'
      config.engine.batch, config.engine.capacity, config.engine.logprobs = 4, 256, False
    session = Session.from_config(config)
    session.tokenizer.apply_chat = lambda messages: f'<{messages[0]["content"]}>'
    encode = session.tokenizer.encode
    session.tokenizer.encode = lambda text, add_special=False, parse_special=False: encode(text)
    return session


DRAWN = {'share': 0.5, 'temperature': 0.8, 'max_new_tokens': 12, 'seed': 0, 'skip': 0}


@pytest.fixture
def few_prompts(monkeypatch):
  prompts = [Prompt(f'story/{number}', f'Story number {number}.', True) for number in range(5)]
  monkeypatch.setattr(make_corpus, 'prompts_of', lambda kind, chat: prompts)
  monkeypatch.setattr(make_corpus, 'USER_TOKENS', 8)


def test_corpus(tmp_path, few_prompts):
  """Units hold what was asked; a run that was ended goes on and comes to the same; other work is refused."""
  session, wanted = Toy.session(), {'chat': 5, 'function': 0, 'story': 11}
  units = make_corpus.make(session, wanted, DRAWN, str(tmp_path))
  texts = read_texts(str(tmp_path))
  assert make_corpus.summary(units)['texts'] == wanted | {'source': 0, 'article': 0}
  stories = [one for one in texts if one.kind == 'story']
  assert {one.id for one in stories} == {f'story/{number}' for number in range(5)}
  drawn = [one for one in stories if one.temperature]
  assert len(drawn) >= 6 and len({one.tokens for one in drawn}) == len(drawn)  # asked again, they answer otherwise
  for one in texts:
    assert 0 < len(one.tokens) - one.prompt_length <= 12
    prompt = session.tokenizer.decode(one.tokens[:one.prompt_length])
    assert prompt == f'<Story number {one.id[6:]}.>' if one.kind == 'story' else prompt.startswith('<')
  path = sorted(tmp_path.glob('unit-*'))[2]
  before = json.loads(path.read_text())
  path.unlink()
  make_corpus.make(session, wanted, DRAWN, str(tmp_path))
  assert json.loads(path.read_text())['texts'] == before['texts']
  with pytest.raises(InputError, match='results of other work'):
    make_corpus.make(session, wanted, DRAWN | {'seed': 1}, str(tmp_path))
  session.config.data.form = 'raw'
  with pytest.raises(InputError, match=r'--chat: data\.form=raw is for a target without a chat template'):
    make_corpus.make(session, wanted, DRAWN, str(tmp_path))
  with pytest.raises(InputError, match='nothing is asked for'):
    make_corpus.make(session, dict.fromkeys(wanted, 0), DRAWN, str(tmp_path))


def test_a_further_corpus(tmp_path, few_prompts):
  """It begins where the first ends; a folder of both holds the texts of both, and says whose they are."""
  session, wanted = Toy.session(), {'chat': 2, 'function': 0, 'story': 2}
  for name, drawn in (('first', DRAWN), ('second', DRAWN | {'skip': 2})):
    make_corpus.make(session, wanted, drawn, str(tmp_path / name))
  first, second = ({one.id for one in read_texts(str(tmp_path / name))} for name in ('first', 'second'))
  assert len(first) == len(second) == 4 and not first & second
  assert {one.id for one in read_texts(str(tmp_path))} == first | second
  (tmp_path / 'vectors').mkdir()
  assert {one.id for one in read_texts(str(tmp_path / 'first'))} == first
  (tmp_path / 'second').rename(tmp_path / 'first' / 'second')
  assert {one.id for one in read_texts(str(tmp_path / 'first'))} == first | second
  (tmp_path / 'first' / 'second').rename(tmp_path / 'second')
  assert [folder.name for folder in corpora(str(tmp_path))] == ['first', 'second']
  with pytest.raises(InputError, match=r"first holds answers of target\.source='random:.*', not 'embedded'"):
    check_made_by(str(tmp_path), 'embedded')


def test_empty_chats_are_counted_apart(tmp_path, few_prompts, monkeypatch):
  monkeypatch.setattr(make_corpus.Answers, '_user_messages', lambda self, unit: [
      Prompt(one.prompt.id, 'Hello.' if int(one.prompt.id[-1]) % 2 else '', chat=True) for one in unit])
  units = make_corpus.make(Toy.session(), {'chat': 4, 'function': 0, 'story': 0}, DRAWN, str(tmp_path))
  facts = make_corpus.summary(units)
  assert (facts['texts']['chat'], facts['empty'], facts['too_long']) == (2, 2, 0)


def test_readings(tmp_path, monkeypatch):
  """Pieces that fill a row, a fair sample of them; a file's end that does not is lost. They have no answer."""
  files = {'long': ''.join(chr(97 + place // 256) for place in range(600)), 'short': 'x' * 255}
  monkeypatch.setitem(make_corpus.READINGS, 'source', lambda: iter(files.items()))
  units = make_corpus.make(Toy.session(), {'source': 9}, DRAWN, str(tmp_path))
  assert make_corpus.summary(units)['tokens'] == dict.fromkeys(make_corpus.summary(units)['texts'], 0) | {'source': 512}
  found = {one.id: one for one in read_texts(str(tmp_path))}
  assert set(found) == {'source/long#0', 'source/long#1'}
  assert all(not one.answered and len(set(one.tokens)) == 1 for one in found.values())


def test_what_there_is_to_read():
  """Articles as a reader sees them, and modules."""
  text = ("Intro '''bold''' [[page|words]].<ref>Footnote {{cite|x}}</ref>\n\n{| class=x\n| a cell\n|}\n\n== Title ==\n"
          '[[File:a.png|thumb|A picture]] More.<ref name=x />')
  assert plain(text).split() == ['Intro', 'bold', 'words.', 'Title', 'More.']
  title, first = next(articles())
  assert title == 'Anarchism' and first.startswith('Anarchism is a political philosophy that advocates self-governed')
  modules = {name for name, _ in library_files()}
  assert {'dataclasses', 'json.decoder'} <= modules and not any(name.startswith('test.') for name in modules)


def test_leaks_are_left_out(tmp_path, few_prompts, monkeypatch):
  """What the target recites of the evaluation never enters."""
  monkeypatch.setattr(make_corpus, 'shared_with', lambda text: 'HumanEval/0' if 'number 3' in text else None)
  units = make_corpus.make(Toy.session(), {'chat': 0, 'function': 0, 'story': 5}, DRAWN, str(tmp_path))
  assert make_corpus.summary(units)['left_out'] == 1
  assert 'story/3' not in {one.id for one in read_texts(str(tmp_path))}


def test_prompts_without_room_are_passed_over(tmp_path, monkeypatch):
  """Those that leave no room for the answer, and those that alone are longer than the cache."""
  prompts = [Prompt('story/short', 'Short.', True), Prompt('story/full', 'a' * 250, True),
             Prompt('story/endless', 'a' * 1000, True)]
  monkeypatch.setattr(make_corpus, 'prompts_of', lambda kind, chat: prompts)
  units = make_corpus.make(Toy.session(), {'chat': 0, 'function': 0, 'story': 3}, DRAWN, str(tmp_path))
  assert make_corpus.summary(units)['too_long'] == 2
  assert [one.id for one in read_texts(str(tmp_path))] == ['story/short']
