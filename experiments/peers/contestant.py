"""What the comparison sees of a piece of software."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Contestant:
  """One piece of software with one setting. Decoding is greedy, in float32, one prompt at a time.

  Attributes:
    software, version: what it is.
    drafter: 'none', 'lookup', or 'draft' for a draft model.
    settings: of the drafter, in the software's own words.
    prepare: prompt ids -> whatever `decode` needs, the cache of all prompt ids but the newest if it can. Not timed.
    decode: prepared -> what was generated. Timed.
    tokens: what was generated -> ids, the end-of-text id included. Not timed.
    first: for software that cannot take a cache: prepared -> what was generated when it stops at the first token.
      Timed, and taken off the time of `decode`.
    passes: for software that can tell: `decode`, prepared -> target passes that decoding it takes. Decodes, not timed.
  """

  software: str
  version: str
  drafter: str
  settings: dict[str, Any]
  prepare: Callable[[Sequence[int]], Any]
  decode: Callable[[Any], Any]
  tokens: Callable[[Any], list[int]] = list
  first: Callable[[Any], Any] | None = None
  passes: Callable[[Callable[[Any], Any], Any], int] | None = None

  @property
  def name(self) -> str:
    settings = ', '.join(f'{name}={value}' for name, value in self.settings.items())
    return f'{self.software} {self.drafter}' + (f' ({settings})' if settings else '')
