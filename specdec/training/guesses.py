"""How often a draft guessed right the token that the text really goes on with: what is logged beside the loss.

Held-out texts were drawn by the target. So the share of guesses of rank 0 that are right there is the probability that
they are kept, as point masses, by every lossless rule, whatever the temperature of the texts.
"""

import jax
from jax import Array
import jax.numpy as jnp

from specdec.training.losses import masked_sum

UNKNOWN = 1 << 20  # the rank of a token that cannot be drafted
UNASKED = -1  # where no token counts


def shifted(x_BT: Array, places: int) -> Array:
  """What stands `places` further in the row, or before if negative; zeros beyond its ends. Of any [B, T, ...]."""
  width = x_BT.shape[1]
  ends = (max(-places, 0), max(places, 0))
  start = max(places, 0)
  return jnp.pad(x_BT, ((0, 0), ends) + ((0, 0),) * (x_BT.ndim - 2))[:, start:start + width]


def counted(batch: dict[str, Array], places: int) -> Array:
  """[B, T]: where the token `places` further is of the same text, and the target's answer."""
  same_BT = shifted(batch['segments'], places) == batch['segments']
  return same_BT & shifted(batch['trains'], places).astype(bool)


def find(ids_U: Array | None, tokens_BT: Array) -> tuple[Array, Array]:
  """The place of each token among those that can be drafted (ascending), and whether it is there."""
  if ids_U is None:
    return tokens_BT, jnp.ones_like(tokens_BT, bool)
  place_BT = jnp.minimum(jnp.searchsorted(ids_U, tokens_BT), len(ids_U) - 1)
  return place_BT, ids_U[place_BT] == tokens_BT


def ranks(logits_BTU: Array, tokens_BT: Array, counts_BT: Array, ids_U: Array | None) -> Array:
  """[B, T]: which choice of the draft the token is, 0 for its first.

  `UNKNOWN` where it cannot be drafted, `UNASKED` where it does not count.

  Of equal logits the one with the lower id comes first, as `jax.lax.top_k` has it.
  """
  place_BT, known_BT = find(ids_U, tokens_BT)
  logit_BT1 = jnp.take_along_axis(logits_BTU, place_BT[..., None], axis=-1)
  earlier_U = jnp.arange(logits_BTU.shape[-1]) < place_BT[..., None]
  before_BTU = (logits_BTU > logit_BT1) | (logits_BTU == logit_BT1) & earlier_U
  rank_BT = jnp.where(known_BT, jnp.sum(before_BTU, axis=-1), UNKNOWN)
  return jnp.where(counts_BT, rank_BT, UNASKED)


def agreement(ranks_BTM: Array, counts_BTM: Array) -> dict[str, Array]:
  """Sums over what counts: of guess m alone, and of it and all before it ('kept').

  `accepted` is the length that a chain of M guesses would have, from every place of the texts. Means over as many as
  count for the first guess: near the end of a text there are fewer tokens to be guessed.
  """
  right_BTM = ranks_BTM == 0
  kept_BTM = jnp.cumprod(right_BTM, axis=-1).astype(bool)
  sums = {'accepted': masked_sum(kept_BTM.astype(jnp.float32), counts_BTM)}
  for m in range(ranks_BTM.shape[-1]):
    sums[f'right_{m + 1}'] = masked_sum(right_BTM[..., m].astype(jnp.float32), counts_BTM[..., m])
    sums[f'kept_{m + 1}'] = masked_sum(kept_BTM[..., m].astype(jnp.float32), counts_BTM[..., m])
  return jax.lax.stop_gradient(sums)
