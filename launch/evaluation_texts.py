"""What drafts are evaluated on, HumanEval and the 50 news stories, and a check that a text shares nothing with it.

Two texts share something where 13 words in a row are the same, letters and digits alone compared (the rule by which
Brown et al., 2020, GPT-3, appendix C, cleaned their data).
"""

from collections.abc import Iterable, Iterator
import functools
import re

from launch.prompts import humaneval_problems, packaged_stories
from models.errors import InputError

WORDS = 13
_WORD = re.compile(r'[^\W_]+')


def runs_of_words(text: str) -> Iterator[tuple[str, ...]]:
  """All runs of `WORDS` words."""
  words = _WORD.findall(text.lower())
  return zip(*(words[start:] for start in range(WORDS)), strict=False)


@functools.cache
def evaluated() -> dict[tuple[str, ...], str]:
  """Run of words -> the id of the problem or story that has it.

  Raises:
    InputError: if a package that ships them is not installed.
  """
  texts = {problem.task_id: f'{problem.prompt}\n{problem.canonical_solution}\n{problem.test}'
           for problem in humaneval_problems()}
  texts |= {story.id: f'{story.summary} {story.document}' for story in packaged_stories('lee.cor', 'news')}
  return {run: name for name, text in texts.items() for run in runs_of_words(text)}


def shared_with(text: str) -> str | None:
  """What it shares 13 words with: "HumanEval/7 ('the words')"; None for a clean text."""
  known = evaluated()
  return next((f"{known[run]} ({' '.join(run)!r})" for run in runs_of_words(text) if run in known), None)


def check_clean(texts: Iterable[tuple[str, str]]) -> None:
  """Refuses texts, given with their names, of which one is also evaluated on.

  Raises:
    InputError: names it, and what it shares words with.
  """
  for name, text in texts:
    if found := shared_with(text):
      raise InputError(f'text {name!r} shares {WORDS} words with {found}, which is evaluated on: leave it out')
