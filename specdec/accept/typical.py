"""Typical acceptance: whatever the target finds likely enough is kept (Cai et al., 2024, Medusa, section 2.3.1)."""

import dataclasses

from jax import Array
import jax.numpy as jnp

from specdec import rng
from specdec.accept.matching import at_parent, deepest
from specdec.draft import AnyDraft, Draft, TreeDraft, Verdict
from specdec.tree import ancestors, rows_to
from specdec.wide import first_max


@dataclasses.dataclass(frozen=True)
class Typical:
  """Lossy: drafted tokens are kept where target > min(epsilon, delta exp(-H)), H the entropy of the target's law in
  nats, and the token after them is the target's likeliest. Text is the same whatever the seed; at temperature 0 this is
  greedy decoding.

  Attributes:
    epsilon, delta: the published values; the threshold turns where H = ln(delta / epsilon) = 1.2 nats.
  """

  epsilon: float = 0.09
  delta: float = 0.3

  name = 'typical'
  lossless = False
  draft_purpose = rng.Purpose.DRAFT
  trees, laws = True, False
  by_step = False

  def threshold(self, target_probs_BTV: Array) -> Array:
    """[B, T]"""
    entropy_BT = -jnp.sum(target_probs_BTV * jnp.log(target_probs_BTV + 1e-5), axis=-1)
    return jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy_BT))

  def __call__(self, row_key_B: Array, position_B: Array, draft: AnyDraft, target_probs_BTV: Array) -> Verdict:
    tree = TreeDraft.of_chain(draft) if isinstance(draft, Draft) else draft
    batch = target_probs_BTV.shape[0]
    prob_BM = target_probs_BTV[jnp.arange(batch)[:, None], tree.parents_BM, tree.tokens_BM]
    hit_BM = prob_BM > at_parent(self.threshold(target_probs_BTV), tree)
    if isinstance(draft, Draft):
      hit_BM &= jnp.arange(draft.width) < draft.count_B[:, None]
    log_BT = jnp.pad(jnp.log(jnp.maximum(prob_BM, 1e-30)), ((0, 0), (1, 0)))
    likelihood_BT = jnp.sum(jnp.where(ancestors(tree.parents_BM, tree.levels), log_BT[:, None], 0.0), axis=-1)
    row_B, num_accepted_B = deepest(hit_BM, tree, likelihood_BT)
    next_B = jnp.take_along_axis(first_max(target_probs_BTV)[1], row_B[:, None], axis=1)[:, 0]
    path_BP = rows_to(row_B, tree.parents_BM, tree.levels)
    return Verdict(num_accepted_B, next_B, None if isinstance(draft, Draft) else path_BP)
