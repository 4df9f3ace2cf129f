"""What speculation should yield: the published formulas, and the honest form with measured costs.

Leviathan et al. (2023), "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192, assume that
every tested token is accepted with the same probability alpha, independently. Everything works on numpy and on jax
arrays, inside `jax.jit` too, and keeps the floating type it is given.

    alpha   acceptance of a token that is tested (Corollary 3.6: E[sum min(target, draft)])
    gamma   drafted tokens per step
    c       time of one draft pass / time of one plain target pass (Definition 3.7)
    v(w)    time of a target pass over w tokens / time of a plain target pass
"""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike


def _namespace(*arrays: ArrayLike) -> ModuleType:
  return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def _floating(array: ArrayLike, xp: ModuleType) -> ArrayLike:
  array = xp.asarray(array)
  return array if xp.issubdtype(array.dtype, xp.floating) else array.astype(float)


def expected_tokens(alpha: ArrayLike, gamma: ArrayLike) -> ArrayLike:
  """Tokens emitted per target pass, (1 - alpha^(gamma+1)) / (1 - alpha): Leviathan et al. (2023), equation 1.

  Its limit at alpha = 1 is gamma + 1; NaN where alpha is.
  """
  xp = _namespace(alpha, gamma)
  alpha = _floating(alpha, xp)
  gamma = xp.asarray(gamma).astype(alpha.dtype)
  inside = (alpha > 0) & (alpha < 1)
  safe = xp.where(inside, alpha, 0.5)
  # As 1 + alpha (1 - alpha^gamma) / (1 - alpha), which is 1 to the bit at gamma = 0; and with expm1 and log rather than
  # a power, since near alpha = 1 both differences would cancel.
  accepted = -safe * xp.expm1(gamma * xp.log(safe)) / (1 - safe)
  return 1 + xp.where(inside, accepted, xp.where(alpha >= 1, gamma, 0 * alpha))[()]


def speedup_leviathan(alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike) -> ArrayLike:
  """Walltime improvement (1 - alpha^(gamma+1)) / ((1 - alpha)(gamma c + 1)): Leviathan et al. (2023), Theorem 3.8.

  Assumes that the target passes gamma + 1 tokens in the time of one.
  """
  return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations_factor(alpha: ArrayLike, gamma: ArrayLike, c_hat: ArrayLike) -> ArrayLike:
  """Growth of arithmetic operations (1 - alpha)(gamma c_hat + gamma + 1) / (1 - alpha^(gamma+1)).

  Leviathan et al. (2023), Theorem 3.11. `c_hat` is the ratio of operations per token, draft to target (their
  Definition 3.10).
  """
  return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def optimal_gamma(alpha: ArrayLike, c: ArrayLike, max_gamma: int) -> ArrayLike:
  """The gamma in 0..max_gamma with the largest Theorem 3.8 improvement (Leviathan et al., 2023, Figure 3)."""
  return best_gamma_for(alpha, c, np.ones(max_gamma + 1), max_gamma)


def expected_tokens_from_positions(conditional_acceptance: ArrayLike) -> ArrayLike:
  """Tokens per target pass when acceptance differs by position: 1 + sum_i prod_(j<=i) a_j.

  Equation 1 without its assumption that all positions are alike.

  Args:
    conditional_acceptance: last axis gamma; entry i is the acceptance of draft position i given that all before it were
      accepted.
  """
  xp = _namespace(conditional_acceptance)
  return 1 + xp.cumprod(_floating(conditional_acceptance, xp), axis=-1).sum(axis=-1)


def speedup_measured(emitted: ArrayLike, gamma: ArrayLike, draft_cost: ArrayLike, verify_cost: ArrayLike,
                     overhead: ArrayLike = 0.0) -> ArrayLike:
  """Speed-up that measured parts add up to: emitted / (v(gamma+1) + gamma c + overhead).

  Theorem 3.8 of Leviathan et al. (2023) without the assumption v = 1.

  Args:
    emitted: tokens per target pass.
    gamma: drafted tokens per step.
    draft_cost: c, one draft pass in plain target passes.
    verify_cost: v(gamma + 1), the verify pass in plain target passes.
    overhead: everything else in a step, in plain target passes.
  """
  return emitted / (verify_cost + gamma * draft_cost + overhead)


