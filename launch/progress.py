"""How far long work has come: a bar on a terminal, a line every few seconds elsewhere. On standard error."""

from collections.abc import Iterable, Iterator
import sys
import time
from typing import TypeVar

import tqdm

from launch.table import is_terminal

T = TypeVar('T')
LINE_SECONDS = 15.0


def track(items: Iterable[T], total: int, label: str) -> Iterator[T]:
  """Passes the items on as they come and shows how many of `total` have been dealt with."""
  if is_terminal(sys.stderr):
    yield from tqdm.tqdm(items, total=total, desc=label, dynamic_ncols=True)
    return
  shown = time.monotonic()
  for done, item in enumerate(items, start=1):
    yield item
    if done == total or time.monotonic() - shown > LINE_SECONDS:
      print(f'{label}: {done}/{total}', file=sys.stderr, flush=True)
      shown = time.monotonic()
