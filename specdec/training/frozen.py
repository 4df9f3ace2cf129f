"""What a frozen target says about rows of text, in one pass over each row, and what of a draft is frozen with it.

A batch of rows is a dict (`launch.corpus` makes them):

    tokens [B, T]      texts one after the other, none longer than a row
    segments [B, T]    which text of its row a token belongs to, from 1 on; 0 is padding
    positions [B, T]   in its text
    trains [B, T]      whether a draft should have guessed the token: an answer of the target, or any that is learnt

A row is a text of its own as far as the target is concerned: a token sees those of its segment alone. Rows that hold
`hidden` [B, T, D] and `log_total` [B, T] already, as kept from an earlier pass, need no pass.
"""

from typing import Any

from flax import nnx, struct
import jax
from jax import Array
import jax.numpy as jnp

from models.decoder import Decoder
from models.protocol import Output
from models.sequence import Stack, Vectors
from models.sharding import constrain

ROWS = 512  # vectors whose logits over the whole vocabulary are in memory at once


@struct.dataclass
class Frozen:
  """What is not trained.

  Attributes:
    target: reads its cache at once (`attention_block` None), so that gradients pass where its layers are shared. Of
      one that is trained too, the target as it was, or None where that is never asked.
    rest: parameters and ids of the draft that stay as they are.
    ids_U: the target's ids of the tokens that a draft model may say, ascending; None for all, and for heads, which hold
      their own.
  """

  target: Decoder | Stack | None
  rest: nnx.State
  ids_U: Array | None = None


@struct.dataclass
class Seen:
  """What the target says.

  Attributes:
    hidden_BTD: before its LM head.
    log_total_BT: log Σ exp of its logits over all real tokens: what makes any of its logits a log-probability.
    taps_BTF: the outputs of the layers that its config taps; None where it taps none.
  """

  hidden_BTD: Array
  log_total_BT: Array
  taps_BTF: Array | None = None


def segment_mask(segments_BT: Array) -> Array:
  """[B, T, T]: a token sees itself and those before it in its segment."""
  width = segments_BT.shape[1]
  same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
  return same_BTT & jnp.tril(jnp.ones((width, width), bool))


def over_rows(model: Decoder, batch: dict[str, Array], logits: bool = True) -> Output:
  """One pass of a model over the rows."""
  batch_size, width = batch['tokens'].shape
  rows_BR = None if logits else jnp.zeros((batch_size, 0), jnp.int32)
  return model(batch['tokens'], batch['positions'], segment_mask(batch['segments']),
               model.init_cache(batch_size, width), rows_BR)


def observe(target: Decoder | Stack, batch: dict[str, Array], num_tokens: int) -> Seen:
  """What the target says about the rows; nothing is differentiated through it."""
  if 'hidden' in batch:
    return Seen(batch['hidden'].astype(jnp.float32), batch['log_total'])
  with jax.named_scope('target'):
    output = _vectors(target, batch)
    log_total_BT = log_totals(target.lm_head[:num_tokens], output.hidden_BTD)
  return jax.lax.stop_gradient(Seen(output.hidden_BTD, log_total_BT, output.taps_BTF))


def _vectors(target: Decoder | Stack, batch: dict[str, Array]) -> Output | Vectors:
  if isinstance(target, Stack):
    return target(batch['tokens'], batch['positions'], batch['segments'])
  return over_rows(target, batch, logits=False)


def log_totals(lm_head_VD: Array, hidden_BTD: Array) -> Array:
  """[B, T]: log Σ exp of the logits, `ROWS` vectors at a time."""
  vectors_PD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])

  def one(hidden_D: Array) -> Array:
    logits_V = jnp.einsum('VD,D->V', lm_head_VD, hidden_D, preferred_element_type=jnp.float32)
    return jax.nn.logsumexp(logits_V)

  return jax.lax.map(one, vectors_PD, batch_size=min(ROWS, len(vectors_PD))).reshape(hidden_BTD.shape[:2])


def rows_of_head(target: Decoder | Stack, ids_U: Array | None, num_tokens: int) -> Array:
  """[U, D]: of the target's LM head, for the tokens that can be drafted.

  Raises:
    InputError: if the axis `model` does not divide U.
  """
  if ids_U is None:
    return target.lm_head[:num_tokens]
  return constrain(jnp.take(target.lm_head, ids_U, axis=0), 'VD')


def split(module: nnx.Module, *trained: Any) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
  """Graph, what is trained, and the rest: ids and borrowed arrays. Without filters all parameters are trained."""
  return nnx.split(module, *(trained or (nnx.Param,)), ...)
