"""Spec-Bench's protocol by hand, and the table of the README."""

import itertools
import types

from absl import flags
from ml_collections import ConfigDict
import pytest

from experiments.peers import readme_table, spec_bench
from experiments.peers.contestant import Contestant
from experiments.peers.spec_bench import Answered, Question
from launch import timing
from launch.errors import RunError
from models.errors import InputError


def contestant(software, drafter='none', reply=(7, 8), passes=2, **settings):
  return Contestant(software, '1', drafter, settings, prepare=list, decode=lambda ids: [*reply],
                    passes=None if passes is None else lambda decode, ids: passes)


class Tokens:
  """One id a character, and a chat template that shows who spoke."""

  def apply_chat(self, messages):
    return ''.join(f'{message["role"][0]}:{message["content"]};' for message in messages)

  def encode(self, text, parse_special):
    return [ord(letter) for letter in text]

  def decode(self, ids):
    return ''.join(map(str, ids))


CONFIG = types.SimpleNamespace(new_tokens=4, capacity=60)


def test_turns_follow_the_own_answers(monkeypatch):
  """Two turns: tokens, seconds and passes add up, and the second prompt holds the first answer."""
  asked, clock = [], itertools.count(1)

  def measure(functions, repeats, warmups):
    assert (repeats, warmups) == (3, 1)
    return {name: timing.Timing((float(next(clock)),) * 3, 0.0, run()) for name, run in functions.items()}

  one = contestant('specdec')
  one = Contestant(**vars(one) | {'prepare': lambda ids: asked.append(''.join(map(chr, ids))) or ids})
  monkeypatch.setattr(spec_bench, 'measure', measure)
  question = Question('1', 'writing', ('hello', 'again'))
  found = spec_bench.answer([one], question, Tokens(), CONFIG, warmups=1)
  assert found == {'specdec none': Answered(4, (3.0,) * 3, 4)}
  assert set(asked) == {'u:hello;', 'u:hello;a:78;u:again;'}
  with pytest.raises(InputError, match='question 1 has 8 tokens: raise capacity above 12'):
    spec_bench.answer([one], question, Tokens(), types.SimpleNamespace(new_tokens=4, capacity=10), warmups=1)


def test_room_is_checked_before_the_first_question(monkeypatch):
  """The last question's second turn may not fit behind an answer of full length."""
  monkeypatch.setattr(spec_bench, 'answer', None)
  questions = [Question('1', 'writing', ('hello',)), Question('2', 'writing', ('hello', 'again'))]
  needs = len('u:hello;a:;u:again;') + 2 * 4
  with pytest.raises(InputError, match=f'question 2 may come to {needs} tokens'):
    spec_bench.answers([], questions, Tokens(), types.SimpleNamespace(new_tokens=4, capacity=needs - 1), None)
  spec_bench.check_room(questions, Tokens(), types.SimpleNamespace(new_tokens=4, capacity=needs))


def test_questions_that_are_done_stay(tmp_path, monkeypatch):
  """The second question fails; the next run answers it, and the first no more."""
  asked, broken = [], ['2']

  def answer(everyone, question, tokenizer, config, warmups):
    asked.append((question.id, warmups))
    if question.id in broken:
      raise RunError('out of memory')
    return {'specdec none': Answered(4, (1.0, 2.0, 3.0), None)}

  monkeypatch.setattr(spec_bench, 'answer', answer)
  flags.FLAGS.mark_as_parsed()
  questions = [Question(name, 'writing', ('hello',)) for name in '123']
  run = lambda questions: spec_bench.answers([contestant('specdec')], questions, Tokens(), ConfigDict(vars(CONFIG)),
                                             str(tmp_path))
  with pytest.raises(RunError):
    run(questions)
  broken.clear()
  assert run(questions) == [(question, {'specdec none': Answered(4, (1.0, 2.0, 3.0), None)}) for question in questions]
  assert asked == [('1', 3), ('2', 1), ('2', 3), ('3', 1)]
  with pytest.raises(InputError, match='has results of other work'):
    run([*questions[:2], Question('4', 'writing', ('hello',))])


