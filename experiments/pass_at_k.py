"""pass@k: the chance that at least one of k samples solves a problem (Chen et al., 2021, equation 1)."""

from collections.abc import Iterable
import math

from models.errors import InputError


def pass_at_k(samples: int, correct: int, k: int) -> float:
  """The unbiased estimate 1 - C(n - c, k) / C(n, k) for one problem, in exact integers until the division."""
  if not 0 <= correct <= samples:
    raise ValueError(f'{correct} correct of {samples} samples')
  if not 1 <= k <= samples:
    raise InputError(f'pass@{k} needs at least {max(k, 1)} samples of each problem and k of at least 1, '
                     f'there are {samples}: change k or --samples_per_problem')
  total = math.comb(samples, k)
  return (total - math.comb(samples - correct, k)) / total


def mean_pass_at_k(counts: Iterable[tuple[int, int]], k: int) -> float:
  """The mean over problems; `counts` holds (samples, correct) of each."""
  estimates = [pass_at_k(samples, correct, k) for samples, correct in counts]
  return math.fsum(estimates) / len(estimates)
