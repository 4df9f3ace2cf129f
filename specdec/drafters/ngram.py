"""Tables of counts as a draft that costs no model pass: unigrams and bigrams (Leviathan et al., 2023, section 4.2)."""

import dataclasses

from flax import struct
import jax
from jax import Array
import jax.numpy as jnp

from specdec import rng
from specdec.draft import Draft
from specdec.drafters.protocol import Context, Stateless
from specdec.warp import warp


@struct.dataclass
class NgramLaws:
  """Laws of the next token.

  After token u the law is `follow` at `followers` plus `left_over` of the unigram law everywhere (Ney et al., 1994); of
  unigrams alone nothing follows and all is left over.

  Attributes:
    unigram_V: how often each token occurs, a law.
    followers_VK, follow_VK: the ids that follow a token most, and their share of it; id 0 with no share past the last.
    left_over_V: what those shares leave of 1.
  """

  unigram_V: Array
  followers_VK: Array
  follow_VK: Array
  left_over_V: Array

  def after(self, token_B: Array) -> Array:
    """[B, V]"""
    law_BV = self.left_over_V[token_B][:, None] * self.unigram_V
    row_B1 = jnp.arange(token_B.shape[0])[:, None]
    return law_BV.at[row_B1, self.followers_VK[token_B]].add(self.follow_VK[token_B])


@dataclasses.dataclass(frozen=True)
class Ngram(Stateless):
  """Draws from the table what may follow the newest token; `params` is `NgramLaws`.

  Attributes:
    num_tokens: real tokens of the vocabulary, V of the table.
  """

  num_tokens: int

  name = 'ngram'
  draws = True

  def propose(self, params: NgramLaws, state: tuple[()], context: Context, gamma: int) -> tuple[Draft, tuple[()]]:
    batch = context.length_B.shape[0]
    newest_B = jnp.take_along_axis(context.tokens_BL, context.length_B[:, None] - 1, axis=1)[:, 0]

    def one(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
      tokens_BM, probs_BMV, newest_B = carry
      law_BV = warp(jnp.log(params.after(newest_B)), context.sampling)
      token_B = rng.draw(context.row_key_B, context.length_B + index, law_BV, context.purpose)
      return tokens_BM.at[:, index].set(token_B), probs_BMV.at[:, index].set(law_BV), token_B

    carry = jnp.zeros((batch, gamma), jnp.int32), jnp.zeros((batch, gamma, self.num_tokens), jnp.float32), newest_B
    tokens_BM, probs_BMV, _ = jax.lax.fori_loop(0, gamma, one, carry)
    return Draft(tokens_BM, probs_BMV, context.gamma_B), state
