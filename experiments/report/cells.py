"""A value of a row as a person reads it."""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any
import unicodedata

MISSING = '–'
LONGEST = 48  # characters of a cell that are shown at once
SHARES = ('accepted_per_position', 'conditional_per_position')


@dataclasses.dataclass(frozen=True)
class Cell:
  """What stands in a table.

  Attributes:
    text: shown; of a long one its beginning.
    number: to sort by, and set to the right; None for words.
    whole: all of a long text, to be opened; '' where `text` is whole.
  """

  text: str
  number: float | None = None
  whole: str = ''


def cell(value: Any, key: str = '') -> Cell:
  text = visible(_text(value, key))
  if len(text) > LONGEST:
    return Cell(text[:LONGEST - 1] + '…', whole=text)
  return Cell(text, number(value))


def number(value: Any) -> float | None:
  """A finite number; None for anything else."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return None
  try:
    value = float(value)
  except OverflowError:
    return None
  return value if math.isfinite(value) else None


def _text(value: Any, key: str) -> str:
  if value is None or value in ('', [], {}) or (isinstance(value, float) and not math.isfinite(value)):
    return MISSING
  if isinstance(value, bool):
    return 'yes' if value else 'no'
  if isinstance(value, int):
    return str(value) if abs(value) < 10**12 else f'about 10^{int(value.bit_length() * math.log10(2))}'
  if isinstance(value, float):
    return figure(value)
  if isinstance(value, Mapping):
    return ', '.join(f'{name} {_text(entry, name)}' for name, entry in value.items())
  if isinstance(value, list) and key in SHARES:
    return ' '.join(MISSING if number(share) is None else f'{100 * share:.0f}' for share in value) + ' %'
  if isinstance(value, list):
    return ', '.join(_text(entry, '') for entry in value)
  return str(value)


def figure(value: float) -> str:
  """A float with three digits or so."""
  size = abs(value)
  if not value:
    return '0'
  if size >= 1e9 or size < 5e-4:
    return f'{value:.1e}'
  return f'{value:,.0f}' if size >= 100 else f'{value:.1f}' if size >= 10 else f'{value:.2f}' if size >= 1 else (
      f'{value:.3f}')


def visible(text: str) -> str:
  """The text with what cannot be shown, or would turn its neighbours round, as �; line breaks and tabs stay."""
  return ''.join(character if character in '\n\t' or unicodedata.category(character) not in ('Cc', 'Cf', 'Cs', 'Cn')
                 else '\ufffd' for character in text)
