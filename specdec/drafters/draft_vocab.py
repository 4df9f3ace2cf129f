"""Fewer tokens for the draft than for the target: U of V (Zhao et al., 2025, FR-Spec; Li et al., 2025, EAGLE-3)."""

from flax import struct
from jax import Array
import jax.numpy as jnp

from models.protocol import LanguageModel
from specdec import rng


@struct.dataclass
class ReducedModel:
  """A draft model that speaks of fewer tokens than it reads.

  Attributes:
    model: its logits are [B, R, U].
    ids_U: the target's ids of these tokens, ascending.
  """

  model: LanguageModel
  ids_U: Array


@struct.dataclass
class DraftVocab:
  """The tokens that can be drafted.

  Attributes:
    ids_U: the target's ids of them, ascending; None is all.
    num_tokens: V, the real tokens of the target; what lies beyond pads the vocabulary and is never drafted.
  """

  ids_U: Array | None
  num_tokens: int = struct.field(pytree_node=False)

  def real(self, logits_BRU: Array) -> Array:
    """Without what only pads the vocabulary."""
    if self.ids_U is None:
      return logits_BRU[..., :self.num_tokens]
    return jnp.where(self.ids_U < self.num_tokens, logits_BRU, -jnp.inf)

  def tokens(self, index_BRK: Array) -> Array:
    """The target's ids."""
    return index_BRK.astype(jnp.int32) if self.ids_U is None else self.ids_U[index_BRK]

  def laws(self, laws_BRU: Array) -> Array:
    """[B, R, V]: 0 where nothing can be drafted."""
    if self.ids_U is None:
      return laws_BRU
    zeros_BRV = jnp.zeros((*laws_BRU.shape[:2], self.num_tokens), laws_BRU.dtype)
    return zeros_BRV.at[..., self.ids_U].set(laws_BRU, mode='drop', unique_indices=True, indices_are_sorted=True)

  def gumbels(self, row_key_B: Array, position_B: Array, purpose: rng.Purpose) -> Array:
    """[B, U]: drawn over the target's vocabulary, so that a token has the noise that the target shares."""
    noise_BV = rng.gumbels(row_key_B, position_B, self.num_tokens, purpose)
    return noise_BV if self.ids_U is None else jnp.take(noise_BV, self.ids_U, axis=-1, mode='clip')
