"""Prompt lookup with several continuations at once: one branch for each of the best matches."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specdec.draft import TreeDraft
from specdec.drafters.lookup import Lookup, continuation, find_continuation
from specdec.drafters.protocol import Context
from specdec.tree import TreeSpec


@dataclasses.dataclass(frozen=True)
class LookupTree(Lookup):
  """The γ drafted tokens are `branches` chains of equal length, which begin with different tokens.

  A step drafts if there is one match; branches beyond the last match repeat the first.

  Attributes:
    branches: chains, at most.
  """

  branches: int = 2

  name = 'lookup_tree'
  is_tree = True

  def __post_init__(self):
    super().__post_init__()
    if self.branches < 1:
      raise ValueError(f'branches must be 1 or more, got {self.branches}')

  def levels(self, gamma: int) -> int:
    if gamma % self.branches:
      raise ValueError(f'gamma={gamma} is no multiple of the {self.branches} branches of the lookup tree')
    return gamma // self.branches

  def propose(self, params: Any, state: tuple[()], context: Context, gamma: int) -> tuple[TreeDraft, tuple[()]]:
    levels = self.levels(gamma)
    longest_BL, searched_BL = self.matches(context, levels), self.searched(context)
    first_B, found_B = find_continuation(longest_BL, self.latest)
    chains = []
    for _ in range(self.branches):
      start_B, has_match_B = find_continuation(longest_BL, self.latest)
      chains.append(continuation(searched_BL, jnp.where(has_match_B, start_B, first_B), levels))
      longest_BL = jnp.where(searched_BL == chains[-1][:, :1], 0, longest_BL)
    tokens_BM = jnp.stack(chains, axis=2).reshape(-1, gamma)  # breadth first
    spec = TreeSpec.branches(self.branches, levels)
    parents_BM = jnp.broadcast_to(jnp.asarray(spec.parents), tokens_BM.shape)
    count_B = jnp.where(found_B & (context.gamma_B > 0), gamma, 0)
    return TreeDraft(tokens_BM, parents_BM, None, count_B, levels, self.branches), state
