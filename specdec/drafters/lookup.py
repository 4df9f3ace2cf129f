"""Prompt lookup: copy what followed the same n-gram earlier in the text (Saxena, 2023).

What an encoder has read counts as earlier text (proposed by Leviathan et al., 2023, section 3.6).
"""

import dataclasses
import functools
from typing import Any

from jax import Array
import jax.numpy as jnp

from specdec.draft import Draft
from specdec.drafters.protocol import Context, Stateless


def match_lengths(tokens_BL: Array, length_B: Array, *, min_ngram: int, max_ngram: int, num_tokens: int,
                  partial: bool, ending: tuple[Array, Array] | None = None) -> Array:
  """[B, L]: of the n-grams that end the text, the longest that also stands right before this slot; 0 where none does.

  Prompt and output are searched alike. With `partial` the continuation, which starts at the slot, may run into the end
  of the text; without, all `num_tokens` must lie inside it, and it starts before the n-gram itself does (the
  reference rule).

  Args:
    tokens_BL, length_B: the text that is searched.
    min_ngram, max_ngram, num_tokens, partial: the rule.
    ending: another text, [B, L] and its lengths, whose end is looked for; None is the same one.
  """
  slots_L = jnp.arange(tokens_BL.shape[1])
  length_B1 = length_B[:, None]
  ending_BL, ending_B = ending or (tokens_BL, length_B)
  ending_B1 = ending_B[:, None]
  longest_BL = jnp.zeros(tokens_BL.shape, jnp.int32)
  matches_BL = jnp.ones(tokens_BL.shape, bool)  # the n tokens before this slot equal the last n tokens
  for n in range(1, max_ngram + 1):
    last_B1 = jnp.take_along_axis(ending_BL, jnp.maximum(ending_B1 - n, 0), axis=1)
    shifted_BL = jnp.roll(tokens_BL, n, axis=1)
    matches_BL = matches_BL & (shifted_BL == last_B1) & (slots_L >= n) & (ending_B1 >= n)
    if n < min_ngram:
      continue
    inside_BL = slots_L < length_B1
    if not partial:
      inside_BL = slots_L + num_tokens <= length_B1
      if ending is None:
        inside_BL &= slots_L < length_B1 - n
    longest_BL = jnp.where(matches_BL & inside_BL, n, longest_BL)
  return longest_BL


def find_continuation(longest_BL: Array, latest: bool) -> tuple[Array, Array]:
  """The slot with the longest match, the earliest (or latest) of several, and whether there is a match, both [B]."""
  capacity = longest_BL.shape[1]
  slots_L = jnp.arange(capacity)
  rank_BL = longest_BL * capacity + (slots_L if latest else capacity - 1 - slots_L)
  start_B = jnp.argmax(rank_BL, axis=1).astype(jnp.int32)
  return start_B, jnp.any(longest_BL > 0, axis=1)


def continuation(tokens_BL: Array, start_B: Array, num_tokens: int) -> Array:
  """[B, num_tokens]: the text from `start` on; the last slot again past the end of the buffer."""
  slots_BM = jnp.minimum(start_B[:, None] + jnp.arange(num_tokens), tokens_BL.shape[1] - 1)
  return jnp.take_along_axis(tokens_BL, slots_BM, axis=1)


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

  def searched(self, context: Context) -> Array:
    """[B, L]: where continuations are looked for: the text, behind its source if it has one."""
    if context.source is None:
      return context.tokens_BL
    return jnp.concatenate([context.source.tokens_BS, context.tokens_BL], axis=1)

  def matches(self, context: Context, num_tokens: int) -> Array:
    """[B, L]: see `match_lengths`, by slots of `searched`."""
    text, source = (context.tokens_BL, context.length_B), context.source
    match = functools.partial(match_lengths, min_ngram=self.min_ngram, max_ngram=self.max_ngram,
                              num_tokens=num_tokens, partial=self.partial)
    if source is None:
      return match(*text)
    return jnp.concatenate([match(source.tokens_BS, source.length_B, ending=text), match(*text)], axis=1)

  def propose(self, params: Any, state: tuple[()], context: Context, gamma: int) -> tuple[Draft, tuple[()]]:
    start_B, found_B = find_continuation(self.matches(context, gamma), self.latest)
    tokens_BM = continuation(self.searched(context), start_B, gamma)
    available_B = jnp.minimum(_end(context, start_B) - start_B, context.gamma_B)
    return Draft(tokens_BM, None, jnp.where(found_B, available_B, 0)), state


def _end(context: Context, start_B: Array) -> Array:
  """[B]: where the text that the slot belongs to ends, in slots of `Lookup.searched`."""
  if context.source is None:
    return context.length_B
  behind = context.source.tokens_BS.shape[1]
  return jnp.where(start_B < behind, context.source.length_B, behind + context.length_B)
