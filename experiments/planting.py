"""Puts a known mistake in the place of the right part, everywhere: a pytest plugin.

    SPECDEC_PLANT='ratio upside down' python -m pytest -p experiments.planting tests/test_chi_square.py

The names are those of `experiments.mutations`, with 'coupled: ' before mistakes of the coupled rule.
"""

from collections.abc import Callable
import dataclasses
import os
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from experiments import mutations
from specdec import rng, warp
from specdec.accept import coupled, rejection
from specdec.draft import Draft, prob_of
from specdec.drafters.model import Model, ModelDraftState
from specdec.drafters.protocol import Context
from specdec.warp import Sampling

VARIABLE = 'SPECDEC_PLANT'
right_propose, right_sampled_law = Model.propose, warp._sampled_law


@dataclasses.dataclass(frozen=True)
class Part:
  """`wrong` in the place of `owner.name`."""

  owner: Any
  name: str
  wrong: Callable


def filtered_apart(drawn: dict[str, float], reported: dict[str, float]) -> Callable:
  """Draws tokens by filters with some changes, and reports the law by filters with others."""

  def draw(self: Model, logits_B1V: Array, context: Context, index: int | Array) -> tuple[Array, Array]:
    law_of = lambda changes: warp.warp(
        logits_B1V[:, 0, :self.num_tokens], dataclasses.replace(context.sampling, **changes))
    token_B = rng.draw(context.row_key_B, context.length_B + index, law_of(drawn), context.purpose)
    return token_B, law_of(reported)

  return draw


def top_p_first(logits: Array, sampling: Sampling) -> Array:
  law = warp.keep_top_p(jax.nn.softmax(logits, axis=-1), sampling.top_p)
  return right_sampled_law(jnp.log(law), dataclasses.replace(sampling, top_p=1.0))


def shortened(keep: Callable[[Draft], Array]) -> Callable:
  """Drafts in full, then keeps the tokens before the first that `keep` [B, M] does not want."""

  def propose(self: Model, params: Any, state: ModelDraftState, context: Context,
              gamma: int) -> tuple[Draft, ModelDraftState]:
    draft, state = right_propose(self, params, state, context, gamma)
    wanted_B = jnp.sum(jnp.cumprod(keep(draft).astype(jnp.int32), axis=1), axis=1)
    return dataclasses.replace(draft, count_B=jnp.minimum(draft.count_B, wanted_B)), state

  return propose


def likely(draft: Draft) -> Array:
  return prob_of(draft.probs_BMV, draft.tokens_BM) > 0.3


def before_a_narrow_law(draft: Draft) -> Array:
  laws_BMV = draft.probs_BMV[:, 1:]
  entropy_BM = -jnp.sum(jnp.where(laws_BMV > 0, laws_BMV * jnp.log(laws_BMV), 0), axis=-1)
  return jnp.pad(entropy_BM <= 0.9, ((0, 0), (0, 1)), constant_values=True)


OUTSIDE_THE_RULE = {
    'argmax draft with its softmax as draft law': Part(Model, '_draw', filtered_apart({'temperature': 0.0}, {})),
    'draft law before temperature': Part(Model, '_draw', filtered_apart({}, {'temperature': 1.0})),
    'draft law before top-k': Part(Model, '_draw', filtered_apart({}, {'top_k': 0})),
    'top-p before temperature': Part(warp, '_sampled_law', top_p_first),
    'sampled token dropped after looking': Part(Model, 'propose', shortened(likely)),
    'token kept or dropped by the law behind it': Part(Model, 'propose', shortened(before_a_narrow_law)),
}


def plants() -> dict[str, list[Part]]:
  """What is exchanged, by mutation."""
  found = {name: [part] for name, part in OUTSIDE_THE_RULE.items()}
  for mutation in mutations.all_mutations():
    if mutation.rule != mutations.RIGHT:
      found[mutation.name] = [Part(rejection, 'num_accepted', mutation.rule.num_accepted),
                              Part(rejection, 'next_law', mutation.rule.next_law)]
  for name, rule in mutations.COUPLED.items():
    found[f'coupled: {name}'] = [Part(coupled, 'choices', rule.choices), Part(coupled, 'match', rule.match)]
  return found


def pytest_configure() -> None:
  """Called by pytest before it imports any test."""
  if os.environ.get(VARIABLE):
    for part in plants()[os.environ[VARIABLE]]:
      setattr(part.owner, part.name, part.wrong)
    jax.clear_caches()  # of what the list of mistakes itself has traced with the right parts
