"""ROUGE F-measures by the package rouge-score, with bootstrap intervals.

The variant matters: rougeL takes a summary as one sequence, rougeLsum as sentences separated by newlines (and only by
them), and stemming makes "pumps" match "pump". Reports name both.
"""

from collections.abc import Sequence
import dataclasses
import importlib.metadata

import numpy as np

from models.errors import InputError

VARIANTS = ('rouge1', 'rouge2', 'rougeL', 'rougeLsum')
RESAMPLES, LEVEL, SEED = 1000, 0.95, 0


@dataclasses.dataclass(frozen=True)
class Interval:
  """A mean over prompts, and where `LEVEL` of the means of resampled prompts lie."""

  mean: float
  low: float
  high: float

  def __str__(self) -> str:
    return f'{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]'


def rouge(references: Sequence[str], candidates: Sequence[str], stemmer: bool) -> dict[str, np.ndarray]:
  """The F-measure of each pair, by variant. An empty candidate scores 0."""
  try:
    from rouge_score import rouge_scorer
  except ImportError as error:
    raise InputError('ROUGE needs a package: `pip install rouge-score`') from error
  scorer = rouge_scorer.RougeScorer(list(VARIANTS), use_stemmer=stemmer)
  scores = [scorer.score(reference, candidate) for reference, candidate in zip(references, candidates, strict=True)]
  return {variant: np.array([score[variant].fmeasure for score in scores]) for variant in VARIANTS}


def interval(values: np.ndarray) -> Interval:
  """The percentile bootstrap over prompts, the same resamples for every array of one length."""
  rows = np.random.default_rng(SEED).integers(len(values), size=(RESAMPLES, len(values)))
  low, high = np.quantile(values[rows].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
  return Interval(float(values.mean()), float(low), float(high))


def setting(stemmer: bool) -> str:
  """What the numbers are, in words."""
  version = importlib.metadata.version('rouge-score')
  return (f'F-measure by rouge-score {version}, Porter stemmer {"on" if stemmer else "off"}, rougeLsum split at '
          f'newlines, {LEVEL:.0%} bootstrap intervals over prompts')
