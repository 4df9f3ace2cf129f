"""Cuts what a model wrote into a HumanEval completion: text that makes a program when appended to the prompt.

Plain and speculative runs both go through `completion`, so that a difference in scores is one in the text.
"""

import re
import textwrap

from launch.prompts import HUMANEVAL_STOPS, Problem

# Marks that a tokenizer may have left in the text where the model ended it.
END_OF_TEXT = ('<|endoftext|>', '<|end_of_text|>', '<|im_end|>', '<|eot_id|>', '<end_of_turn>', '<eos>', '</s>')
# What may follow a whole function in a chat reply and is no part of it; helper functions are.
TRIALS = ('\nprint', '\nif', '\nassert')

_BLOCK = re.compile(r'^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)', re.DOTALL | re.MULTILINE)
_CODE_LINE = re.compile(r'^(?:from |import |def |class |@)', re.MULTILINE)


def completion(text: str, problem: Problem, chat: bool) -> str:
  """The completion in `text`, a chat reply or the raw continuation of the prompt."""
  text = cut(text, END_OF_TEXT)
  return from_reply(text, problem.entry_point) if chat else cut(text, HUMANEVAL_STOPS)


def cut(text: str, stops: tuple[str, ...], start: int = 0) -> str:
  """`text` up to the first of `stops`."""
  found = [position for stop in stops if (position := text.find(stop, start)) >= 0]
  return text[:min(found, default=len(text))]


def from_reply(reply: str, entry_point: str) -> str:
  """The code of a reply, fit to follow the prompt.

  A whole function is appended as it is: it then replaces the one that the prompt began (whose body so far is its
  docstring), and the prompt's imports and helpers stay in force. Otherwise the code is the body, indented if need be.
  """
  code = code_block(reply, entry_point)
  if definition := _definition(entry_point).search(code):
    return '\n' + cut(code, TRIALS, definition.start())
  indented = code.lstrip('\n').startswith((' ', '\t'))
  return code if indented else textwrap.indent(code, '    ')


def code_block(reply: str, entry_point: str) -> str:
  """The first fenced block that defines `entry_point`, else the first block, else the reply from its first code line.

  A block that the token limit left open reaches to the end of the reply.
  """
  blocks = [textwrap.dedent(block) if _definition(entry_point).search(textwrap.dedent(block)) else block
            for block in _BLOCK.findall(reply)]
  defining = [block for block in blocks if _definition(entry_point).search(block)]
  if blocks:
    return (defining or blocks)[0]
  first = _CODE_LINE.search(reply)
  return reply[first.start():] if first else reply


def program(problem: Problem, text: str) -> str:
  """What is run: the prompt as it is, its last line break included, the completion, and the problem's tests."""
  return f'{problem.prompt}{text}\n{problem.test}\ncheck({problem.entry_point})\n'


def _definition(name: str) -> re.Pattern[str]:
  return re.compile(rf'^(?:async )?def {re.escape(name)}\b', re.MULTILINE)
