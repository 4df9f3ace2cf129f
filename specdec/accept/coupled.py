"""Gumbel coupling: draft and target share the noise of each position (Daliri et al., 2024).

The target's own choice is emitted at every position, so the text depends on the seed alone, whatever the drafter,
γ, tree or batch; a drafted token is kept iff it is that choice. For a point-mass draft this is sample-and-match.
"""

import dataclasses

from jax import Array
import jax.numpy as jnp

from specdec import rng
from specdec.accept.matching import match, row_depths
from specdec.draft import AnyDraft, TreeDraft, Verdict


def choices(noise_BTV: Array, target_probs_BTV: Array) -> Array:
  """[B, T]: the target's choice under the noise of each position."""
  return rng.gumbel_max(target_probs_BTV, noise_BTV)


def noise_of_rows(noise_BLV: Array, draft: AnyDraft) -> Array:
  """[B, T, V] from the noise of each position: all rows of a level of a tree stand at the same one."""
  if not isinstance(draft, TreeDraft):
    return noise_BLV
  return jnp.take_along_axis(noise_BLV, row_depths(draft)[..., None], axis=1)


@dataclasses.dataclass(frozen=True)
class Coupled:
  """Lossless; keeps a token with probability at least (1 - TV) / (1 + TV)."""

  name = 'coupled'
  lossless = True
  draft_purpose = rng.Purpose.SHARED
  trees, laws = True, True
  by_step = False

  def __call__(self, row_key_B: Array, position_B: Array, draft: AnyDraft, target_probs_BTV: Array) -> Verdict:
    width, vocab = target_probs_BTV.shape[1:]
    num_positions = draft.levels + 1 if isinstance(draft, TreeDraft) else width
    noise_BLV = jnp.stack([rng.gumbels(row_key_B, position_B + i, vocab, rng.Purpose.SHARED)
                           for i in range(num_positions)], axis=1)
    return match(choices(noise_of_rows(noise_BLV, draft), target_probs_BTV), draft)
