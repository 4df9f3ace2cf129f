"""How far a training run has come: a bar on a terminal, a line every few seconds elsewhere. On standard error."""

import sys
import time

import tqdm

from launch import distributed
from launch.progress import LINE_SECONDS
from launch.table import is_terminal


class TrainingBar:
  """`on_step` of a `Trainer`."""

  def __init__(self, steps: int, tokens_per_step: int):
    self._steps, self._tokens = steps, tokens_per_step
    self._loss, self._start, self._shown = '-', None, 0.0
    self._bar = tqdm.tqdm(total=steps, desc='training', dynamic_ncols=True) if (
        distributed.speaks() and is_terminal(sys.stderr)) else None

  def __call__(self, step: int, loss: float | None) -> None:
    now = time.monotonic()
    if loss is not None:
      self._loss = f'{loss:.3f}'
    if self._start is None:  # after the first step, which is compiled; of a run that goes on it is not step 1
      self._start, self._shown = (step, now), now
      if self._bar is not None:
        self._bar.initial = self._bar.n = step
    steps, seconds = step - self._start[0], max(now - self._start[1], 1e-9)
    rate = steps / seconds
    if self._bar is not None:
      self._bar.set_postfix(loss=self._loss, tokens_per_second=f'{rate * self._tokens:,.0f}', refresh=False)
      self._bar.update(step - self._bar.n)
    elif distributed.speaks() and (step == self._steps or now - self._shown > LINE_SECONDS):
      left = f', {(self._steps - step) / rate:,.0f} s left' if step < self._steps else ''
      print(f'training: {step}/{self._steps}, loss {self._loss}, {rate * self._tokens:,.0f} tokens/s{left}',
            file=sys.stderr, flush=True)
      self._shown = now

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()
