"""Counters of the loop, and the names for what follows from them: one definition each.

Worked example, γ = 4 and five rounds that accept 4, 0, 2, 4, 1 drafted tokens: drafted 20, accepted 11,
acceptance_rate .55, mean_accepted 2.2, tokens_per_pass 3.2, accepted_per_position .8 .6 .4 .4, conditional .8 .75
.667 1.0, alpha = accepted / tested = 11 / 14.
"""

import dataclasses

from flax import struct
from jax import Array
import jax.numpy as jnp
import numpy as np


@struct.dataclass
class Counters:
  """Per row, summed over rounds; frozen once the row ends.

  Only what is emitted counts: a drafted token behind an EOS is neither tested nor accepted. Invariant: `emitted`
  equals the length of the output.

  Attributes:
    passes_BW: target passes, one a round, by verify width (`Engine.verify_widths`).
    emitted_B: tokens, corrections and bonuses included.
    accepted_B: drafted tokens among them.
    drafted_BM, tested_BM, accepted_BM: rounds in which position i was drafted, reached by the test, kept.
    overlap_B: sum over tested tokens of sum min(target, draft).
  """

  passes_BW: Array
  emitted_B: Array
  accepted_B: Array
  drafted_BM: Array
  tested_BM: Array
  accepted_BM: Array
  overlap_B: Array

  @classmethod
  def zeros(cls, batch: int, gamma: int, num_widths: int = 1) -> 'Counters':
    row_B = jnp.zeros((batch,), jnp.int32)
    position_BM = jnp.zeros((batch, gamma), jnp.int32)
    return cls(jnp.zeros((batch, num_widths), jnp.int32), row_B, row_B, position_BM, position_BM, position_BM,
               jnp.zeros((batch,), jnp.float32))

  def add_round(self, live_B: Array, count_B: Array, num_accepted_B: Array, num_emitted_B: Array,
                overlap_BM: Array, width_index: int | Array = 0) -> 'Counters':
    """Counts one round of the live rows.

    Args:
      live_B: rows that decoded in this round.
      count_B: drafted tokens.
      num_accepted_B: what the rule kept.
      num_emitted_B: after cutting at EOS, stop string, budget.
      overlap_BM: sum min(target, draft) of each drafted token.
      width_index: which of the verify widths ran.
    """
    index_M = jnp.arange(self.drafted_BM.shape[1])
    kept_B1 = jnp.minimum(num_accepted_B, num_emitted_B)[:, None]
    live_B1 = live_B[:, None]
    drafted_BM = (index_M < count_B[:, None]) & live_B1
    tested_BM = drafted_BM & (index_M <= num_accepted_B[:, None]) & (index_M < num_emitted_B[:, None])
    accepted_BM = (index_M < kept_B1) & live_B1
    return Counters(
        passes_BW=self.passes_BW + (live_B1 & (jnp.arange(self.passes_BW.shape[1]) == width_index)),
        emitted_B=self.emitted_B + jnp.where(live_B, num_emitted_B, 0),
        accepted_B=self.accepted_B + jnp.where(live_B, kept_B1[:, 0], 0),
        drafted_BM=self.drafted_BM + drafted_BM,
        tested_BM=self.tested_BM + tested_BM,
        accepted_BM=self.accepted_BM + accepted_BM,
        overlap_B=self.overlap_B + jnp.sum(jnp.where(tested_BM, overlap_BM, 0.0), axis=1))


@dataclasses.dataclass(frozen=True)
class Metrics:
  """Sums over rows, on the host. Rates are nan where nothing was counted.

  Attributes:
    passes, emitted, accepted, drafted, tested: totals.
    drafted_at, tested_at, accepted_at: per position of the draft.
    passes_by_width: the passes, per verify width of the engine.
    overlap_sum: over tested tokens.
  """

  passes: int
  emitted: int
  accepted: int
  drafted: int
  tested: int
  drafted_at: tuple[int, ...]
  tested_at: tuple[int, ...]
  accepted_at: tuple[int, ...]
  overlap_sum: float
  passes_by_width: tuple[int, ...]

  @classmethod
  def from_counters(cls, counters: Counters) -> 'Metrics':
    """Sums all rows; `counters` holds host arrays."""
    at = lambda x: tuple(int(n) for n in np.asarray(x).sum(axis=0))
    total = lambda x: int(np.asarray(x).sum())
    return cls(
        passes=total(counters.passes_BW), emitted=total(counters.emitted_B), accepted=total(counters.accepted_B),
        drafted=total(counters.drafted_BM), tested=total(counters.tested_BM),
        drafted_at=at(counters.drafted_BM), tested_at=at(counters.tested_BM), accepted_at=at(counters.accepted_BM),
        overlap_sum=float(np.asarray(counters.overlap_B).sum()), passes_by_width=at(counters.passes_BW))

  @classmethod
  def total(cls, parts: 'list[Metrics]') -> 'Metrics':
    """The sum of several runs with the same γ."""
    add = lambda name: sum(getattr(part, name) for part in parts)
    add_at = lambda name: tuple(sum(column) for column in zip(*(getattr(p, name) for p in parts), strict=True))
    positions = ('drafted_at', 'tested_at', 'accepted_at', 'passes_by_width')
    return cls(**{
        field.name: (add_at if field.name in positions else add)(field.name) for field in dataclasses.fields(cls)})

  @property
  def tokens_per_pass(self) -> float:
    """Emitted per target pass, correction or bonus included (τ)."""
    return _ratio(self.emitted, self.passes)

  @property
  def mean_accepted(self) -> float:
    """Accepted drafted tokens per round."""
    return _ratio(self.accepted, self.passes)

  @property
  def acceptance_rate(self) -> float:
    """Accepted / drafted. Smaller than alpha: tokens behind a rejection are never tested."""
    return _ratio(self.accepted, self.drafted)

  @property
  def alpha(self) -> float:
    """Accepted / tested: the acceptance of a token that is tested."""
    return _ratio(self.accepted, self.tested)

  @property
  def overlap(self) -> float:
    """Mean of sum min(target, draft) over tested tokens: estimates alpha with less noise (Cor. 3.6)."""
    return _ratio(self.overlap_sum, self.tested)

  @property
  def accepted_per_position(self) -> tuple[float, ...]:
    """Share of the rounds that drafted position i in which it was kept."""
    return tuple(_ratio(a, d) for a, d in zip(self.accepted_at, self.drafted_at, strict=True))

  @property
  def conditional_per_position(self) -> tuple[float, ...]:
    """Share of the rounds that tested position i in which it was kept."""
    return tuple(_ratio(a, t) for a, t in zip(self.accepted_at, self.tested_at, strict=True))


def _ratio(numerator: float, denominator: float) -> float:
  return numerator / denominator if denominator else float('nan')
