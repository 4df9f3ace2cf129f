"""All that the speculative loop sees of a language model."""

from typing import Protocol

from flax import struct
from jax import Array

from models.kv_cache import KVCache
from models.source import Source


@struct.dataclass
class Output:
  """What one pass returns.

  Attributes:
    logits_BRV: float32, one row for each requested query row.
    hidden_BTD: the vectors before the LM head, after the final norm, of all T tokens.
    taps_BTF: the outputs of the layers that the model's config taps, side by side; None where it taps none.
    cache: with the T tokens written at the committed length; the length itself is unchanged.
  """

  logits_BRV: Array
  hidden_BTD: Array
  cache: KVCache
  taps_BTF: Array | None = None


class LanguageModel(Protocol):
  """One call serves prefill, decode and verify.

  Attributes:
    vocab_size: width of the logits, padding included.
    max_positions: longest sequence the model was made for.
    takes_trees: whether a token's slot may differ from its position in the text.
    has_encoder: whether it reads a source beside the text that it goes on with (`empty_cache`).
  """

  vocab_size: int
  max_positions: int
  takes_trees: bool
  has_encoder: bool

  def init_cache(self, batch: int, capacity: int) -> KVCache:
    """An empty cache for `batch` rows of `capacity` slots; with an encoder it takes the `Source` as well."""
    ...

  def __call__(self, tokens_BT: Array, positions_BT: Array, mask_BTS: Array, cache: KVCache,
               rows_BR: Array | None = None) -> Output:
    """Runs T tokens per row.

    Args:
      tokens_BT: token ids.
      positions_BT: positions in the text (not cache slots: in a tree they differ).
      mask_BTS: which cache slots each token sees, its own included.
      cache: the tokens go to slots length..length+T-1 of their row.
      rows_BR: which of the T rows need logits; None for all; R = 0 for none (prefill).
    """
    ...


def empty_cache(model: LanguageModel, batch: int, capacity: int, source: Source | None) -> KVCache:
  """The cache of rows that are yet to be read; a model without an encoder does not see the source."""
  return model.init_cache(batch, capacity, source) if model.has_encoder else model.init_cache(batch, capacity)
