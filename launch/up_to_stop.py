"""The text of a row up to its first stop string: what is shown, kept and written is cut here."""

from collections.abc import Sequence


class UpToStop:
  """Cuts a text that comes in parts where its first stop string begins.

  What may turn out to begin a stop string is held back until that is clear.
  """

  def __init__(self, stops: Sequence[str]):
    self._stops = tuple(stops)
    self._held, self._ended = '', False

  def feed(self, part: str) -> str:
    """The text that is certain after this part."""
    if self._ended:
      return ''
    text = self._held + part
    begins = [text.find(stop) for stop in self._stops if stop in text]
    self._ended = bool(begins)
    end = min(begins) if begins else len(text) - self._undecided(text)
    self._held = '' if self._ended else text[end:]
    return text[:end]

  def finish(self) -> str:
    """What was held back and began no stop string after all."""
    held, self._held = self._held, ''
    return held

  def _undecided(self, text: str) -> int:
    """Length of the longest end of the text that begins a stop string."""
    longest = min(len(text), max(map(len, self._stops), default=0))
    return next((size for size in range(longest, 0, -1)
                 if any(stop.startswith(text[-size:]) for stop in self._stops)), 0)
