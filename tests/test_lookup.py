"""Prompt lookup against a plain search."""

from collections.abc import Sequence
import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from specdec import rng
from specdec.drafters import Lookup
from specdec.drafters.protocol import Context
from tests.toys import GREEDY

SLOTS, BATCH = 24, 4


@functools.partial(jax.jit, static_argnums=(0, 1))
def propose(drafter: Lookup, gamma: int, tokens_BL, length_B, gamma_B):
  context = Context(tokens_BL, length_B, gamma_B, length_B > 0, rng.row_keys(length_B), GREEDY, rng.Purpose.DRAFT)
  return drafter.propose(None, (), context, gamma)[0]


def drafts(drafter: Lookup, texts: Sequence[Sequence[int]], gamma: int, wanted: Sequence[int]) -> list[list[int]]:
  """The drafted tokens of each row; behind each text lie tokens that must not be found."""
  tokens_BL = np.ones((BATCH, SLOTS), np.int32)
  for row, text in enumerate(texts):
    tokens_BL[row, :len(text)] = text
  length_B = np.array([len(text) for text in texts], np.int32)
  draft = propose(drafter, gamma, tokens_BL, length_B, np.asarray(wanted, np.int32))
  assert draft.probs_BMV is None and draft.width == gamma
  return [row[:count].tolist() for row, count in zip(np.asarray(draft.tokens_BM), draft.count_B, strict=True)]


def one_draft(drafter: Lookup, text: Sequence[int], gamma: int) -> list[int]:
  return drafts(drafter, [text] * BATCH, gamma, [gamma] * BATCH)[0]


def plain_search(drafter: Lookup, text: Sequence[int], gamma: int, wanted: int) -> list[int]:
  """The rule in words: the longest n-gram that occurs earlier, its earliest (latest) occurrence, what followed it."""
  for n in range(drafter.max_ngram, drafter.min_ngram - 1, -1):
    ends = range(n, len(text) - n if not drafter.partial else len(text))
    hits = [end for end in ends if tuple(text[end - n:end]) == tuple(text[-n:])]
    if not drafter.partial:
      hits = [end for end in hits if end + gamma <= len(text)]
    if len(text) > n and hits:
      start = hits[-1] if drafter.latest else hits[0]
      return list(text[start:start + wanted])
  return []


@pytest.mark.parametrize('gamma', [1, 3])
@pytest.mark.parametrize('sizes', [(1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize('partial', [False, True])
@pytest.mark.parametrize('latest', [False, True])
def test_equals_plain_search(latest, partial, sizes, gamma):
  """Fault 33: the documented rule, n from 3 down to 1, is the tested one."""
  drafter = Lookup(*sizes, latest=latest, partial=partial)
  text = st.lists(st.integers(1, 3), min_size=1, max_size=SLOTS)
  rows = st.lists(st.tuples(text, st.integers(0, gamma)), min_size=BATCH, max_size=BATCH)

  @settings(max_examples=60, deadline=None)
  @given(rows)
  def check(rows):
    texts, wanted = zip(*rows, strict=True)
    expected = [plain_search(drafter, *row) for row in zip(texts, [gamma] * BATCH, wanted, strict=True)]
    assert drafts(drafter, texts, gamma, wanted) == expected

  check()


def test_earliest_or_latest():
  """Fault 33: 5 6 is followed by 7 first and by 8 last."""
  text = [5, 6, 7, 1, 5, 6, 8, 2, 5, 6]
  assert one_draft(Lookup(2, 2), text, 1) == [7]
  assert one_draft(Lookup(2, 2, latest=True), text, 1) == [8]


def test_longer_ngrams_win():
  text = [9, 6, 4, 5, 6, 7, 1, 5, 6]
  assert one_draft(Lookup(1, 2), text, 1) == [7]
  assert one_draft(Lookup(1, 1), text, 1) == [4]


def test_continuation_must_fit_unless_partial():
  """The reference rule wants all γ tokens before the end of the text."""
  text = [1, 2, 3, 1, 2]
  assert one_draft(Lookup(2, 2), text, 3) == [3, 1, 2]
  assert one_draft(Lookup(2, 2), text, 4) == []
  assert one_draft(Lookup(2, 2, partial=True), text, 4) == [3, 1, 2]


def test_no_match_drafts_nothing():
  """Fault 33: no dummy token 0."""
  assert one_draft(Lookup(), [1, 2, 3, 4], 3) == []
  assert one_draft(Lookup(), [1], 3) == []
  assert one_draft(Lookup(), [1, 0], 3) == []


def test_sizes_are_checked():
  for sizes in ((0, 3), (3, 2)):
    with pytest.raises(ValueError, match='min_ngram'):
      Lookup(*sizes)
