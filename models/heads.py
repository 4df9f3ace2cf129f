"""Medusa heads (Cai et al., 2024): several tokens guessed from the target's last vector, all at once."""

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp

from models.config import MedusaConfig
from models.layers import init_weight, output_major
from models.sharding import constrain, gather_last


class Ids(nnx.Variable):
  """Token ids: part of heads, but nothing to train."""


class ResidualBlock(nnx.Module):
  """x + SiLU(W x + b); starts as x."""

  def __init__(self, config: MedusaConfig):
    self.residual = nnx.Param(jnp.zeros((config.width, config.width), config.dtype))
    self.residual_bias = nnx.Param(jnp.zeros((config.width,), config.dtype))

  def __call__(self, x_BTD: Array) -> Array:
    hidden_BTD = output_major('FD,BTD->FBT', self.residual[...], x_BTD) + self.residual_bias[...]
    return constrain(x_BTD + jax.nn.silu(hidden_BTD), 'BTD')


class MedusaHead(nnx.Module):
  """Residual blocks, and an LM head unless the target's is borrowed."""

  def __init__(self, config: MedusaConfig, rngs: nnx.Rngs):
    self.blocks = nnx.List(ResidualBlock(config) for _ in range(config.num_layers))
    self.head = nnx.data(None)
    if config.own_head:
      self.head = init_weight(rngs, (config.vocab_size, config.width), config.width, config.dtype)

  def __call__(self, x_BTD: Array) -> Array:
    for block in self.blocks:
      x_BTD = block(x_BTD)
    return x_BTD


class MedusaHeads(nnx.Module):
  """Head k (0, 1, ...) at the vector of token t guesses token t + 2 + k: the target's own head guesses t + 1.

  Each head keeps its own arrays, as the layers of a decoder do. The blocks do nothing at first, so that a new head
  that borrows the target's LM head says what the target says.
  """

  def __init__(self, config: MedusaConfig, rngs: nnx.Rngs):
    self.config = config
    self.heads = nnx.List(MedusaHead(config, rngs) for _ in range(config.num_heads))
    self.draft_ids = None if config.draft_vocab is None else Ids(jnp.arange(config.draft_vocab, dtype=jnp.int32))

  def logits_of(self, k: int, hidden_BTD: Array, lm_head_UD: Array | None = None) -> Array:
    """[B, T, U]: of one head alone; see `__call__`."""
    head = self.heads[k]
    return _logits(lm_head_UD if head.head is None else head.head[...], head(hidden_BTD.astype(self.config.dtype)))

  def __call__(self, hidden_BTD: Array, lm_head_UD: Array | None = None, rows: int = 1) -> Array:
    """[B, T, K, U]: logits of every head, float32; U is V, or fewer (`MedusaConfig.draft_vocab`).

    Args:
      hidden_BTD: the target's vectors before its LM head, after its final norm.
      lm_head_UD: the target's LM head, or its rows of the tokens that can be guessed, for heads that borrow it.
      rows: vectors that go through each product, at least: padded, since TPU lowers a single row badly.
    """
    batch, count = hidden_BTD.shape[:2]
    x_BTD = _padded(hidden_BTD.astype(self.config.dtype), rows)
    x_BTKD = jnp.stack([head(x_BTD)[:, :count] for head in self.heads], axis=2)
    with jax.named_scope('lm_head'):
      if not self.config.own_head:  # one pass over the weight for all heads
        x_BRD = x_BTKD.reshape(batch, -1, x_BTKD.shape[-1])
        return _logits(lm_head_UD, x_BRD, rows).reshape(*x_BTKD.shape[:3], -1)
      return jnp.stack([_logits(head.head[...], x_BTKD[:, :, k], rows) for k, head in enumerate(self.heads)], axis=2)


def _padded(x_BRD: Array, rows: int) -> Array:
  return jnp.pad(x_BRD, ((0, 0), (0, max(rows - x_BRD.shape[1], 0)), (0, 0)))


def _logits(lm_head_VD: Array, x_BRD: Array, rows: int = 1) -> Array:
  logits_BRV = output_major('VD,BRD->VBR', lm_head_VD, _padded(x_BRD, rows), preferred_element_type=jnp.float32)
  return gather_last(logits_BRV[:, :x_BRD.shape[1]])
