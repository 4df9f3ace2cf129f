"""Cutting at stop strings, whole and in parts."""

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from launch.up_to_stop import UpToStop


def plain_cut(text: str, stops: list[str]) -> str:
  return text[:min((text.find(stop) for stop in stops if stop in text), default=len(text))]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text('ab', max_size=4), max_size=8), st.lists(st.text('ab', min_size=1, max_size=4), max_size=3))
def test_parts_join_up_to_the_cut_text(parts, stops):
  """Fault 17: as a row ends, with the part in which the first stop string is completed."""
  end = next((end for end in range(len(parts)) if any(stop in ''.join(parts[:end + 1]) for stop in stops)), len(parts))
  parts = parts[:end + 1]
  cut = UpToStop(stops)
  shown = [cut.feed(part) for part in parts]
  assert ''.join(shown) + cut.finish() == plain_cut(''.join(parts), stops)


@pytest.mark.parametrize('parts, shown, rest', [
    (['one\n', 'two'], ['one', ''], ''),
    (['a\n', 'b\n', '\n'], ['a', '\nb', ''], ''),
    (['a\n', 'b'], ['a', '\nb'], ''),
    (['a\n'], ['a'], '\n'),
    (['x\n\ny', 'z'], ['x', ''], ''),
])
def test_holds_back_what_may_begin_a_stop_string(parts, shown, rest):
  cut = UpToStop(['\n\n', '\ntwo'])
  assert [cut.feed(part) for part in parts] == shown
  assert cut.finish() == rest


def test_without_stop_strings_nothing_is_held_back():
  cut = UpToStop([])
  assert [cut.feed(part) for part in ('a', '', 'b\n')] == ['a', '', 'b\n'] and cut.finish() == ''
