"""Medusa: a static tree filled with the likeliest tokens of heads on the target's last vector (Cai et al., 2024)."""

import dataclasses

from flax import struct
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from models.errors import InputError
from models.heads import MedusaHeads
from models.source import Source
from specdec.draft import TreeDraft
from specdec.drafters.draft_vocab import DraftVocab
from specdec.drafters.protocol import Context
from specdec.features import Reads
from specdec.tree import TreeSpec


@struct.dataclass
class MedusaParams:
  """What the device holds.

  Attributes:
    heads: whose width and vocabulary are the target's.
    lm_head_UD: the target's, of the tokens that the heads may guess; None if the heads have their own.
  """

  heads: MedusaHeads
  lm_head_UD: Array | None = None


@struct.dataclass
class MedusaState:
  """State between steps.

  Attributes:
    hidden_BD: the target's vector at the newest token but one, the last that the target has seen; a text of one token
      has none.
    length_B: of the text.
  """

  hidden_BD: Array
  length_B: Array


@dataclasses.dataclass(frozen=True)
class Medusa:
  """Point masses, so that every lossless rule keeps the target's law at every temperature.

  The vector belongs to the token before the newest, whose successor the target has chosen already. So head 0 guesses
  what follows the newest token: depth d of the tree belongs to head d - 1, and the r-th child of a row is its r-th
  choice. All rows of a depth have the same children. A text of one token is decoded plainly for one step.

  Attributes:
    tree: its nodes are γ.
    num_tokens: ids of the real vocabulary; padding logits beyond are cut before the best are chosen.
    rows: query rows that the heads run, at least (`specdec.padded`).
  """

  tree: TreeSpec
  num_tokens: int
  rows: int = 1

  name = 'medusa'
  reads = Reads.HIDDEN
  is_tree, draws = True, False

  def __post_init__(self):
    if not self.tree.num_nodes:
      raise InputError('the tree of medusa has no nodes: give it at least the path (0,)')
    if self.tree.branching > self.num_tokens:
      node = self.tree.ranks.index(self.num_tokens)
      raise InputError(f'node {self.tree.paths[node]} of the tree wants choice {self.num_tokens} of a head, which '
                       f'chooses among {self.num_tokens} tokens: use a narrower tree')

  def check(self, num_heads: int, draft_vocab: int | None = None):
    """Refuses a tree that is too deep or too wide for the heads.

    Raises:
      InputError: says how deep it is and how many heads there are, or which node wants a token too many.
    """
    if draft_vocab is not None and self.tree.branching > draft_vocab:
      node = self.tree.ranks.index(draft_vocab)
      raise InputError(f'node {self.tree.paths[node]} of the tree wants choice {draft_vocab} of a head, which chooses '
                       f'among {draft_vocab} tokens: use a narrower tree')
    if self.tree.levels > num_heads:
      node = self.tree.nodes_at(num_heads + 1)[0]
      raise InputError(f'the tree has depth {self.tree.levels} at node {self.tree.paths[node]}, and there are '
                       f'{num_heads} medusa heads: use a tree of at most {num_heads} levels, or more heads')

  def levels(self, gamma: int) -> int:
    if gamma != self.tree.num_nodes:
      raise InputError(f'gamma={gamma} must be the {self.tree.num_nodes} nodes of the tree')
    return self.tree.levels

  def init(self, params: MedusaParams, tokens_BL: Array, length_B: Array, bucket: int,
           features_BTF: Array, source: Source | None) -> MedusaState:
    self.check(params.heads.config.num_heads, params.heads.config.draft_vocab)
    return MedusaState(_row_at(features_BTF, length_B - 2), length_B)

  def propose(self, params: MedusaParams, state: MedusaState, context: Context,
              gamma: int) -> tuple[TreeDraft, MedusaState]:
    levels, branching = self.levels(gamma), self.tree.branching
    ids = params.heads.draft_ids
    vocab = DraftVocab(None if ids is None else ids[...], self.num_tokens)
    with jax.named_scope('heads'):
      logits_BKU = vocab.real(params.heads(state.hidden_BD[:, None], params.lm_head_UD, self.rows)[:, 0])
    with jax.named_scope('candidates'):
      _, best_BKR = jax.lax.top_k(logits_BKU[:, :levels], branching)
      tokens_BM = vocab.tokens(best_BKR)[:, np.array(self.tree.depths[1:]) - 1, np.array(self.tree.ranks)]
    parents_BM = jnp.broadcast_to(jnp.asarray(self.tree.parents, jnp.int32), tokens_BM.shape)
    count_B = jnp.where((context.gamma_B > 0) & (state.length_B > 1), gamma, 0)
    return TreeDraft(tokens_BM, parents_BM, None, count_B, levels, branching), state

  def observe(self, state: MedusaState, length_B: Array, features_BEF: Array) -> MedusaState:
    """Takes the vector of the last committed token but one, which a step that committed n tokens has in row n - 1."""
    added_B = length_B - state.length_B
    hidden_BD = jnp.where((added_B > 0)[:, None], _row_at(features_BEF, added_B - 1), state.hidden_BD)
    return MedusaState(hidden_BD, length_B)


def _row_at(x_BTD: Array, index_B: Array) -> Array:
  """[B, D]: one vector per row; the first where there is no such."""
  return jnp.take_along_axis(x_BTD, jnp.maximum(index_B, 0)[:, None, None], axis=1)[:, 0]
