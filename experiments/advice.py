"""Whether speculation pays, and how far: from what some prompts accepted and what passes cost. Arrays only.

Plain decoding runs one pass a token. A step of speculation runs one draft and one pass over γ + 1 tokens of each row,
and a batch is done when its slowest row is. So at batch B, with t(B, w) the time of a pass over w tokens of each row:

    speed-up = E[longest of B texts] t(B, 1) / (E[most steps of B] (E[t(B, w)] + draft(B, γ)))

Of a draft of M tokens that may be cut everything about a shorter one follows: its first γ tokens are the same ones
(measured acceptance by position, in the place of one alpha: Leviathan et al., 2023, equation 1 without its assumption).
Of others, which are `whole`, nothing is said but at M.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Protocol

import numpy as np

from specdec.metrics import Metrics

RESAMPLES, LEVEL = 2_000, 0.95
FEWEST_PROMPTS = 5  # whose resamples say anything about other prompts
ARITHMETIC = 2.0  # plain passes that a pass takes once the reading of weights is half of it


@dataclasses.dataclass(frozen=True)
class Acceptance:
  """What each prompt's decoding counted, at batch 1.

  Attributes:
    emitted_P, passes_P, tested_P, overlap_P: see `Metrics`.
    drafted_PM, tested_PM, accepted_PM: by position of the draft.
    passes_PW: by verify width.
    widths: the verify widths, ascending; the last is that of the whole draft.
    whole: a shorter draft is no part of this one, as of trees; else it is its beginning.
  """

  emitted_P: np.ndarray
  passes_P: np.ndarray
  tested_P: np.ndarray
  overlap_P: np.ndarray
  drafted_PM: np.ndarray
  tested_PM: np.ndarray
  accepted_PM: np.ndarray
  passes_PW: np.ndarray
  widths: tuple[int, ...]
  whole: bool

  @classmethod
  def of(cls, metrics: Sequence[Metrics], widths: tuple[int, ...], whole: bool) -> 'Acceptance':
    column = lambda name: np.array([getattr(one, name) for one in metrics], float)
    return cls(column('emitted'), column('passes'), column('tested'), column('overlap_sum'), column('drafted_at'),
               column('tested_at'), column('accepted_at'), column('passes_by_width'), widths, whole)

  @classmethod
  def from_counts(cls, counts: dict[str, Any]) -> 'Acceptance':
    """Back from JSON.

    Raises:
      KeyError, TypeError, ValueError: not all fields, others, or no counts.
    """
    arrays = {name: np.array(value, float) for name, value in counts.items() if name not in ('widths', 'whole')}
    found = cls(**arrays, widths=tuple(map(int, counts['widths'])), whole=bool(counts['whole']))
    if not len(found) or any(len(array) != len(found) for array in arrays.values()):
      raise ValueError('counts of different numbers of prompts')
    return found

  def __len__(self) -> int:
    return len(self.emitted_P)

  def take(self, index: np.ndarray) -> 'Acceptance':
    """The prompts of these numbers, some perhaps more than once."""
    arrays = {field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)
              if field.name not in ('widths', 'whole')}
    return dataclasses.replace(self, **arrays)

  @property
  def gamma(self) -> int:
    return self.widths[-1] - 1

  @property
  def gammas(self) -> list[int]:
    """Those that the counts tell about, from 1."""
    return [self.gamma] if self.whole else list(range(1, self.gamma + 1))

  @property
  def overlap(self) -> float:
    """Mean of sum min(target, draft) over tested tokens: alpha; NaN where none was tested."""
    return _ratio(self.overlap_P.sum(), self.tested_P.sum())

  @property
  def conditional_M(self) -> np.ndarray:
    """Share of the rounds that tested position i in which it was kept; NaN where none did."""
    accepted_M, tested_M = self.accepted_PM.sum(axis=0), self.tested_PM.sum(axis=0)
    return np.where(tested_M > 0, accepted_M / np.maximum(tested_M, 1), np.nan)

  def steps_P(self, gamma: int) -> np.ndarray:
    """Steps that each text takes with `gamma` drafted tokens: the tokens without a draft, those counted with all."""
    if self.whole and gamma:
      return self.passes_P
    kept_P, all_P = self.accepted_PM[:, :gamma].sum(axis=1), self.accepted_PM.sum(axis=1)
    share_P = np.divide(kept_P, all_P, out=np.zeros_like(kept_P), where=all_P > 0)
    return self.emitted_P / (1 + (self.emitted_P / self.passes_P - 1) * share_P)

  def width_law(self, gamma: int, batch: int) -> dict[int, float]:
    """How often a step's verify pass has which width: the narrowest that holds the longest draft of the batch."""
    total = self.passes_P.sum()
    if self.whole:
      widths, law_W = self.widths, self.passes_PW.sum(axis=0) / total
    else:
      more_G = np.append(self.drafted_PM[:, :gamma].sum(axis=0) / total, 0)  # [i]: more than i tokens are drafted
      widths = (*[width for width in self.widths if width <= gamma], gamma + 1)
      law_W = np.diff([1 - more_G[width - 1] for width in widths], prepend=0)
    most_W = np.diff(np.cumsum(law_W)**batch, prepend=0)
    return dict(zip(widths, most_W.tolist(), strict=True))


