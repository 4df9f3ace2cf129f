"""What a target is asked so that its answers train a draft: nothing that it is evaluated on.

    function    a function of the standard library, to be completed from its signature and docstring, as in HumanEval
    story       one of gensim's 300 background stories, to be summarized
    chat        nothing: the target writes the user's message too, from the template's opening of a user's turn (Xu et
                al., 2024, Magpie)
"""

import ast
from collections.abc import Iterator
import pathlib
import sysconfig
import textwrap

from launch.evaluation_texts import shared_with
from launch.prompts import HUMANEVAL_REQUEST, Prompt, background_stories, summary_prompt
from models.errors import InputError
from models.tokenizer import Tokenizer

KINDS = ('chat', 'function', 'story')
NOT_OURS = {'site-packages', 'dist-packages', 'test', 'tests', 'idlelib', 'lib2to3'}
MARK = 'WHAT-THE-USER-SAYS'


def prompts_of(kind: str, chat: bool) -> list[Prompt]:
  """All prompts of a kind but those that share words with what is evaluated on; of 'chat' there is no list.

  Args:
    kind: 'function' or 'story'.
    chat: requests; without it texts to be gone on with.
  """
  prompts = functions(chat) if kind == 'function' else summaries(chat)
  return [prompt for prompt in prompts if shared_with(prompt.text) is None]


def functions(chat: bool) -> Iterator[Prompt]:
  for module, source in library_files():
    yield from _functions_of(module, source, chat)


def library_files() -> Iterator[tuple[str, str]]:
  """Modules of this Python's standard library and their sources, by file name."""
  root = pathlib.Path(sysconfig.get_path('stdlib'))
  for path in sorted(root.rglob('*.py')):
    parts = path.relative_to(root).with_suffix('').parts
    if NOT_OURS.isdisjoint(parts):
      yield '.'.join(parts), path.read_text(encoding='utf-8', errors='replace')


def _functions_of(module: str, source: str, chat: bool) -> Iterator[Prompt]:
  """Functions and methods, each from its `def` to the end of its docstring, once."""
  lines, seen = source.splitlines(keepends=True), set()
  for node in ast.walk(ast.parse(source)):
    if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node) or node.name in seen:
      continue
    if len(node.body) < 2:  # a docstring and nothing to complete
      continue
    seen.add(node.name)
    text = textwrap.dedent(''.join(lines[node.lineno - 1:node.body[0].end_lineno]))
    yield Prompt(f'function/{module}.{node.name}', HUMANEVAL_REQUEST.format(prompt=text) if chat else text, chat)


def summaries(chat: bool) -> Iterator[Prompt]:
  return (summary_prompt(story, [], chat) for story in background_stories(300))


def user_opening(tokenizer: Tokenizer) -> list[int]:
  """The ids of a conversation up to where the user begins to speak.

  Raises:
    InputError: a template that the user's words do not go through as they are.
  """
  text = tokenizer.apply_chat([{'role': 'user', 'content': MARK}])
  if text.count(MARK) != 1:
    raise InputError('the chat template changes what the user says: no chat can be sampled from it, use --chat=0')
  return tokenizer.encode(text.partition(MARK)[0], parse_special=True)
