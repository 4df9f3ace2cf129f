"""EAGLE heads (Li et al., 2024 and 2025): one decoder layer that continues the target's features instead of its tokens.

A pair is the feature at position i and the token at i + 1, and stands at position i. What the layer makes of the pairs
0..i guesses the feature at i + 1, from which an LM head guesses the token at i + 2.
"""

from flax import nnx, struct
import jax
from jax import Array
import jax.numpy as jnp

from models.attention import Attention
from models.config import EagleConfig
from models.decoder import Decoder
from models.heads import Ids
from models.kv_cache import KVCache
from models.layers import Mlp, init_weight, output_major, rms_norm, rope_angles
from models.sharding import constrain, gather_last, whole


class EagleLayer(nnx.Module):
  """A decoder layer whose attention reads vectors of its own, of `input_width`, beside the residual stream."""

  def __init__(self, config: EagleConfig, rngs: nnx.Rngs):
    decoder = config.decoder
    self.eps = decoder.norm_eps
    self.attn = Attention(decoder, 0, rngs, input_width=decoder.width * (2 if config.version == 3 else 1))
    self.mlp_norm = nnx.Param(jnp.ones(decoder.width, decoder.dtype))
    self.mlp = Mlp(decoder, rngs)

  def __call__(self, x_BTD: Array, input_BTX: Array, positions_BT: Array, mask_BTS: Array, angles, cache: KVCache,
               num_live: Array) -> tuple[Array, KVCache]:
    with jax.named_scope('attention'):
      mixed_BTD, cache = self.attn(input_BTX, positions_BT, mask_BTS, angles, cache, num_live)
    x_BTD = constrain(x_BTD + mixed_BTD, 'BTD')
    with jax.named_scope('mlp'):
      return constrain(x_BTD + self.mlp(rms_norm(x_BTD, self.mlp_norm[...], self.eps)), 'BTD'), cache


class EagleHead(nnx.Module):
  """Versions 1 (as well for EAGLE-2, whose trees differ and not its head) and 3.

  Version 1 projects embedding and feature together, puts the layer on top, without a norm before its attention, and
  borrows the target's LM head. Version 3 projects the outputs of several target layers to a feature; its attention
  reads embedding and feature side by side, each normed, and norm and LM head are its own.
  """

  def __init__(self, config: EagleConfig, rngs: nnx.Rngs):
    self.config = config
    decoder, width = config.decoder, config.decoder.width
    inputs = config.features if config.version == 3 else 2 * width
    self.fc = init_weight(rngs, (width, inputs), inputs, decoder.dtype)
    self.fc_bias = nnx.Param(jnp.zeros(width, decoder.dtype)) if config.fc_bias else None
    self.layer = EagleLayer(config, rngs)
    self.embed = init_weight(rngs, (decoder.vocab_size, width), width, decoder.dtype) if config.own_embedding else None
    own = lambda: nnx.Param(jnp.ones(width, decoder.dtype)) if config.version == 3 else None
    self.embed_norm, self.hidden_norm, self.final_norm = own(), own(), own()
    self.head = init_weight(rngs, (config.vocab, width), width, decoder.dtype) if config.version == 3 else None
    self.draft_ids = None if config.draft_vocab is None else Ids(jnp.arange(config.vocab, dtype=jnp.int32))

  def init_cache(self, batch: int, capacity: int) -> KVCache:
    decoder = self.config.decoder
    return KVCache.zeros(
        1, batch, decoder.num_kv_heads, capacity, decoder.head_dim, jnp.dtype(decoder.dtype), decoder.split)

  def fuse(self, features_BTF: Array) -> Array:
    """Features of the target as the head's own, [B, T, D]: its guesses have this form already."""
    features_BTF = features_BTF.astype(self.config.decoder.dtype)
    return self._project(features_BTF) if self.config.version == 3 else features_BTF

  def __call__(self, embedded_BTD: Array, features_BTD: Array, positions_BT: Array, mask_BTS: Array,
               cache: KVCache) -> tuple[Array, KVCache]:
    """Runs T pairs per row of the batch; the guessed features [B, T, D] and the cache, whose length stays.

    Args:
      embedded_BTD: the embedding of each pair's token.
      features_BTD: each pair's feature, fused.
      positions_BT: of the pairs.
      mask_BTS: which slots each pair sees, its own included.
      cache: the pairs go to slots length..length+T-1 of their row.
    """
    decoder = self.config.decoder
    embedded_BTD = embedded_BTD.astype(decoder.dtype)
    cache = cache.mark_positions(positions_BT)
    if self.config.version == 1:
      x_BTD = input_BTX = self._project(jnp.concatenate([embedded_BTD, features_BTD], axis=-1))
    else:
      norm = lambda x_BTD, scale: rms_norm(x_BTD, scale[...], decoder.norm_eps)
      x_BTD = features_BTD
      input_BTX = jnp.concatenate([norm(embedded_BTD, self.embed_norm), norm(x_BTD, self.hidden_norm)], axis=-1)
    num_live = jnp.max(cache.length_B) + positions_BT.shape[1]
    return self.layer(x_BTD, input_BTX, positions_BT, mask_BTS, rope_angles(decoder, positions_BT), cache, num_live)

  def logits(self, features_BRD: Array, lm_head_UD: Array) -> Array:
    """[B, R, U] float32: of the tokens that can be drafted, after what was guessed."""
    if self.config.version == 3:
      features_BRD = rms_norm(features_BRD, self.final_norm[...], self.config.decoder.norm_eps)
    with jax.named_scope('lm_head'):
      logits_BRU = output_major('VD,BRD->VBR', lm_head_UD, features_BRD, preferred_element_type=jnp.float32)
      return gather_last(logits_BRU) if self.config.decoder.split else whole(logits_BRU)

  def _project(self, x_BTX: Array) -> Array:
    product_BTD = output_major('FX,BTX->FBT', self.fc[...], x_BTX)
    if self.fc_bias is not None:
      product_BTD = product_BTD + self.fc_bias[...]
    return constrain(product_BTD, 'BTD')


@struct.dataclass
class EagleWeights:
  """A head and what it borrows.

  Attributes:
    head: the head.
    embed_VD: of the tokens.
    lm_head_UD: rows of the tokens that can be drafted.
  """

  head: EagleHead
  embed_VD: Array
  lm_head_UD: Array

  @classmethod
  def create(cls, head: EagleHead, target: Decoder) -> 'EagleWeights':
    """Borrows arrays as they are; of a reduced vocabulary only, the target's rows are copied."""
    embed_VD = (target.embed if head.embed is None else head.embed).get_value()
    if head.head is not None:
      return cls(head, embed_VD, head.head.get_value())
    if head.draft_ids is None:
      return cls(head, embed_VD, target.lm_head)
    rows_UD = jnp.take(target.lm_head, head.draft_ids[...], axis=0)
    return cls(head, embed_VD, constrain(rows_UD, 'VD', head.config.decoder.split))

  def __call__(self, tokens_BT: Array, features_BTD: Array, positions_BT: Array, mask_BTS: Array,
               cache: KVCache) -> tuple[Array, KVCache]:
    """See `EagleHead.__call__`."""
    embedded_BTD = constrain(self.embed_VD[tokens_BT], 'BTD')
    return self.head(embedded_BTD, features_BTD, positions_BT, mask_BTS, cache)

  def logits(self, features_BRD: Array) -> Array:
    """See `EagleHead.logits`."""
    return self.head.logits(features_BRD, self.lm_head_UD)