def std_tokens(alpha: ArrayLike, gamma: int) -> ArrayLike:
  """Standard deviation of the tokens of one pass: that of the capped geometric law behind equation 1.

  It grows with gamma, which is why Chen et al. (2023, Figure 1) see the spread of latencies grow with theirs.
  """
  xp = _namespace(alpha)
  alpha = _floating(alpha, xp)
  mean = expected_tokens(alpha, gamma)
  variance = alpha**gamma * (gamma + 1 - mean)**2
  for accepted in range(gamma):
    variance = variance + alpha**accepted * (1 - alpha) * (accepted + 1 - mean)**2
  return xp.sqrt(variance)


def std_passes(tokens: ArrayLike, alpha: ArrayLike, gamma: int) -> ArrayLike:
  """Standard deviation of the passes that emit `tokens` tokens: sqrt(tokens sigma^2 / mu^3), from renewal theory."""
  xp = _namespace(tokens, alpha)
  return std_tokens(alpha, gamma) * xp.sqrt(tokens / expected_tokens(alpha, gamma)**3)


def alpha_from_tokens(tokens_per_pass: ArrayLike, gamma: ArrayLike) -> ArrayLike:
  """The alpha for which equation 1 gives `tokens_per_pass`, by bisection; clipped to [0, 1], NaN where gamma is 0."""
  xp = _namespace(tokens_per_pass, gamma)
  tokens = _floating(tokens_per_pass, xp)
  low = xp.zeros_like(tokens + xp.asarray(gamma).astype(tokens.dtype))
  high = xp.ones_like(low)
  for _ in range(xp.finfo(low.dtype).nmant + 2):
    middle = (low + high) / 2
    enough = expected_tokens(middle, gamma) >= tokens
    low, high = xp.where(enough, low, middle), xp.where(enough, middle, high)
  alpha = xp.where(tokens <= 1, 0, xp.where(tokens >= gamma + 1, 1, (low + high) / 2))
  return xp.where(xp.asarray(gamma) > 0, alpha, xp.nan)[()]


def best_gamma_for(alpha_B: ArrayLike, draft_cost: ArrayLike, verify_cost_by_width: ArrayLike, max_gamma: int,
                   overhead: float = 0.0) -> ArrayLike:
  """The gamma in 0..max_gamma that emits most per unit of time, for each alpha; ties go to the smaller.

  Equation 1 over the measured cost of a step (`speedup_measured`).

  Args:
    alpha_B: acceptance of a tested token; any shape.
    draft_cost: c; a number, or one for each alpha.
    verify_cost_by_width: entry w - 1 is v(w), so entry gamma is what verifying gamma drafted tokens costs; at least
      max_gamma + 1 entries.
    max_gamma: largest gamma to consider (static).
    overhead: of a step, in plain target passes.
  """
  xp = _namespace(alpha_B, draft_cost, verify_cost_by_width)
  alpha_B = _floating(alpha_B, xp)
  alpha_B, draft_B = xp.broadcast_arrays(alpha_B, xp.asarray(draft_cost).astype(alpha_B.dtype))
  row = (1,) * alpha_B.ndim + (max_gamma + 1,)
  gamma_G = xp.arange(max_gamma + 1, dtype=alpha_B.dtype).reshape(row)
  verify_G = xp.asarray(verify_cost_by_width).astype(alpha_B.dtype)[:max_gamma + 1].reshape(row)
  emitted_BG = expected_tokens(alpha_B[..., None], gamma_G)
  return xp.argmax(speedup_measured(emitted_BG, gamma_G, draft_B[..., None], verify_G, overhead), axis=-1)
