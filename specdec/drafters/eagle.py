"""EAGLE: a head that continues the target's features (Li et al., 2024 and 2025).

With n committed tokens the target has seen all but the newest: features 0..n-2 are known, each paired with the token
after it (`models.eagle`). What the head makes of the last pair guesses the feature of the newest token, and so the law
of the first drafted one. Deeper in a tree it goes on from its own guesses, whose keys and values lie in its cache
behind the committed pairs, and are overwritten: after a step, the pairs of what was committed are fed with the features
that the target really had there.
"""

import dataclasses
import functools

from flax import struct
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from models.eagle import EagleWeights
from models.errors import InputError
from models.kv_cache import KVCache
from models.source import Source
from specdec.draft import AnyDraft, Draft, TreeDraft
from specdec.drafters.children import KINDS, choose
from specdec.drafters.draft_vocab import DraftVocab
from specdec.drafters.dynamic_tree import Dynamic, grow, rerank
from specdec.drafters.protocol import Context
from specdec.features import Reads
from specdec.run_if import run_if
from specdec.tree import TreeSpec

SLOT_MULTIPLE = 128


@struct.dataclass
class EagleState:
  """State between steps.

  Attributes:
    cache: of the head: the committed pairs but for those of the last step. It holds true features only.
    features_BEF: the target's at the tokens that follow these pairs.
    count_B: how many of them are the last step's; the others mean nothing.
  """

  cache: KVCache
  features_BEF: Array
  count_B: Array


@struct.dataclass
class Growth:
  """A static tree that is being filled.

  Attributes:
    tokens_BM: of the nodes.
    laws_BRV: of the rows that have children; None for point masses.
    features_BRD: guessed at these rows.
    cache: of the head; its length is that of the committed pairs.
  """

  tokens_BM: Array
  laws_BRV: Array | None
  features_BRD: Array
  cache: KVCache


