"""What makes a draft's law like the target's, per position: sums and masks are the caller's.

All take the target's log-probabilities on the tokens that can be drafted, and the draft's logits over the same tokens
(`log_law`: float32). A draft of fewer tokens (U of V) leaves some of the target's mass out of reach. The target's law
is not renormalised on what is left: acceptance is Σ_x min(target, draft) over all V (Leviathan et al., 2023, corollary
3.6), to which a token that cannot be drafted adds nothing, and total variation is 1 minus that. Renormalised, a
position where little can be drafted would pull as hard as one where all can.
"""

from collections.abc import Callable
import math

import jax
from jax import Array
import jax.numpy as jnp

from models.errors import InputError

LEAST_OVERLAP = 1e-6  # of a position, in `minus_log_alpha`: its gradient is bounded by the inverse


def log_law(logits_PU: Array) -> Array:
  """Log-probabilities, float32 whatever the logits are."""
  return jax.nn.log_softmax(logits_PU.astype(jnp.float32), axis=-1)


def overlap(target_PU: Array, draft_PU: Array) -> Array:
  """[P]: Σ min(target, draft), which is α at this position.

  Args:
    target_PU: log-probabilities of the target on the tokens that can be drafted.
    draft_PU: logits of the draft.
  """
  return jnp.sum(jnp.exp(jnp.minimum(target_PU, log_law(draft_PU))), axis=-1)


def total_variation(target_PU: Array, draft_PU: Array) -> Array:
  """[P]: 1 - Σ min(target, draft), half of Σ |target - draft| over all V."""
  return 1 - overlap(target_PU, draft_PU)


def minus_log_alpha(target_PU: Array, draft_PU: Array) -> Array:
  """[P]: -log Σ min(target, draft)."""
  return -jnp.log(jnp.maximum(overlap(target_PU, draft_PU), LEAST_OVERLAP))


def kl(target_PU: Array, draft_PU: Array) -> Array:
  """[P]: KL(target ‖ draft) on the tokens that can be drafted, times the target's mass there.

  With all V it is the divergence itself. It is 0 where the draft's law is the target's, in proportion, and its gradient
  by the draft's logits is mass · draft - target.
  """
  mass_P = jnp.sum(jnp.exp(target_PU), axis=-1)
  share_PU = target_PU - jnp.log(mass_P)[..., None]
  return jnp.sum(_weighted(target_PU, share_PU - log_law(draft_PU)), axis=-1)


def cross_entropy(target_PU: Array, draft_PU: Array) -> Array:
  """[P]: -Σ target log draft: `kl` and a constant, so that it does not vanish (Li et al., 2024, EAGLE, section 3.2)."""
  return -jnp.sum(_weighted(target_PU, log_law(draft_PU)), axis=-1)


def smooth_l1(guess_PD: Array, feature_PD: Array) -> Array:
  """[P]: mean over D of x²/2 below 1 and |x| - 1/2 above (Huber, 1964)."""
  gap_PD = jnp.abs(guess_PD.astype(jnp.float32) - feature_PD.astype(jnp.float32))
  return jnp.mean(jnp.where(gap_PD < 1, jnp.square(gap_PD) / 2, gap_PD - 0.5), axis=-1)


def masked_sum(values_P: Array, counts_P: Array) -> Array:
  """Sum of what counts; what does not may be infinite or NaN, and gets no gradient as long as it is finite."""
  return jnp.sum(jnp.where(counts_P, values_P, 0.0))


def _weighted(target_PU: Array, logs_PU: Array) -> Array:
  """Target times logs; 0 where the target has no mass, whatever the log is there."""
  return jnp.where(jnp.isneginf(target_PU), 0.0, jnp.exp(target_PU) * logs_PU)


LOSSES: dict[str, Callable[[Array, Array], Array]] = {
    'kl': kl, 'total_variation': total_variation, 'minus_log_alpha': minus_log_alpha, 'cross_entropy': cross_entropy}


def check_loss(name: str, decay: float = 1.0, roots: int = 0, **weights: float) -> None:
  """Refuses what no objective can be made of: a loss that is not one of `LOSSES`, numbers out of their range.

  Raises:
    InputError: names the field.
  """
  if name not in LOSSES:
    raise InputError(f'token_loss={name!r} is unknown: use one of {", ".join(LOSSES)}')
  if not 0 <= decay <= 1:
    raise InputError(f'decay={decay} must lie in 0..1')
  for field, value in {'roots': roots, **weights}.items():
    if not 0 <= value < math.inf:
      raise InputError(f'{field}={value} must be 0 or more')
