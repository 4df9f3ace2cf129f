"""What a draft should say at each place: the target's law, or the token that the text goes on with.

The law says more per token, and is what acceptance is measured by. The text is what Medusa's heads were first trained
on (Cai et al., 2024, equation 1); it needs no pass over the whole vocabulary.
"""

import jax
from jax import Array
import jax.numpy as jnp

from models.errors import InputError
from specdec.training.frozen import Seen
from specdec.training.guesses import find, shifted

LABELS = ('law', 'text')


def check_labels(kind: str) -> None:
  if kind not in LABELS:
    raise InputError(f"labels={kind!r} are unknown: use 'law' or 'text'")


def labels_of(kind: str, lm_head_UD: Array, seen: Seen, batch: dict[str, Array], ids_U: Array | None) -> Array:
  """[B, T, U]: log-probabilities of the tokens that can be drafted, after each token of the rows."""
  return target_law(lm_head_UD, seen) if kind == 'law' else text_law(batch, ids_U, lm_head_UD.shape[0])


def target_law(lm_head_UD: Array, seen: Seen) -> Array:
  """[B, T, U] float32: log-probabilities of the tokens that can be drafted, as the next ones."""
  logits_BTU = jnp.einsum('UD,BTD->BTU', lm_head_UD, seen.hidden_BTD.astype(lm_head_UD.dtype),
                          preferred_element_type=jnp.float32)
  return jax.lax.stop_gradient(logits_BTU - seen.log_total_BT[..., None])



def text_law(batch: dict[str, Array], ids_U: Array | None, num_draft: int) -> Array:
  """[B, T, U]: 0 for the token that comes next, if it can be drafted, and -inf for others."""
  place_BT, known_BT = find(ids_U, shifted(batch['tokens'], 1))
  is_next_BTU = (jnp.arange(num_draft) == place_BT[..., None]) & known_BT[..., None]
  return jnp.where(is_next_BTU, 0.0, -jnp.inf)
