"""Distillation of a draft model: its law is drawn to the target's at every token of the target's own answers.

Leviathan et al. (2023, corollary 3.6): what counts is Σ min(target, draft), which some of the `losses` are made of.
"""

import dataclasses

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp

from models.decoder import Decoder
from specdec.training.frozen import Frozen, observe, over_rows, rows_of_head
from specdec.training.guesses import UNASKED, agreement, counted, ranks, shifted
from specdec.training.labels import check_labels, labels_of
from specdec.training.losses import LOSSES, check_loss, masked_sum, overlap


@dataclasses.dataclass(frozen=True)
class DistillObjective:
  """The loss of a draft that reads every token, and may say U of them.

  `Frozen.rest` holds what it borrows of the target: embedding, and LM head if that is not trained.

  Attributes:
    graph: of the draft, a `Decoder` whose LM head has U rows.
    num_tokens: real tokens of the target.
    levels: guesses in a row of which agreement is logged.
    token_loss: one of `losses.LOSSES`.
    labels: one of `labels.LABELS`.
  """

  graph: nnx.GraphDef
  num_tokens: int
  levels: int = 4
  token_loss: str = 'kl'
  labels: str = 'law'

  def __post_init__(self):
    check_labels(self.labels)
    check_loss(self.token_loss)

  def loss(self, trainable: nnx.State, frozen: Frozen, batch: dict[str, Array],
           key: Array) -> tuple[Array, dict[str, Array]]:
    draft, ids_U = nnx.merge(self.graph, trainable, frozen.rest), frozen.ids_U
    seen = observe(frozen.target, batch, self.num_tokens)
    law_BTU = labels_of(self.labels, rows_of_head(frozen.target, ids_U, self.num_tokens), seen, batch, ids_U)
    logits_BTU, counts_BT = self._logits(draft, batch, ids_U), counted(batch, 1)
    total = masked_sum(LOSSES[self.token_loss](law_BTU, logits_BTU), counts_BT)
    found_BT = ranks(logits_BTU, shifted(batch['tokens'], 1), counts_BT, ids_U)
    counts_BTM = jnp.stack([counted(batch, 1 + m) for m in range(self.levels)], axis=-1)
    sums = agreement(_in_a_row(found_BT, counts_BTM), counts_BTM)
    if self.labels == 'law':
      sums['overlap'] = masked_sum(overlap(law_BTU, logits_BTU), counts_BT)
    return total, jax.lax.stop_gradient(sums) | {'count': jnp.sum(counts_BT, dtype=jnp.float32)}

  def ranks(self, trainable: nnx.State, frozen: Frozen, batch: dict[str, Array], levels: int) -> Array:
    """See `acceptance.Guesser`: the draft reads the newest token itself."""
    draft = nnx.merge(self.graph, trainable, frozen.rest)
    ids_U, counts_BTM = frozen.ids_U, jnp.stack([counted(batch, 1 + m) for m in range(levels)], axis=-1)
    found_BT = ranks(self._logits(draft, batch, ids_U), shifted(batch['tokens'], 1), counts_BTM[..., 0], ids_U)
    return _in_a_row(found_BT, counts_BTM)

  def _logits(self, draft: Decoder, batch: dict[str, Array], ids_U: Array | None) -> Array:
    with jax.named_scope('draft'):
      logits_BTU = over_rows(draft, batch).logits_BRV
    return logits_BTU if ids_U is not None else logits_BTU[..., :self.num_tokens]


def _in_a_row(ranks_BT: Array, counts_BTM: Array) -> Array:
  """[B, T, M]: a guess after forced tokens is the guess of the place that follows them."""
  rows = [shifted(ranks_BT, m) for m in range(counts_BTM.shape[-1])]
  return jnp.where(counts_BTM, jnp.stack(rows, axis=-1), UNASKED)
