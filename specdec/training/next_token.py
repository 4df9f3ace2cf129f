"""Pretraining: the cross-entropy of the next token."""

import dataclasses

import jax
from jax import Array
import jax.numpy as jnp

from models.sequence import Stack
from specdec.training.packing import predicted_slots


@dataclasses.dataclass(frozen=True)
class NextToken:
  """An `Objective` over packed rows (`specdec.training.packing`); the trainable tree is a `Stack`, nothing is frozen.

  Attributes:
    remat: see `Stack.__call__`.
  """

  remat: bool = False

  def loss(self, trainable: Stack, frozen: None, batch: dict[str, Array], key: Array) -> tuple[Array, dict[str, Array]]:
    """Nats, and how many tokens were the likeliest ('accuracy')."""
    tokens_BT, segments_BT, positions_BT = (batch[name] for name in ('tokens', 'segments', 'positions'))
    hidden_BTD = trainable(tokens_BT[:, :-1], positions_BT[:, :-1], segments_BT[:, :-1], self.remat).hidden_BTD
    logits_BTV, next_BT = trainable.logits(hidden_BTD), tokens_BT[:, 1:]
    counts_BT = predicted_slots(segments_BT).astype(jnp.float32)
    right_BT = jnp.take_along_axis(logits_BTV, next_BT[..., None], axis=-1)[..., 0]
    nats_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - right_BT
    best_BT = right_BT >= jnp.max(logits_BTV, axis=-1)
    return jnp.sum(counts_BT * nats_BT), {'count': jnp.sum(counts_BT), 'accuracy': jnp.sum(counts_BT * best_BT)}
