"""Prompt lookup: copy what followed the same n-gram earlier in the text (Saxena, 2023)."""

import dataclasses
from typing import Any

from jax import Array
import jax.numpy as jnp

from specdec.draft import Draft
from specdec.drafters.protocol import Context, Stateless


def find_continuation(tokens_BL: Array, length_B: Array, *, min_ngram: int, max_ngram: int, num_tokens: int,
                      latest: bool, partial: bool) -> tuple[Array, Array]:
  """Where the continuation of the last n-gram's match starts, and whether there is one, both [B].

  The longest n-gram with a match wins; among its matches the earliest (or latest). Prompt and output are searched
  alike. With `partial` the continuation may run into the end of the text; without, all `num_tokens` must lie
  inside it, and it starts before the n-gram itself does (the reference rule).
  """
  slots_L = jnp.arange(tokens_BL.shape[1])
  length_B1 = length_B[:, None]
  start_B = jnp.zeros_like(length_B)
  found_B = jnp.zeros(length_B.shape, bool)
  matches_BL = jnp.ones(tokens_BL.shape, bool)  # the n tokens before this slot equal the last n tokens
  for n in range(1, max_ngram + 1):
    last_B1 = jnp.take_along_axis(tokens_BL, jnp.maximum(length_B1 - n, 0), axis=1)
    shifted_BL = jnp.roll(tokens_BL, n, axis=1)
    matches_BL = matches_BL & (shifted_BL == last_B1) & (slots_L >= n) & (length_B1 > n)
    if n < min_ngram:
      continue
    inside_BL = slots_L < length_B1
    if not partial:
      inside_BL = (slots_L + num_tokens <= length_B1) & (slots_L < length_B1 - n)
    usable_BL = matches_BL & inside_BL
    hit_B = jnp.any(usable_BL, axis=1)
    first_B = jnp.argmax(usable_BL, axis=1)
    if latest:
      first_B = tokens_BL.shape[1] - 1 - jnp.argmax(usable_BL[:, ::-1], axis=1)
    start_B = jnp.where(hit_B, first_B, start_B)
    found_B |= hit_B
  return start_B, found_B


@dataclasses.dataclass(frozen=True)
class Lookup(Stateless):
  """A point-mass draft that costs no model pass.

  Attributes:
    min_ngram, max_ngram: lengths of the n-grams tried, longest first.
    latest: take the latest match instead of the earliest.
    partial: allow continuations shorter than γ.
  """

  min_ngram: int = 1
  max_ngram: int = 3
  latest: bool = False
  partial: bool = False

  name = 'lookup'

  def __post_init__(self):
    if not 1 <= self.min_ngram <= self.max_ngram:
      raise ValueError(f'need 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}')

  def propose(self, params: Any, state: tuple[()], context: Context, gamma: int) -> tuple[Draft, tuple[()]]:
    start_B, found_B = find_continuation(
        context.tokens_BL, context.length_B, min_ngram=self.min_ngram, max_ngram=self.max_ngram, num_tokens=gamma,
        latest=self.latest, partial=self.partial)
    slots_BM = start_B[:, None] + jnp.arange(gamma)
    tokens_BM = jnp.take_along_axis(context.tokens_BL, jnp.minimum(slots_BM, context.tokens_BL.shape[1] - 1), axis=1)
    available_B = jnp.minimum(context.length_B - start_B, context.gamma_B)
    return Draft(tokens_BM, None, jnp.where(found_B, available_B, 0)), state
