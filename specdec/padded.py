"""A pass padded to a number of query rows that suits the hardware."""

from jax import Array
import jax.numpy as jnp

from models.kv_cache import KVCache
from models.protocol import LanguageModel, Output


def padded_pass(model: LanguageModel, tokens_BT: Array, cache: KVCache, rows: int, wanted_BR: Array | None = None,
                ancestors_BTT: Array | None = None) -> Output:
  """Runs T tokens per row at the committed length, as at least `rows` query rows.

  A TPU multiplies a single row off its matrix unit, with other rounding and some five times slower; a pass that is
  padded is padded to the end, LM head included. The padding writes slots past the T tokens, which stay uncommitted.

  Args:
    model: the model.
    tokens_BT: the next tokens of each row.
    cache: everything before them.
    rows: at least so many rows; 1 pads nothing.
    wanted_BR: which of the T tokens need logits; None for all, R = 0 for none.
    ancestors_BTT: of a tree, which of the T tokens each one sees, its own included; None is a chain.
  """
  width = tokens_BT.shape[1]
  total = max(width, rows)
  padded_BT = jnp.pad(tokens_BT, ((0, 0), (0, total - width)))
  if ancestors_BTT is None:
    position_BT = cache.length_B[:, None] + jnp.arange(total)
    mask_BTS = cache.causal_mask(total)
  else:
    own_TT = jnp.arange(total)[:, None] == jnp.arange(total)
    ancestors_BTT = jnp.pad(ancestors_BTT, ((0, 0), (0, total - width), (0, total - width))) | own_TT
    position_BT = cache.length_B[:, None] + jnp.sum(ancestors_BTT, axis=-1) - 1
    mask_BTS = cache.tree_mask(ancestors_BTT)
  if rows == 1 or (wanted_BR is not None and wanted_BR.shape[1] == 0):
    return model(padded_BT, position_BT, mask_BTS, cache, wanted_BR)
  output = model(padded_BT, position_BT, mask_BTS, cache)
  output = output.replace(hidden_BTD=output.hidden_BTD[:, :width],
                          taps_BTF=None if output.taps_BTF is None else output.taps_BTF[:, :width])
  if wanted_BR is None:
    return output.replace(logits_BRV=output.logits_BRV[:, :width])
  return output.replace(logits_BRV=jnp.take_along_axis(output.logits_BRV, wanted_BR[..., None], axis=1))
