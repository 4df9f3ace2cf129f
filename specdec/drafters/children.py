"""Which tokens hang under a row of a tree: the likeliest ones, or draws from the row's law."""

import jax
from jax import Array
import jax.numpy as jnp

from models.errors import InputError
from specdec import rng
from specdec.drafters.draft_vocab import DraftVocab
from specdec.drafters.protocol import Context
from specdec.warp import warp
from specdec.wide import first_max, invert_cdf

KINDS = ('top', 'without', 'with')  # point masses; drawn without or with replacement


def likeliest(scores_BRU: Array, count: int) -> tuple[Array, Array]:
  """The `count` best scores and their indices, [B, R, count], best first; ties go to the lowest index.

  Raises:
    InputError: more than there are.
  """
  if count > scores_BRU.shape[-1]:
    raise InputError(f'a row of the tree has {count} children, and {scores_BRU.shape[-1]} tokens can be drafted: use a '
                     'narrower tree')
  if count == 1:  # plain reductions are faster
    top_BR, index_BR = first_max(scores_BRU)
    return top_BR[..., None], index_BR[..., None]
  return jax.lax.top_k(scores_BRU, count)


def choose(logits_BRU: Array, count: int, kind: str, context: Context, depth: int, vocab: DraftVocab,
           soften: bool) -> tuple[Array, Array | None]:
  """Tokens [B, R, count] of the children in the order in which they are tried, and the laws [B, R, V] they are drawn
  from; None for point masses.

  All rows of a level share the noise of their position: a text goes through one of them only. Noise that is shared
  with the target orders tokens by log law + noise, whatever the kind: the first is what the target would choose if it
  had this law, the second what it would choose if the first were not there. Draws without replacement are the same with
  noise of the drafter's own (Gumbel-top-k). Where the law runs out of tokens, the children left have probability 0.

  Args:
    logits_BRU: of the rows, over the tokens that can be drafted.
    count: of children.
    kind: one of `KINDS`.
    context: of the step.
    depth: of the rows.
    vocab: which tokens can be drafted.
    soften: greedily, choose the likeliest and report softmax laws in place of one-hot ones, which have one child only.
      That is exact: the target's law has one token, so that a child is kept iff it is this token, if its own law
      gives it any mass.

  Raises:
    InputError: more children than tokens.
  """
  logits_BRU = vocab.real(logits_BRU)
  is_shared = context.purpose is rng.Purpose.SHARED
  if kind == 'top' and not is_shared:
    return vocab.tokens(likeliest(logits_BRU, count)[1]), None
  greedy, position_B = context.sampling.greedy, context.length_B + depth
  law_BRU = warp(logits_BRU, context.sampling)
  if soften:
    law_BRU = jnp.where(greedy, jax.nn.softmax(logits_BRU, axis=-1), law_BRU)
  if kind == 'with' and not is_shared:
    uniform_BK = rng.uniforms(context.row_key_B, position_B, 1, context.purpose, each=count)[:, 0]
    index_BRK = jax.lax.cond(
        greedy, lambda: likeliest(law_BRU, count)[1].astype(jnp.int32), lambda: _independent(law_BRU, uniform_BK))
  else:
    noise_BU = jnp.where(greedy, 0.0, vocab.gumbels(context.row_key_B, position_B, context.purpose))
    index_BRK = likeliest(jnp.log(law_BRU) + noise_BU[:, None], count)[1]
  return vocab.tokens(index_BRK), None if kind == 'top' else vocab.laws(law_BRU)


def _independent(law_BRU: Array, uniform_BK: Array) -> Array:
  """[B, R, K]: draws with replacement."""
  uniform_BRK = jnp.broadcast_to(uniform_BK[:, None], (*law_BRU.shape[:2], uniform_BK.shape[1]))
  return jax.vmap(invert_cdf, in_axes=(None, -1), out_axes=-1)(law_BRU, uniform_BRK)
