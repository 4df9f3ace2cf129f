"""What a training run writes down as it goes: DIR/metrics.jsonl, and DIR/tensorboard for TensorBoard.

A run that goes on from an earlier step takes back the lines after that step, so that the file is the one that a run
without interruption would have written, but for times.
"""

from collections.abc import Mapping
import json
from pathlib import Path
from typing import Any

import jax

METRICS, TENSORBOARD = 'metrics.jsonl', 'tensorboard'


class Log:
  """Of several processes the first writes; without a directory nobody does."""

  def __init__(self, directory: str | None, step: int):
    self._file, self._board = None, None
    if directory is None or jax.process_index() != 0:
      return
    from tensorboardX import SummaryWriter  # a quarter of a second, which only a run should wait
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    _take_back(path / METRICS, step)
    self._file = open(path / METRICS, 'a')  # noqa: SIM115 (open as long as the run)
    self._board = SummaryWriter(str(path / TENSORBOARD), purge_step=step + 1)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """One line; numbers that are not finite are written as null."""
    if self._file is None:
      return
    finite = {name: value if abs(value) < float('inf') else None for name, value in values.items()}
    self._file.write(json.dumps({'step': step} | finite) + '\n')
    self._file.flush()
    for name, value in values.items():
      self._board.add_scalar(name, value, step)

  def close(self) -> None:
    if self._file is not None:
      self._file.close()
      self._board.close()


def read_metrics(directory: str | Path) -> list[dict[str, Any]]:
  """The lines of a run; a torn last one is passed over."""
  path = Path(directory) / METRICS
  return _whole_lines(path.read_text()) if path.exists() else []


def _whole_lines(text: str) -> list[dict[str, Any]]:
  return [json.loads(line) for line in text[:text.rfind('\n') + 1].splitlines()]


def _take_back(path: Path, step: int) -> None:
  """The file as it was or as it should be, whenever this is killed."""
  if path.exists():
    kept = [row for row in _whole_lines(path.read_text()) if row['step'] <= step]
    part = path.with_name(f'{path.name}.part')
    part.write_text(''.join(json.dumps(row) + '\n' for row in kept))
    part.replace(path)
