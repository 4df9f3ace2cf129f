"""No draft: plain autoregressive decoding through the same engine."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specdec.draft import Draft
from specdec.drafters.protocol import Context, Stateless


@dataclasses.dataclass(frozen=True)
class Empty(Stateless):
  """Drafts nothing, whatever γ is."""

  name = 'none'

  def propose(self, params: Any, state: tuple[()], context: Context, gamma: int) -> tuple[Draft, tuple[()]]:
    batch = context.length_B.shape[0]
    return Draft(jnp.zeros((batch, gamma), jnp.int32), None, jnp.zeros((batch,), jnp.int32)), state
