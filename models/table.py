"""A language model that is a table, so that the exact law of every text is known."""

from flax import struct
from jax import Array
import jax.numpy as jnp
import numpy as np

from models.kv_cache import KVCache, write_rows
from models.protocol import Output


@struct.dataclass
class TableModel:
  """A `LanguageModel` whose next token depends on the last 0, 1 or 2 tokens only.

  Its cache holds token ids where others hold keys, and the context is read through mask and positions as attention
  reads it: a stale or hidden slot would show in the law. Tokens before the text count as id 0.

  Attributes:
    weights: [V], [V, V] or [V, V, V]: last axis the next token, the axis before it the newest token. The law is
      proportional; logits are the logarithms. Columns past the real vocabulary may hold anything: they are cut.
    max_positions: longest sequence.
  """

  weights: Array
  max_positions: int = struct.field(pytree_node=False, default=1 << 30)

  @classmethod
  def create(cls, law: np.ndarray, num_padding: int = 0, padding_weight: float = 1.0) -> 'TableModel':
    """From laws that sum to 1; `num_padding` ids beyond the real vocabulary get `padding_weight` in every context.

    Raises:
      ValueError: not a table of laws over 0, 1 or 2 context tokens.
    """
    law = np.asarray(law, np.float64)
    if not 1 <= law.ndim <= 3 or len(set(law.shape)) != 1:
      raise ValueError(f'a table of laws has shape [V], [V, V] or [V, V, V], got {law.shape}')
    if (law < 0).any() or not np.allclose(law.sum(axis=-1), 1, atol=1e-6):
      raise ValueError('laws must be non-negative and sum to 1')
    return cls(jnp.asarray(np.pad(law, (0, num_padding), constant_values=padding_weight), jnp.float32))

  @property
  def takes_trees(self) -> bool:
    return True

  @property
  def has_encoder(self) -> bool:
    return False

  @property
  def vocab_size(self) -> int:
    return self.weights.shape[-1]

  @property
  def order(self) -> int:
    """How many tokens of context the law looks at."""
    return self.weights.ndim - 1

  def init_cache(self, batch: int, capacity: int) -> KVCache:
    """One layer of token ids as keys, [B, 1, S, 1]; no values."""
    return KVCache.zeros(1, batch, 1, capacity, 1, jnp.int32).replace(v=())

  def __call__(self, tokens_BT: Array, positions_BT: Array, mask_BTS: Array, cache: KVCache,
               rows_BR: Array | None = None) -> Output:
    """See `LanguageModel.__call__`; the vectors before the LM head have width 0."""
    cache = cache.mark_positions(positions_BT)
    cache = cache.replace(k=(write_rows(cache.k[0], tokens_BT[:, None, :, None], cache.length_B),))
    positions_BR, mask_BRS = positions_BT, mask_BTS
    if rows_BR is not None:
      positions_BR = jnp.take_along_axis(positions_BT, rows_BR, axis=1)
      mask_BRS = jnp.take_along_axis(mask_BTS, rows_BR[..., None], axis=1)
    context = tuple(_token_at(cache, mask_BRS, positions_BR - back) for back in reversed(range(self.order)))
    weights_BRV = jnp.broadcast_to(self.weights[context], (*positions_BR.shape, self.vocab_size))
    return Output(logits_BRV=jnp.log(weights_BRV), hidden_BTD=jnp.zeros((*tokens_BT.shape, 0)), cache=cache)


def _token_at(cache: KVCache, mask_BRS: Array, positions_BR: Array) -> Array:
  """[B, R]: the id in the visible slot of that position, 0 if there is none."""
  there_BRS = mask_BRS & (cache.position_BS[:, None, :] == positions_BR[..., None])
  return jnp.sum(jnp.where(there_BRS, cache.k[0][:, :, :, 0], 0), axis=-1)
