"""Draws the loss of training runs over the tokens that they have seen. Reads metrics.jsonl only."""

from collections.abc import Mapping
import dataclasses
from pathlib import Path

from experiments import plot
from models.errors import InputError
from specdec.training.log import read_metrics


@dataclasses.dataclass(frozen=True)
class Curve:
  """Of one run: (tokens, nats) of its own rows, means since the last point, and of held-out ones."""

  trained: list[tuple[int, float]]
  held_out: list[tuple[int, float]]

  @classmethod
  def read(cls, directory: Path, tokens_per_step: int) -> 'Curve':
    rows = read_metrics(directory)
    points = lambda name: [(row['step'] * tokens_per_step, row[name]) for row in rows if row.get(name) is not None]
    return cls(points('loss'), points('held_out_loss'))


def draw(curves: Mapping[str, Curve], path: str) -> None:
  """One line for each run, held-out losses as markers on it.

  Raises:
    InputError: if there is nothing to draw, or no matplotlib.
  """
  plot.check(path)
  if not any(curve.trained for curve in curves.values()):
    raise InputError('no losses to draw: run launch.train first')
  figure, axis = plot.plt.subplots(figsize=(6.5, 4.2), layout='constrained')
  for colour, (name, curve) in zip(plot.COLOURS, curves.items(), strict=False):
    for points, style in ((curve.trained, '-'), (curve.held_out, 'o')):
      if points:
        axis.plot(*zip(*points, strict=True), style, color=colour, linewidth=1.4, markersize=5,
                  label=name if style == '-' else f'{name}, held out')
  axis.set(xlabel='tokens', ylabel='loss (nats per token)', xscale='log')
  axis.legend(frameon=False, fontsize=9)
  axis.spines[['top', 'right']].set_visible(False)
  axis.grid(alpha=0.25, linewidth=0.6)
  plot.save(figure, path)
