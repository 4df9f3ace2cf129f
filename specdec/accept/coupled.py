"""Gumbel coupling: draft and target share the noise of each position (Daliri et al., 2024).

The target's own choice is emitted at every position, so the text depends on the seed alone, whatever the drafter,
γ or batch; a drafted token is kept iff it is that choice. For a point-mass draft this is sample-and-match.
"""

import dataclasses

from jax import Array
import jax.numpy as jnp

from specdec import rng
from specdec.draft import Draft, Verdict


def choices(noise_BTV: Array, target_probs_BTV: Array) -> Array:
  """[B, T]: the target's choice under the noise of each position."""
  return rng.gumbel_max(target_probs_BTV, noise_BTV)


def match(choice_BT: Array, draft: Draft) -> Verdict:
  """Keeps the drafted tokens that equal the choices; the next token is the choice at the first difference."""
  kept_BM = (draft.tokens_BM == choice_BT[:, :draft.width]) & (jnp.arange(draft.width) < draft.count_B[:, None])
  num_accepted_B = jnp.sum(jnp.cumprod(kept_BM.astype(jnp.int32), axis=1), axis=1)
  return Verdict(num_accepted_B, jnp.take_along_axis(choice_BT, num_accepted_B[:, None], axis=1)[:, 0])


@dataclasses.dataclass(frozen=True)
class Coupled:
  """Lossless; keeps a token with probability at least (1 - TV) / (1 + TV)."""

  name = 'coupled'
  lossless = True
  draft_purpose = rng.Purpose.SHARED

  def __call__(self, row_key_B: Array, position_B: Array, draft: Draft, target_probs_BTV: Array) -> Verdict:
    width, vocab = target_probs_BTV.shape[1:]
    noise_BTV = jnp.stack(
        [rng.gumbels(row_key_B, position_B + i, vocab, rng.Purpose.SHARED) for i in range(width)], axis=1)
    return match(choices(noise_BTV, target_probs_BTV), draft)
