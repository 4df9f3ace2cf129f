"""γ per row and step, on the device: from a running acceptance estimate and the theory's optimum.

Lossless: the choice for a step depends on the outcomes of earlier steps only, never on the tokens about to be drafted.
"""

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
  """The γ in 0..max that the measured costs make fastest.

  Attributes:
    draft_cost: c, a draft pass over a plain target pass.
    verify_cost: v(1), v(2), ... v(γ_max + 1), passes of that width over a plain pass.
    prior: α assumed before anything is known.
  """

  draft_cost: float
  verify_cost: tuple[float, ...]
  prior: float = 0.7

  def choose(self, estimate: AcceptanceEstimate, max_gamma: int) -> Array:
    """γ of each row, [B] int32."""
    alpha_B = (estimate.accepted_B + self.prior * PRIOR_WEIGHT) / (estimate.tested_B + PRIOR_WEIGHT)
    return theory.best_gamma_for(alpha_B, self.draft_cost, jnp.asarray(self.verify_cost), max_gamma).astype(jnp.int32)
