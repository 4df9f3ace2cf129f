"""A drafter of trees whose laws come from a table, to sample the loop with."""

import dataclasses
from typing import Any

from jax import Array
import jax.numpy as jnp

from models.table import TableModel
from specdec.draft import TreeDraft
from specdec.drafters import children
from specdec.drafters.draft_vocab import DraftVocab
from specdec.drafters.protocol import Context, Stateless
from specdec.tree import TreeSpec


@dataclasses.dataclass(frozen=True)
class TableTree(Stateless):
  """A static tree, its children chosen as all tree drafters choose theirs; `params` is the table.

  Attributes:
    tree: its nodes are γ.
    num_tokens: real tokens; the table's padding beyond is never drafted.
    kind: of `specdec.drafters.children.KINDS`.
  """

  tree: TreeSpec
  num_tokens: int
  kind: str

  name = 'table_tree'
  is_tree = True

  @property
  def draws(self) -> bool:
    return self.kind != 'top'

  def levels(self, gamma: int) -> int:
    return self.tree.levels

  def propose(self, params: TableModel, state: tuple[()], context: Context,
              gamma: int) -> tuple[TreeDraft, tuple[()]]:
    tokens: dict[int, Array] = {}  # by row
    laws: list[Array] = []  # of the rows that have children, in order
    for depth in range(self.tree.levels):
      rows = [row for row in self.tree.internal if self.tree.depths[row] == depth]
      logits_BRU = jnp.stack([jnp.log(params.weights[self._newest(params, context, tokens, row)]) for row in rows], 1)
      nodes = self.tree.nodes_at(depth + 1)
      count = max(self.tree.ranks[node] for node in nodes) + 1
      chosen_BRK, laws_BRV = children.choose(
          logits_BRU, count, self.kind, context, depth, DraftVocab(None, self.num_tokens), soften=True)
      for node in nodes:
        tokens[node + 1] = chosen_BRK[:, rows.index(self.tree.parents[node]), self.tree.ranks[node]]
      laws += [] if laws_BRV is None else [laws_BRV]
    tokens_BM = jnp.stack([tokens[row] for row in range(1, gamma + 1)], axis=1)
    parents_BM = jnp.broadcast_to(jnp.asarray(self.tree.parents, jnp.int32), tokens_BM.shape)
    return TreeDraft(
        tokens_BM, parents_BM, jnp.concatenate(laws, axis=1) if laws else None,
        jnp.where(context.gamma_B > 0, gamma, 0), self.tree.levels, self.tree.branching,
        self.tree.internal if laws else (), gamma if laws else 0, self.kind == 'with'), state

  def _newest(self, params: TableModel, context: Context, tokens: dict[int, Array], row: int) -> tuple[Any, ...]:
    """The tokens that the law after a row looks at, [B] each; 0 before the text."""
    path = []
    while row:
      path.insert(0, tokens[row])
      row = self.tree.parents[row - 1]
    for back in range(1, params.order + 1 - len(path)):
      slot_B1 = (context.length_B - back)[:, None]
      token_B = jnp.take_along_axis(context.tokens_BL, jnp.maximum(slot_B1, 0), axis=1)[:, 0]
      path.insert(0, jnp.where(slot_B1[:, 0] >= 0, token_B, 0))
    return tuple(path[len(path) - params.order:])
