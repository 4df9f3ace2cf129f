"""Puts a known mistake in the place of the right part, everywhere: a pytest plugin.

    SPECDEC_PLANT='ratio upside down' python -m pytest -p experiments.planting tests/test_chi_square.py

The names are those of `experiments.mutations` and `experiments.tree_mutations`, with 'coupled: ', 'block: ' and
'tree: ' before mistakes of those.
"""

from collections.abc import Callable
import dataclasses
import os
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from experiments import mutations, tree_mutations
from specdec import rng, warp
from specdec.accept import block, coupled, multiround, rejection
from specdec.draft import Draft, prob_of
from specdec.drafters import children, model
from specdec.drafters.draft_vocab import DraftVocab
from specdec.drafters.model import Model, ModelDraftState
from specdec.drafters.protocol import Context
from specdec.warp import Sampling

VARIABLE = 'SPECDEC_PLANT'
right_propose, right_sampled_law, right_choose = Model.propose, warp._sampled_law, children.choose


@dataclasses.dataclass(frozen=True)
class Part:
  """`wrong` in the place of `owner.name`."""

  owner: Any
  name: str
  wrong: Callable


def filtered_apart(drawn: dict[str, float], reported: dict[str, float]) -> Callable:
  """Draws tokens by filters with some changes, and reports the law by filters with others."""

  def draw(logits_B1U: Array, vocab: DraftVocab, context: Context, index: int | Array) -> tuple[Array, Array]:
    law_of = lambda changes: vocab.laws(
        warp.warp(vocab.real(logits_B1U), dataclasses.replace(context.sampling, **changes)))[:, 0]
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


def likeliest_with_laws(logits_BRU: Array, count: int, kind: str, *rest, **options) -> tuple[Array, Array | None]:
  """The likeliest children, with the laws that others would have been drawn from."""
  tokens_BRK, _ = right_choose(logits_BRU, count, 'top', *rest, **options)
  return tokens_BRK, right_choose(logits_BRU, count, kind, *rest, **options)[1]


def sorted_siblings(*arguments, **options) -> tuple[Array, Array | None]:
  tokens_BRK, laws_BRV = right_choose(*arguments, **options)
  return jnp.sort(tokens_BRK, axis=-1), laws_BRV


def likeliest_of_drawn(logits_BRU: Array, count: int, *rest, **options) -> tuple[Array, Array | None]:
  """Draws one child more, and leaves out the one of the smallest probability."""
  tokens_BRK, laws_BRV = right_choose(logits_BRU, count + 1, *rest, **options)
  if laws_BRV is None:
    return tokens_BRK[..., :count], None
  prob_BRK = jnp.take_along_axis(laws_BRV, tokens_BRK, axis=-1)
  kept_BRK = jnp.sort(jnp.argsort(-prob_BRK, axis=-1)[..., :count], axis=-1)
  return jnp.take_along_axis(tokens_BRK, kept_BRK, axis=-1), laws_BRV


OUTSIDE_THE_RULE = {
    'argmax draft with its softmax as draft law': Part(model, 'draw', filtered_apart({'temperature': 0.0}, {})),
    'draft law before temperature': Part(model, 'draw', filtered_apart({}, {'temperature': 1.0})),
    'draft law before top-k': Part(model, 'draw', filtered_apart({}, {'top_k': 0})),
    'top-p before temperature': Part(warp, '_sampled_law', top_p_first),
    'sampled token dropped after looking': Part(Model, 'propose', shortened(likely)),
    'token kept or dropped by the law behind it': Part(Model, 'propose', shortened(before_a_narrow_law)),
    'tree: one argmax child judged by its softmax': Part(children, 'choose', likeliest_with_laws),
    'tree: argmax children judged by their softmax': Part(children, 'choose', likeliest_with_laws),
    'tree: siblings sorted after they were drawn': Part(children, 'choose', sorted_siblings),
    'tree: drawn children chosen by their probability': Part(children, 'choose', likeliest_of_drawn),
}


def plants() -> dict[str, list[Part]]:
  """What is exchanged, by mutation."""
  found = {name: [part] for name, part in OUTSIDE_THE_RULE.items()}
  for mutation in mutations.all_mutations():
    if mutation.rule != mutations.RIGHT:
      found[mutation.name] = [Part(rejection, 'num_accepted', mutation.rule.num_accepted),
                              Part(rejection, 'next_law', mutation.rule.next_law)]
  for mutation in mutations.block_mutations():
    found[f'block: {mutation.name}'] = [Part(block, 'num_accepted', mutation.rule.num_accepted),
                                        Part(block, 'next_law', mutation.rule.next_law)]
  for mutation in tree_mutations.all_mutations():
    if mutation.rule.swapped:
      found[f'tree: {mutation.name}'] = [Part(multiround, *part) for part in mutation.rule.swapped]
  for name, rule in mutations.COUPLED.items():
    found[f'coupled: {name}'] = [Part(coupled, 'choices', rule.choices), Part(coupled, 'match', rule.match)]
  return found


def pytest_configure() -> None:
  """Called by pytest before it imports any test."""
  if os.environ.get(VARIABLE):
    for part in plants()[os.environ[VARIABLE]]:
      setattr(part.owner, part.name, part.wrong)
    jax.clear_caches()  # of what the list of mistakes itself has traced with the right parts
