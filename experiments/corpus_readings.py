"""What a target reads so that its drafts learn its law there too: texts that it did not write, and was not asked.

    source      files of the standard library
    article     those of the English Wikipedia that gensim's package has

The law costs one pass over many tokens, a fifth of what it costs to decode them. Trained on such texts instead of the
target's own, heads lose little (Li et al., 2024, table 6: 2.78 against 2.88 times as fast); here they come on top.
"""

import bz2
from collections.abc import Callable, Iterator
import contextlib
from xml.etree import ElementTree

import mwparserfromhell

from experiments.corpus_prompts import library_files
from launch.prompts import packaged

ARTICLES = 'gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2'
SCHEMA = '{http://www.mediawiki.org/xml/export-0.10/}'

NO_WORDS = ('file:', 'image:', 'category:')  # links to what has none


def articles() -> Iterator[tuple[str, str]]:
  """Titles and texts."""
  with bz2.open(packaged('gensim', ARTICLES, 'pip install --no-deps gensim')) as file:
    for _, page in ElementTree.iterparse(file):
      text = page.findtext(f'{SCHEMA}revision/{SCHEMA}text') if page.tag == f'{SCHEMA}page' else None
      if text and not text.upper().startswith('#REDIRECT'):
        yield page.findtext(f'{SCHEMA}title') or '', plain(text)


def plain(wikitext: str) -> str:
  """The words that a reader sees of it, paragraph by paragraph; no tables, footnotes and pictures."""
  code = mwparserfromhell.parse(wikitext)
  unread = code.filter_tags(matches=lambda node: node.tag in ('ref', 'table'))
  unread += code.filter_wikilinks(matches=lambda link: str(link.title).strip().lower().startswith(NO_WORDS))
  for node in unread:
    with contextlib.suppress(ValueError):  # inside one that is gone
      code.remove(node)
  paragraphs = code.strip_code().split('\n\n')
  return '\n\n'.join(filter(None, map(str.strip, paragraphs)))


READINGS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {'source': library_files, 'article': articles}
