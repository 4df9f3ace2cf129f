"""Long work in units with a result file each, so that a run that was ended goes on where it was.

Unit i of n is `unit-i-of-n.json`, which appears whole or not at all; `about.json` says what work it is, and other work
is refused. What is random in a unit must depend on (seed, prompt id, sample) alone: `seeds_for`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
import hashlib
import json
import pathlib
from typing import Any

from jax.experimental import multihost_utils
import numpy as np

from launch import distributed, preemption, results
from launch.prompts import Prompt
from models.errors import InputError

ABOUT = 'about.json'


def seeds_for(seed: int, prompts: Sequence[Prompt]) -> list[int]:
  """A seed for each prompt that its place and its batch do not change; a prompt that comes again is a new sample."""
  samples: Counter[str] = Counter()
  seeds = []
  for prompt in prompts:
    digest = hashlib.sha256(json.dumps([seed, prompt.id, samples[prompt.id]]).encode()).digest()
    seeds.append(int.from_bytes(digest[:4], 'big'))
    samples[prompt.id] += 1
  return seeds


class WorkUnits:
  """The units of one piece of work in a directory.

  On several hosts process 0 alone reads and writes there, and tells the others which units are done.
  """

  def __init__(self, directory: str, about: Mapping[str, Any], count: int):
    """`about` is what the results depend on, besides the code.

    Raises:
      InputError: if the directory has results of other work or broken files, or cannot be written.
    """
    if '://' in directory:
      raise InputError(f'{directory} is no directory of a file system, which units of work need: mount it, or name '
                       'another')
    self._directory, self.count = pathlib.Path(directory).expanduser(), count
    if distributed.speaks():
      self._check_same({**results.plain(about), 'units': count})
    self._done = agree([distributed.speaks() and self._is_done(unit) for unit in range(count)])

  def run(self, work: Callable[[int], Any]) -> list[Any]:
    """The results of all units, as JSON holds them: `work(unit)` of those that have no file yet.

    Process 0 gets them; on several hosts the others, which take part in the work, get none.

    Raises:
      Preempted: after SIGTERM, between two units.
    """
    with preemption.finishing():
      for unit in range(self.count):
        if not self._done[unit]:
          self._finish(unit, work(unit))
    return [_read(self._path(unit)) for unit in range(self.count)] if distributed.speaks() else []

  def _finish(self, unit: int, result: Any) -> None:
    if distributed.speaks():
      results.write_json(str(self._path(unit)), result)
    if any(agree([preemption.requested()])) and unit + 1 < self.count:
      raise preemption.Preempted

  @property
  def num_done(self) -> int:
    """Of the units, when this object was made."""
    return sum(self._done)

  def _is_done(self, unit: int) -> bool:
    """A broken file is said here, before the work of the others."""
    path = self._path(unit)
    return path.exists() and _read(path) is not None

  def _path(self, unit: int) -> pathlib.Path:
    return self._directory / f'unit-{unit:05d}-of-{self.count:05d}.json'

  def _check_same(self, about: dict[str, Any]) -> None:
    path = self._directory / ABOUT
    if not path.exists():
      results.check_writable(str(path))
      results.write_json(str(path), about)
      return
    there = _read(path)
    if there != about:
      raise InputError(f'{self._directory} has results of other work ({difference(there, about)}): '
                       'name another directory')


def _read(path: pathlib.Path) -> Any:
  try:
    return json.loads(path.read_text())
  except (OSError, ValueError, RecursionError) as error:
    raise InputError(f'{path} is broken: remove it ({error})') from error


def agree(flags: Sequence[bool]) -> list[bool]:
  """True where any process says so."""
  if not distributed.joined():
    return list(flags)
  return np.any(multihost_utils.process_allgather(np.asarray(flags)), axis=0).tolist()


def difference(there: Any, here: Any, field: str = '') -> str:
  """The first field that differs, and how."""
  if isinstance(there, dict) and isinstance(here, dict):
    for name in sorted(there.keys() | here.keys()):
      if there.get(name) != here.get(name):
        return difference(there.get(name), here.get(name), f'{field}.{name}'.lstrip('.'))
  return f'{field} is {there!r} there and {here!r} here'