def test_metrics_by_hand():
  """The ratio of mean speeds, not the mean of ratios; MAT over all tokens of a category."""
  plain, lookup, other = contestant('specdec'), contestant('specdec', 'lookup', gamma=4), contestant('b', passes=None)
  answered = [
      (Question('1', 'math', ('x',)), {
          'specdec none': Answered(10, (1.0, 1.0, 1.0), 10), 'specdec lookup (gamma=4)': Answered(10, (.5,) * 3, 4),
          'b none': Answered(10, (2.0,) * 3, None)}),
      (Question('2', 'rag', ('x',)), {
          'specdec none': Answered(30, (1.0, 1.0, 1.0), 30), 'specdec lookup (gamma=4)': Answered(30, (1.0,) * 3, 16),
          'b none': Answered(30, (2.0,) * 3, None)})]
  rows = {(row['category'], row['software'], row['drafter']): row
          for row in spec_bench.rows_of([plain, lookup, other], answered)}
  assert len(rows) == 9 and rows['math', 'specdec', 'lookup']['speedup'] == 2
  overall = rows['overall', 'specdec', 'lookup']
  assert overall['tokens_per_second'] == 25 and overall['speedup'] == pytest.approx(25 / 20)
  assert overall['mean_accepted_tokens'] == 2 and overall['questions'] == 2
  assert rows['overall', 'specdec', 'none']['mean_accepted_tokens'] == 1
  assert rows['overall', 'b', 'none']['mean_accepted_tokens'] is None


def test_questions(tmp_path):
  file = tmp_path / 'question.jsonl'
  file.write_text('{"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": []}\n\n')
  assert spec_bench.read_questions(str(file)) == [Question('81', 'writing', ('a', 'b'))]
  for line in ('{', '[]', '{"question_id": 1, "category": "x", "turns": []}',
               '{"question_id": 1, "category": "x", "turns": "ab"}', '{"category": "x", "turns": ["a"]}'):
    file.write_text(line)
    with pytest.raises(InputError, match='line 1: give question_id'):
      spec_bench.read_questions(str(file))
  file.write_text('')
  with pytest.raises(InputError, match='holds no question'):
    spec_bench.read_questions(str(file))
  with pytest.raises(InputError, match='cannot be read'):
    spec_bench.read_questions(str(tmp_path / 'none.jsonl'))


def row(software, drafter, ms, setting='', **run):
  return {'task': 'news', 'software': software, 'drafter': drafter, 'setting': setting, 'ms_per_token': ms,
          'commit': 'b', 'cpu_model': 'x', 'prompts': 2} | run


@pytest.mark.parametrize('other', [{'commit': 'a'}, {'cpu_model': 'y'}, {'prompts': 3}])
def test_a_line_is_of_one_run(other):
  """Older rows of other software, however fast, do not stand beside the newest of specdec."""
  rows = [row('specdec', 'none', 9.0, **other), row('transformers', 'none', 1.0, **other), row('specdec', 'none', 20.0),
          row('llama.cpp', 'none', 30.0), row('llama.cpp', 'none', 2.0, **other)]
  assert readme_table.table(rows).splitlines()[2:] == ['| news | plain | 20.0 | - | 30.0 |']


def test_table_of_the_readme():
  rows = [row('specdec', 'none', 20.0), row('specdec', 'none', 15.04), row('transformers', 'none', 40.0),
          row('specdec', 'lookup', 9.0, 'gamma 4'), row('specdec', 'lookup', 8.0, 'gamma 7'),
          row('llama.cpp', 'draft', 1.0)]
  made = readme_table.table(rows)
  assert made.splitlines()[2:] == ['| news | plain | 15.0 | 40.0 | - |', '| news | best lookup | 8.0 | - | - |']
  text = 'a\n<!-- peers -->\nold\n<!-- /peers -->\nb\n'
  once = readme_table.replaced(text, made)
  assert once == f'a\n<!-- peers -->\n{made}\n<!-- /peers -->\nb\n' and readme_table.replaced(once, made) == once
  for wrong in ('none', '<!-- /peers --> <!-- peers -->', text * 2):
    with pytest.raises(InputError, match='once each'):
      readme_table.replaced(wrong, made)
  with pytest.raises(InputError, match='no rows of specdec'):
    readme_table.table([row('transformers', 'none', 1.0)])