class Costs(Protocol):
  """Seconds of the parts of a step, measured or planned; `batches` are those that it knows."""

  batches: Sequence[int]

  def passes(self, batch: int, width: int) -> float:
    """A target pass over `width` tokens of each row."""
    ...

  def draft(self, batch: int, gamma: int) -> float:
    """A whole draft of `gamma` tokens of each row."""
    ...


@dataclasses.dataclass(frozen=True)
class MeasuredCosts:
  """Costs of this machine, timed at some batches; those between are interpolated, of batches as of widths.

  Attributes:
    pass_seconds: by batch and width of the passes that were timed, ascending.
    draft_seconds: of a whole draft, by batch.
    gamma: tokens of that draft.
    by_token: whether a shorter draft costs less, in proportion.
  """

  pass_seconds: dict[int, dict[int, float]]
  draft_seconds: dict[int, float]
  gamma: int
  by_token: bool

  @property
  def batches(self) -> range:
    return range(1, max(self.pass_seconds) + 1)

  def passes(self, batch: int, width: int) -> float:
    return _between({timed: _between(seconds, width) for timed, seconds in self.pass_seconds.items()}, batch)

  def draft(self, batch: int, gamma: int) -> float:
    return _between(self.draft_seconds, batch) * (gamma / self.gamma if self.by_token else 1.0)


def _between(values: dict[int, float], at: int) -> float:
  return values[at] if at in values else float(np.interp(at, list(values), list(values.values())))


@dataclasses.dataclass(frozen=True)
class PlannedCosts:
  """Costs of a slice, predicted from its compiled loops, one for each batch (`launch.plan`).

  Attributes:
    plain, verify: seconds by batch; a pass over γ + 1 tokens, and no narrower one is taken to cost less.
    first, following: seconds by batch of the first drafted token and of each further one; of heads the whole draft is
      the first.
  """

  plain: dict[int, float]
  verify: dict[int, float]
  first: dict[int, float]
  following: dict[int, float]

  @property
  def batches(self) -> list[int]:
    return sorted(self.plain)

  def passes(self, batch: int, width: int) -> float:
    return self.plain[batch] if width == 1 else self.verify[batch]

  def draft(self, batch: int, gamma: int) -> float:
    return self.first[batch] + (gamma - 1) * self.following[batch]


def mean_of_largest(values_P: np.ndarray, batch: int) -> float:
  """Mean of the largest of `batch` values drawn from these."""
  below_P = np.arange(len(values_P) + 1) / len(values_P)
  return float(np.sum(np.sort(values_P) * np.diff(below_P**batch)))


def speedup(acceptance: Acceptance, costs: Costs, batch: int, gamma: int) -> float:
  """Plain decoding's time over that of `gamma` drafted tokens a step, as the module says."""
  if gamma == 0:
    return 1.0
  law = acceptance.width_law(gamma, batch)
  step = sum(share * costs.passes(batch, width) for width, share in law.items()) + costs.draft(batch, gamma)
  plain = mean_of_largest(acceptance.emitted_P, batch) * costs.passes(batch, 1)
  return plain / (mean_of_largest(acceptance.steps_P(gamma), batch) * step)


def best_gamma(acceptance: Acceptance, costs: Costs, batch: int) -> int:
  """Of the drafts that draft anything the fastest; of equals the shortest."""
  return max(acceptance.gammas, key=lambda gamma: (speedup(acceptance, costs, batch, gamma), -gamma))


def stops_paying_at(acceptance: Acceptance, costs: Costs, gamma: int) -> int | None:
  """The smallest batch at which plain decoding is as fast; None if there is none among those that the costs know."""
  return next((batch for batch in costs.batches if speedup(acceptance, costs, batch, gamma) <= 1), None)


def arithmetic_bound_at(costs: Costs, gamma: int) -> int | None:
  """The smallest batch at which a pass over γ + 1 tokens takes `ARITHMETIC` plain passes of one row.

  Up to there reading the weights decides, and further tokens in a pass are cheap. None: at no batch that is known.
  """
  enough = ARITHMETIC * costs.passes(1, 1)
  return next((batch for batch in costs.batches if costs.passes(batch, gamma + 1) >= enough), None)


def interval(acceptance: Acceptance, statistic: Callable[[Acceptance], float]) -> tuple[float, float]:
  """95 % bootstrap over prompts: all that one prompt counted stays together.

  NaN where nothing is counted, or by fewer than `FEWEST_PROMPTS`.
  """
  if len(acceptance) < FEWEST_PROMPTS:
    return float('nan'), float('nan')
  rng = np.random.default_rng(0)
  drawn = np.array([statistic(acceptance.take(rng.integers(0, len(acceptance), len(acceptance))))
                    for _ in range(RESAMPLES)])
  drawn = drawn[~np.isnan(drawn)]
  if not drawn.size:
    return float('nan'), float('nan')
  low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
  return float(low), float(high)


def position_intervals(acceptance: Acceptance) -> list[tuple[float, float]]:
  """The interval of each entry of `conditional_M`."""
  return [interval(acceptance, lambda one, place=place: float(one.conditional_M[place]))
          for place in range(acceptance.accepted_PM.shape[1])]


def _ratio(numerator: float, denominator: float) -> float:
  return float(numerator / denominator) if denominator else float('nan')
