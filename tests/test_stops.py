"""The automaton of stop strings against a plain search in the text."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from specdec.stops import stop_table

PIECES = st.lists(st.binary(min_size=0, max_size=3).map(lambda piece: bytes(b'ab\xc3\xa9'[b % 4] for b in piece)),
                  min_size=1, max_size=8)
STOPS = st.lists(st.text('abé', min_size=1, max_size=5), min_size=1, max_size=3)


def first_hit(table: np.ndarray, tokens: list[int]) -> int | None:
  """How many tokens it takes to the last state."""
  state = 0
  for count, token in enumerate(tokens, 1):
    state = table[state, token]
    if state == len(table) - 1:
      return count
  return None


def plain_hit(stops: list[str], pieces: list[bytes], tokens: list[int]) -> int | None:
  """How many tokens it takes until the text contains a stop string."""
  text = b''
  for count, token in enumerate(tokens, 1):
    text += pieces[token]
    if any(stop.encode() in text for stop in stops):
      return count
  return None


@settings(max_examples=300, deadline=None)
@given(PIECES, STOPS, st.data())
def test_stops_at_the_token_that_a_search_finds(pieces, stops, data):
  """Fault 17: whatever the tokenisation, even where tokens split a character."""
  tokens = data.draw(st.lists(st.integers(0, len(pieces) - 1), max_size=30))
  assert first_hit(stop_table(stops, pieces), tokens) == plain_hit(stops, pieces, tokens)


def test_string_over_tokens():
  """Fault 17: ' ha ha' completed by the second of four tokens."""
  pieces = [b' ha', b' h', b'a ', b'x']
  table = stop_table([' ha ha'], pieces)
  assert first_hit(table, [0, 0, 3, 3]) == 2
  assert first_hit(table, [3, 1, 2, 3, 0, 1, 2]) == 7  # ' ha' + ' h' + 'a ', after 'x ha x' led nowhere
  assert first_hit(table, [0, 3, 0, 3]) is None


def test_once_stopped_stays_stopped():
  table = stop_table(['aa', 'b'], [b'a', b'b', b'c'])
  assert (table[-1] == len(table) - 1).all()


def test_number_of_states_is_a_power_of_two():
  """Few shapes, hence few compilations, for all stop strings."""
  sizes = {len(stop_table(['x' * n], [b'x'])) for n in range(1, 8)}
  assert sizes == {4, 8, 16}


def test_without_stops():
  np.testing.assert_array_equal(stop_table([], [b'a', b'b']), [[0]])


def test_empty_string_is_refused():
  with pytest.raises(ValueError, match='must not be empty'):
    stop_table(['x', ''], [b'a'])
