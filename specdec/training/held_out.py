"""The objective on rows that are not trained on."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from models.errors import InputError
from specdec.training.rows import Row, place
from specdec.training.step import COUNT, Objective, cast


class HeldOut:
  """`evaluate` of a `Trainer`: means over all rows, named 'held_out_loss' and the like; the same noise every time."""

  def __init__(self, objective: Objective, frozen: Any, rows: Sequence[Row], batch: int, dtype: str = 'float32'):
    """Rows that do not fill a batch are left out.

    Raises:
      InputError: if they fill none.
    """
    if len(rows) < batch:
      raise InputError(f'{len(rows)} held-out rows do not fill a batch of {batch}: hold more data out, or lower '
                       'train.batch')
    self._frozen, self._rows, self._batch = frozen, rows, batch
    self._sums = jax.jit(lambda trainable, frozen, batch, key: objective.loss(
        cast(trainable, dtype), frozen, batch, key))

  def __call__(self, trainable: Any) -> dict[str, float]:
    totals: dict[str, float] = {}
    for start in range(0, len(self._rows) - self._batch + 1, self._batch):
      rows = [self._rows[index] for index in range(start, start + self._batch)]
      batch = place({name: np.stack([row[name] for row in rows]) for name in rows[0]})
      loss, sums = self._sums(trainable, self._frozen, batch, jax.random.key(start))
      for name, value in (sums | {'loss': loss}).items():
        totals[name] = totals.get(name, 0.0) + float(value)
    count = max(totals.pop(COUNT), 1.0)
    return {f'held_out_{name}': value / count for name, value in totals.items()}