@dataclasses.dataclass(frozen=True)
class Eagle:
  """Lossless under every rule that takes its trees.

  A text of one token has no pair: its first step drafts nothing. Nor do rows that are longer than the head's context.

  Attributes:
    num_tokens: real tokens of the target.
    tree: static, or `Dynamic`; its nodes are γ.
    children: 'top' are the likeliest, as point masses; 'without' and 'with' are drawn, without or with replacement.
      Greedily all are the likeliest.
    version: of the head.
    rows: query rows per pass, at least (`specdec.padded`).
    longest: tokens that a step may accept, where they may be more than the levels of the tree (`Hybrid`).
  """

  num_tokens: int
  tree: TreeSpec | Dynamic
  children: str = 'top'
  version: int = 1
  rows: int = 1
  longest: int = 0

  name = 'eagle'

  def __post_init__(self):
    if self.children not in KINDS:
      raise InputError(f'children={self.children!r} is unknown: use one of {", ".join(KINDS)}')
    if isinstance(self.tree, Dynamic) and self.children != 'top':
      raise InputError(f"children={self.children!r} need a static tree: a drawn token must not be chosen by looking at "
                       "it; use 'top'")
    if not self.tree.num_nodes:
      raise InputError('the tree of eagle has no nodes: give it at least the path (0,)')

  @property
  def reads(self) -> Reads:
    return Reads.TAPS if self.version == 3 else Reads.HIDDEN

  @property
  def is_tree(self) -> bool:
    return isinstance(self.tree, Dynamic) or self.tree != TreeSpec.chain(self.tree.num_nodes)

  @property
  def draws(self) -> bool:
    return self.children != 'top'

  @property
  def num_features(self) -> int:
    """E: features that a step may bring."""
    return max(self.tree.levels, self.longest) + 1

  def levels(self, gamma: int) -> int:
    if gamma != self.tree.num_nodes:
      raise InputError(f'gamma={gamma} must be the {self.tree.num_nodes} nodes of the tree of eagle')
    return self.tree.levels

  def init(self, params: EagleWeights, tokens_BL: Array, length_B: Array, bucket: int,
           features_BTF: Array, source: Source | None) -> EagleState:
    """Feeds all pairs of the prompt but the last, which is pending like those of any step."""
    self._check(params, features_BTF)
    cache = params.head.init_cache(tokens_BL.shape[0], self._slots(tokens_BL.shape[1]))
    pairs = (tokens_BL.shape[0], bucket - 1)
    position_BT = jnp.broadcast_to(jnp.arange(bucket - 1), pairs)
    _, cache = params(tokens_BL[:, 1:bucket], params.head.fuse(features_BTF[:, :-1]), position_BT,
                      cache.causal_mask(bucket - 1), cache)
    last_B11 = jnp.maximum(length_B - 2, 0)[:, None, None]
    last_B1F = jnp.take_along_axis(features_BTF, last_B11, axis=1)
    features_BEF = jnp.pad(last_B1F, ((0, 0), (0, self.num_features - 1), (0, 0)))
    return EagleState(cache.with_length(last_B11[:, 0, 0]), features_BEF, jnp.minimum(length_B - 1, 1))

  def propose(self, params: EagleWeights, state: EagleState, context: Context,
              gamma: int) -> tuple[AnyDraft, EagleState]:
    self.levels(gamma)
    with jax.named_scope('committed'):
      root_BD, cache = self._feed_committed(params, state, context)
    count_B = self._counts(params, context)
    with jax.named_scope('grow'):
      grow_tree = self._grow_dynamic if isinstance(self.tree, Dynamic) else self._grow_static
      draft, cache = grow_tree(params, root_BD, cache, context, count_B)
    return draft, EagleState(cache, state.features_BEF, jnp.zeros_like(state.count_B))

  def observe(self, state: EagleState, length_B: Array, features_BEF: Array) -> EagleState:
    missing = self.num_features - features_BEF.shape[1]
    if missing < 0:
      raise ValueError(f'a step may accept {features_BEF.shape[1] - 1} tokens: eagle needs that as `longest`')
    features_BEF = jnp.pad(features_BEF, ((0, 0), (0, missing), (0, 0)))
    return EagleState(state.cache, features_BEF, length_B - 1 - state.cache.length_B)

  def _check(self, params: EagleWeights, features_BTF: Array):
    config, width = params.head.config, features_BTF.shape[-1]
    if config.version != self.version:
      raise ValueError(f'the drafter is made for version {self.version}, the head has version {config.version}')
    if config.features != width:
      raise InputError(f'the head of eagle wants features of width {config.features}, the target gives {width}: use '
                       'the head of this target, which for version 3 must have its `taps`')

  def _slots(self, slots: int) -> int:
    """The engine's, which leave room for γ tokens, and more if the head runs on more nodes than are kept."""
    num_fed = self.tree.num_fed if isinstance(self.tree, Dynamic) else 0
    return slots + -(-max(0, num_fed - self.tree.num_nodes) // SLOT_MULTIPLE) * SLOT_MULTIPLE

  def _counts(self, params: EagleWeights, context: Context) -> Array:
    """Of drafted tokens: a chain may be cut, a tree has all of its nodes or none."""
    fits_B = context.length_B + self.tree.levels - 2 <= params.head.config.decoder.max_positions
    count_B = jnp.where(context.live_B & fits_B & (context.length_B > 1), context.gamma_B, 0)
    return jnp.where(count_B > 0, self.tree.num_nodes, 0) if self.is_tree else count_B

  def _feed_committed(self, params: EagleWeights, state: EagleState, context: Context) -> tuple[Array, KVCache]:
    """The guess after the last pair [B, D], and the cache with all committed pairs.

    Features past the count go through too. Their slots come after those that count, and are not committed.
    """
    cache, width = state.cache, max(self.num_features, self.rows)
    position_BT = cache.length_B[:, None] + jnp.arange(width)
    next_BT = jnp.minimum(position_BT + 1, context.tokens_BL.shape[1] - 1)
    tokens_BT = jnp.take_along_axis(context.tokens_BL, next_BT, axis=1)
    features_BTF = jnp.pad(state.features_BEF, ((0, 0), (0, width - self.num_features), (0, 0)))
    guessed_BTD, cache = params(
        tokens_BT, params.head.fuse(features_BTF), position_BT, cache.causal_mask(width), cache)
    last_B11 = jnp.maximum(state.count_B - 1, 0)[:, None, None]
    root_BD = jnp.take_along_axis(guessed_BTD, last_B11, axis=1)[:, 0]
    return root_BD, cache.with_length(cache.length_B + state.count_B)

  def _feed_nodes(self, params: EagleWeights, cache: KVCache, tokens_BW: Array, features_BWD: Array, seen_BWF: Array,
                  depth: int, num_before: int) -> tuple[Array, KVCache]:
    """The guesses [B, W, D] at nodes of one depth, which go to slots behind `num_before` others.

    Args:
      params, cache: the cache's length is that of the committed pairs, and stays.
      tokens_BW: of the nodes.
      features_BWD: guessed at the rows above them.
      seen_BWF: which of the F nodes that have slots each one sees, itself included.
      depth: of the nodes.
      num_before: nodes in slots already.
    """
    width = tokens_BW.shape[1]
    more = max(self.rows - width, 0)
    pad = lambda x: jnp.pad(x, ((0, 0), (0, more)) + ((0, 0),) * (x.ndim - 2))
    committed_B = cache.length_B
    mask_BTS = cache.tree_mask(pad(seen_BWF))
    position_BT = jnp.broadcast_to(committed_B[:, None] + depth - 1, (committed_B.shape[0], width + more))
    guessed_BTD, cache = params(pad(tokens_BW), pad(features_BWD), position_BT, mask_BTS,
                                cache.with_length(committed_B + num_before))
    return guessed_BTD[:, :width], cache.with_length(committed_B)

  def _logits(self, params: EagleWeights, features_BRD: Array) -> Array:
    """[B, R, U]; padded to `rows` like every pass."""
    more = max(self.rows - features_BRD.shape[1], 0)
    return params.logits(jnp.pad(features_BRD, ((0, 0), (0, more), (0, 0))))[:, :features_BRD.shape[1]]

  def _vocab(self, params: EagleWeights) -> DraftVocab:
    ids = params.head.draft_ids
    return DraftVocab(None if ids is None else ids[...], self.num_tokens)

  def _grow_static(self, params: EagleWeights, root_BD: Array, cache: KVCache, context: Context,
                   count_B: Array) -> tuple[AnyDraft, KVCache]:
    tree, batch = self.tree, root_BD.shape[0]
    num_rows = len(tree.internal)
    growth = Growth(
        jnp.zeros((batch, tree.num_nodes), jnp.int32),
        jnp.zeros((batch, num_rows, self.num_tokens), jnp.float32) if self.draws else None,
        jnp.zeros((batch, num_rows, root_BD.shape[1]), root_BD.dtype).at[:, 0].set(root_BD), cache)
    deepest = jnp.max(count_B if not self.is_tree else jnp.where(count_B > 0, tree.levels, 0))
    for depth in range(tree.levels):
      growth = run_if(depth < deepest, functools.partial(self._level, params, context, depth), growth)
    return self._as_draft(growth, count_B), growth.cache

  def _level(self, params: EagleWeights, context: Context, depth: int, growth: Growth) -> Growth:
    """Runs the head on the rows of one depth that have children (row 0 has been fed), and gives them these."""
    rows_R = np.array([row for row in self.tree.internal if self.tree.depths[row] == depth])
    place = {row: index for index, row in enumerate(self.tree.internal)}
    first, last = place[rows_R[0]], place[rows_R[-1]] + 1
    cache, features_BRD = growth.cache, growth.features_BRD
    if depth > 0:
      above = np.array([place[self.tree.parents[row - 1]] for row in rows_R])
      seen_BWF = jnp.broadcast_to(self._seen(rows_R), (growth.tokens_BM.shape[0], len(rows_R), len(place) - 1))
      guessed_BWD, cache = self._feed_nodes(
          params, cache, growth.tokens_BM[:, rows_R - 1], features_BRD[:, above], seen_BWF, depth, first - 1)
      features_BRD = features_BRD.at[:, first:last].set(guessed_BWD)
    nodes = np.array(self.tree.nodes_at(depth + 1))
    ranks = np.array(self.tree.ranks)[nodes]
    parents = np.array([place[self.tree.parents[node]] for node in nodes]) - first
    chosen_BRK, laws_BRV = choose(
        self._logits(params, features_BRD[:, first:last]), int(ranks.max()) + 1, self.children, context, depth,
        self._vocab(params), soften=self.is_tree)
    tokens_BM = growth.tokens_BM.at[:, nodes[0]:nodes[-1] + 1].set(chosen_BRK[:, parents, ranks])
    if laws_BRV is not None:
      laws_BRV = growth.laws_BRV.at[:, first:last].set(laws_BRV)
    return Growth(tokens_BM, laws_BRV, features_BRD, cache)

  def _seen(self, rows_R: np.ndarray) -> np.ndarray:
    """[R, F]: which of the nodes that have children each row is, or hangs under."""
    fed = self.tree.internal[1:]
    seen = np.zeros((len(rows_R), len(fed)), bool)
    for index, row in enumerate(rows_R):
      while row > 0:
        seen[index, fed.index(row)] = True
        row = self.tree.parents[row - 1]
    return seen

  def _as_draft(self, growth: Growth, count_B: Array) -> AnyDraft:
    tree = self.tree
    if not self.is_tree:
      return Draft(growth.tokens_BM, growth.laws_BRV, count_B)
    parents_BM = jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), growth.tokens_BM.shape)
    return TreeDraft(
        growth.tokens_BM, parents_BM, growth.laws_BRV, count_B, tree.levels, tree.branching,
        internal=tree.internal if self.draws else (), num_drawn=tree.num_nodes if self.draws else 0,
        replacement=self.children == 'with')

  def _grow_dynamic(self, params: EagleWeights, root_BD: Array, cache: KVCache, context: Context,
                    count_B: Array) -> tuple[TreeDraft, KVCache]:
    tree, vocab = self.tree, self._vocab(params)

    def expand(index_BK, features_BKD, seen_BKF, depth, num_before, cache):
      guessed_BKD, cache = self._feed_nodes(
          params, cache, vocab.tokens(index_BK), features_BKD, seen_BKF, depth, num_before)
      return guessed_BKD, vocab.real(self._logits(params, guessed_BKD)), cache

    def grow_all(carry):
      _, _, cache = carry
      logits_BU = vocab.real(self._logits(params, root_BD[:, None]))[:, 0]
      candidates, cache = grow(tree, root_BD, logits_BU, expand, cache)
      index_BM, parents_BM = rerank(candidates, tree.nodes)
      return vocab.tokens(index_BM), parents_BM, cache

    zeros_BM = jnp.zeros((root_BD.shape[0], tree.nodes), jnp.int32)
    tokens_BM, parents_BM, cache = run_if(jnp.any(count_B > 0), grow_all, (zeros_BM, zeros_BM, cache))
    return TreeDraft(tokens_BM, parents_BM, None, count_B, tree.levels, tree.top_k), cache
