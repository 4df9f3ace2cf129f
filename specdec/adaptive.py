"""γ per row and step, on the device: from a running acceptance estimate and the theory's optimum.

Lossless: the choice for a step depends on the outcomes of earlier steps only, never on the tokens about to be drafted.
"""

from collections.abc import Sequence
import dataclasses

from flax import struct
from jax import Array
import jax.numpy as jnp

from specdec import theory

DECAY = 0.9  # of past rounds, per round
PRIOR_WEIGHT = 2.0  # tested tokens that the prior counts for


@struct.dataclass
class AcceptanceEstimate:
  """Discounted counts per row."""

  accepted_B: Array
  tested_B: Array

  @classmethod
  def zeros(cls, batch: int) -> 'AcceptanceEstimate':
    return cls(jnp.zeros((batch,), jnp.float32), jnp.zeros((batch,), jnp.float32))

  def update(self, accepted_B: Array, tested_B: Array) -> 'AcceptanceEstimate':
    """After a round. Rounds that test nothing let the estimate drift back to the prior, so that γ = 0 is left again."""
    return AcceptanceEstimate(DECAY * self.accepted_B + accepted_B, DECAY * self.tested_B + tested_B)


@dataclasses.dataclass(frozen=True)
class AdaptiveGamma:
  """The γ that the measured costs make fastest for a row by itself.

  Attributes:
    draft_cost: c, a draft pass over a plain target pass.
    verify_cost: v(1), v(2), ... v(γ_max + 1), passes of that width over a plain pass.
    prior: α assumed before anything is known.
  """

  draft_cost: float
  verify_cost: tuple[float, ...]
  prior: float = 0.7

  def __post_init__(self):
    if not 0 <= self.prior <= 1:
      raise ValueError(f'adaptive.prior must lie in [0, 1], got {self.prior}')
    if not self.draft_cost >= 0:
      raise ValueError(f'adaptive.draft_cost must be 0 or more, got {self.draft_cost}')
    if not all(cost > 0 for cost in self.verify_cost):
      raise ValueError(f'adaptive.verify_cost must be positive, got {self.verify_cost}')

  def choose(self, estimate: AcceptanceEstimate, widths: Sequence[int]) -> Array:
    """γ of each row in 0..γ_max, [B] int32.

    Args:
      estimate: of each row.
      widths: of the compiled verify passes, ascending, the last γ_max + 1: γ drafted tokens cost the narrowest pass
        wider than γ.
    """
    cost_by_gamma = [self.verify_cost[next(width for width in widths if width > gamma) - 1]
                     for gamma in range(widths[-1])]
    alpha_B = (estimate.accepted_B + self.prior * PRIOR_WEIGHT) / (estimate.tested_B + PRIOR_WEIGHT)
    gamma_B = theory.best_gamma_for(alpha_B, self.draft_cost, jnp.asarray(cost_by_gamma), widths[-1] - 1)
    return gamma_B.astype(jnp.int32)
