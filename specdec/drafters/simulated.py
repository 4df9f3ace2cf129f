"""A draft of known acceptance, to time the engine apart from any draft's quality."""

import dataclasses

from jax import Array
import jax.numpy as jnp

from specdec import rng
from specdec.draft import Draft
from specdec.drafters.protocol import Context, Stateless


@dataclasses.dataclass(frozen=True)
class Simulated(Stateless):
  """Drafts the recorded continuation, each token spoiled with probability 1 - α.

  `params` is the recorded text [B, L] of the same prompts and seeds: then every tested token is kept with
  probability α exactly under greedy decoding and under the coupled rule. Lossless like every point-mass draft:
  a wrong recording lowers acceptance, never changes the text.

  Attributes:
    alpha: acceptance of a tested token.
  """

  alpha: float

  name = 'simulated'

  def __post_init__(self):
    if not 0 <= self.alpha <= 1:
      raise ValueError(f'alpha must lie in [0, 1], got {self.alpha}')

  def propose(self, params: Array, state: tuple[()], context: Context, gamma: int) -> tuple[Draft, tuple[()]]:
    slots_BM = jnp.minimum(context.length_B[:, None] + jnp.arange(gamma), params.shape[1] - 1)
    recorded_BM = jnp.take_along_axis(params, slots_BM, axis=1)
    uniform_BM = rng.uniforms(context.row_key_B, context.length_B, gamma, rng.Purpose.DRAFT)
    spoiled_BM = jnp.where(recorded_BM == 0, 1, 0)
    return Draft(jnp.where(uniform_BM < self.alpha, recorded_BM, spoiled_BM), None, context.gamma_B), state
