"""No draft: plain autoregressive decoding through the same engine."""

import dataclasses
from typing import Any

from jax import Array
import jax.numpy as jnp

from specdec.draft import Draft
from specdec.drafters.protocol import Context


@dataclasses.dataclass(frozen=True)
class Empty:
  """Drafts nothing, whatever γ is."""

  name = 'none'

  def init(self, params: Any, tokens_BL: Array, length_B: Array, bucket: int) -> tuple[()]:
    return ()

  def propose(self, params: Any, state: tuple[()], context: Context, gamma: int) -> tuple[Draft, tuple[()]]:
    batch = context.length_B.shape[0]
    return Draft(jnp.zeros((batch, gamma), jnp.int32), None, jnp.zeros((batch,), jnp.int32)), state

  def observe(self, state: tuple[()], length_B: Array) -> tuple[()]:
    return state
