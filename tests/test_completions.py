"""Completions are cut as the benchmark demands (fault 61)."""

import pytest

from experiments.completions import completion, program
from launch.prompts import HUMANEVAL_STOPS, Problem

PROBLEM = Problem(
    task_id='Toy/0', entry_point='double',
    prompt='import math\n\n\ndef helper(x):\n    return x\n\n\ndef double(x):\n    """ Twice x. """\n',
    canonical_solution='    return 2 * x\n', test='def check(candidate):\n    assert candidate(3) == 6\n')
BODY = '    y = helper(x)\n\n    def add(z):\n        return z + z\n\n    return add(y)\n'
FUNCTION = 'def double(x):\n    """ Twice x. """\n    return helper(2 * x)\n'


def runs(text: str) -> bool:
  try:
    exec(program(PROBLEM, text), {})  # our own text, not a model's
  except Exception:
    return False
  return True


def test_second_definition_is_cut():
  """Fault 61: a second top-level def ends the completion."""
  assert completion(BODY + '\ndef other():\n    pass\n', PROBLEM, chat=False) == BODY


@pytest.mark.parametrize('stop', HUMANEVAL_STOPS)
def test_every_stop_sequence(stop):
  assert completion(f'    return 2 * x{stop} rest\ndef', PROBLEM, chat=False) == '    return 2 * x'


def test_nested_definitions_and_blank_lines_are_kept():
  """Fault 61: nested def and blank lines inside the body kept."""
  text = '    if x:\n        # note\n        print(x)\n\n\n    class A:\n        pass\n' + BODY
  assert completion(text, PROBLEM, chat=False) == text


@pytest.mark.parametrize('marker', ['<|endoftext|>', '<|im_end|>', '</s>', '<|eot_id|>'])
@pytest.mark.parametrize('chat', [False, True])
def test_end_of_text_marker_is_removed(marker, chat):
  """Fault 61: end-of-text marker removed, with all that follows."""
  text = BODY if not chat else f'```python\n{FUNCTION}```'
  cleaned = completion(f'{text}{marker}<|im_start|>junk', PROBLEM, chat)
  assert marker not in cleaned and runs(cleaned)


def test_prompt_newline_is_kept():
  """Fault 61: nothing is stripped between prompt and completion."""
  assert program(PROBLEM, '    return 2 * x').startswith(PROBLEM.prompt + '    return 2 * x\n')
  assert completion('\n    return 2 * x', PROBLEM, chat=False) == '\n    return 2 * x'
  assert runs('    return 2 * x')


@pytest.mark.parametrize('reply', [
    f'```python\n{FUNCTION}```',
    f'Here it is:\n\n```python\n{FUNCTION}```\nIt doubles.',
    f'```\n{FUNCTION}```',
    f'```py\nimport os\n\n\n{FUNCTION}\n\ndef helper(x):\n    return x\n```',
    f'```python\n{FUNCTION}',  # cut by the token limit
    FUNCTION,
    f'Sure.\n\n{FUNCTION}',
    f'```python\nprint("setup")\n```\nand\n```python\n{FUNCTION}```',
    f'```python\n{FUNCTION}\n# Example\nprint(double("x", 3))\n```',
    f'```python\n{FUNCTION}\nassert double(1) == 5\n```',
    f'```python\n{FUNCTION}\nif __name__ == "__main__":\n    1 / 0\n```',
    f'1. Code:\n\n   ```python\n   {FUNCTION.replace(chr(10), chr(10) + "   ").rstrip()}\n   ```',
    '```python\nreturn helper(2 * x)\n```',
    '```python\ny = 2\nreturn helper(y * x)\n```',
    '```python\n    return helper(2 * x)\n```',
    '    return helper(2 * x)',
    'return 2 * x',
])
def test_chat_reply_makes_a_program(reply):
  """The signature may be repeated or not, the block open or closed: prompt + completion runs."""
  assert runs(completion(reply, PROBLEM, chat=True))


@pytest.mark.parametrize('reply', ['', 'I cannot do that.', '```python\n```', '```python\ndef double(x):\n    retu'])
def test_chat_reply_without_solution(reply):
  assert not runs(completion(reply, PROBLEM, chat=True))


def test_function_of_similar_name_is_no_definition():
  reply = '```python\ndef double_it(x):\n    return 0\n```\n```python\ndef double(x):\n    return 2 * x\n```'
  assert runs(completion(reply, PROBLEM, chat=True))
