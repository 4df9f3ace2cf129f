"""An encoder-decoder: T5 (Raffel et al., 2020), its v1.1 and Flan-T5, by config.

The encoder and the keys and values that the decoder's cross-attention sees of it run once per prompt (`init_cache`);
a decoding step runs the decoder alone. Scores are not scaled; positions are scores by distance, one table for all
layers of a side, so that a token's slot may differ from its position.
"""

from collections.abc import Callable
import dataclasses

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp

from models.attention import MASKED, attend
from models.config import EncDecConfig
from models.distance_bias import bias_at, bias_over_row, bucket_ranges
from models.kv_cache import CrossCache, KVCache
from models.layers import Mlp, init_weight, of_rows, output_major, rms_norm
from models.protocol import Output
from models.sharding import constrain, gather_last, whole
from models.source import Source

Product = Callable[..., Array]
READ_ONCE = ('encoder', 'source_kv')  # in the names of parameters that a prompt reads, and no step after it


class SelfAttention(nnx.Module):
  """Queries, keys and values of one fused weight [N, 3, H, D]."""

  def __init__(self, config: EncDecConfig, rngs: nnx.Rngs):
    self.qkv = init_weight(rngs, (config.num_heads, 3, config.head_dim, config.width), config.width, config.dtype)
    self.qkv[...] = self.qkv[...].at[:, 0].multiply(config.head_dim ** -0.5)  # in the place of scaled scores
    self.out = _output(config, rngs)

  def project(self, x_BTD: Array, product: Product) -> tuple[Array, Array, Array]:
    """Queries, keys and values, each [B, N, T, H]."""
    qkv = product('KXHD,BTD->KXHBT', self.qkv[...], x_BTD)
    query, key, value = (qkv[:, :, :, part].swapaxes(1, 2) for part in range(3))
    return query, key, value


class CrossAttention(nnx.Module):
  """Queries of the decoder, keys and values of what the encoder made: [N, H, D] and [N, 2, H, D]."""

  def __init__(self, config: EncDecConfig, rngs: nnx.Rngs):
    heads, size = config.num_heads, config.head_dim
    self.query = init_weight(rngs, (heads, size, config.width), config.width * size, config.dtype)
    self.source_kv = init_weight(rngs, (heads, 2, size, config.width), config.width, config.dtype)
    self.out = _output(config, rngs)

  def project_source(self, encoded_BSD: Array) -> tuple[Array, Array]:
    """Keys and values, [B, N, S, H]."""
    kv = of_rows('KXHD,BTD->KXHBT', self.source_kv[...], encoded_BSD)
    return kv[:, :, :, 0].swapaxes(1, 2), kv[:, :, :, 1].swapaxes(1, 2)

  def project(self, x_BTD: Array, product: Product) -> Array:
    """Queries, [B, N, T, H]."""
    return product('KHD,BTD->KHBT', self.query[...], x_BTD).swapaxes(1, 2)


def _output(config: EncDecConfig, rngs: nnx.Rngs) -> nnx.Param:
  mixed = config.num_heads * config.head_dim
  return init_weight(rngs, (config.width, mixed), mixed, config.dtype)


def _mix(attention: SelfAttention | CrossAttention, q_BKTH: Array, k_BKSH: Array, v_BKSH: Array, bias_BKGTS: Array,
         product: Product, num_live: Array | int, block: int | None) -> Array:
  """[B, T, D]: what the queries see, through the output weight."""
  mixed_BKTH = attend(q_BKTH[:, :, None], k_BKSH, v_BKSH, bias_BKGTS, num_live, block)[:, :, 0].astype(q_BKTH.dtype)
  mixed_BTKH = mixed_BKTH.swapaxes(1, 2)
  return product('DQ,BTQ->DBT', attention.out[...], mixed_BTKH.reshape(*mixed_BTKH.shape[:2], -1))


class EncoderBlock(nnx.Module):
  """Pre-norm attention and MLP."""

  def __init__(self, config: EncDecConfig, rngs: nnx.Rngs):
    self.eps = config.norm_eps
    self.attn_norm, self.attn = _norm(config), SelfAttention(config, rngs)
    self.mlp_norm, self.mlp = _norm(config), Mlp(config, rngs)

  def __call__(self, x_BSD: Array, bias_BKGSS: Array) -> Array:
    with jax.named_scope('attention'):
      q, k, v = self.attn.project(rms_norm(x_BSD, self.attn_norm[...], self.eps), of_rows)
      x_BSD = constrain(x_BSD + _mix(self.attn, q, k, v, bias_BKGSS, of_rows, k.shape[2], None), 'BTD')
    with jax.named_scope('mlp'):
      return constrain(x_BSD + self.mlp(rms_norm(x_BSD, self.mlp_norm[...], self.eps), of_rows), 'BTD')


class DecoderBlock(nnx.Module):
  """Pre-norm attention to the text, attention to the source, and MLP."""

  def __init__(self, config: EncDecConfig, rngs: nnx.Rngs):
    self.eps, self.block = config.norm_eps, config.attention_block
    self.attn_norm, self.attn = _norm(config), SelfAttention(config, rngs)
    self.cross_norm, self.cross = _norm(config), CrossAttention(config, rngs)
    self.mlp_norm, self.mlp = _norm(config), Mlp(config, rngs)

  def __call__(self, x_BTD: Array, bias_BKGTS: Array, source_bias: Array, layer: int, cache: KVCache,
               num_live: Array) -> tuple[Array, KVCache]:
    """Writes the keys and values of its tokens into the cache, and reads those of the source in it."""
    with jax.named_scope('attention'):
      q, k, v = self.attn.project(rms_norm(x_BTD, self.attn_norm[...], self.eps), output_major)
      cache = cache.write_layer(layer, k, v)
      mixed_BTD = _mix(self.attn, q, cache.k[layer], cache.v[layer], bias_BKGTS, output_major, num_live, self.block)
    cross = cache.cross.k[layer], cache.cross.v[layer], source_bias, output_major, jnp.max(cache.cross.length_B)
    return self._rest(x_BTD, mixed_BTD, *cross, self.block), cache

  def over_row(self, x_BTD: Array, bias_BKGTT: Array, source_bias: Array, encoded_BSD: Array) -> Array:
    """As `__call__` over whole rows, without a cache."""
    with jax.named_scope('attention'):
      q, k, v = self.attn.project(rms_norm(x_BTD, self.attn_norm[...], self.eps), of_rows)
      mixed_BTD = _mix(self.attn, q, k, v, bias_BKGTT, of_rows, k.shape[2], None)
      k_BKSH, v_BKSH = self.cross.project_source(encoded_BSD)
    return self._rest(x_BTD, mixed_BTD, k_BKSH, v_BKSH, source_bias, of_rows, encoded_BSD.shape[1], None)

  def _rest(self, x_BTD: Array, mixed_BTD: Array, k_BKSH: Array, v_BKSH: Array, source_bias: Array, product: Product,
            num_live: Array | int, block: int | None) -> Array:
    """The residual stream after all that follows attention to the text."""
    x_BTD = constrain(x_BTD + mixed_BTD, 'BTD')
    with jax.named_scope('attention'):
      q_BKTH = self.cross.project(rms_norm(x_BTD, self.cross_norm[...], self.eps), product)
      mixed_BTD = _mix(self.cross, q_BKTH, k_BKSH, v_BKSH, source_bias, product, num_live, block)
      x_BTD = constrain(x_BTD + mixed_BTD, 'BTD')
    with jax.named_scope('mlp'):
      return constrain(x_BTD + self.mlp(rms_norm(x_BTD, self.mlp_norm[...], self.eps), product), 'BTD')


def _norm(config: EncDecConfig) -> nnx.Param:
  return nnx.Param(jnp.ones(config.width, config.dtype))


class Tower(nnx.Module):
  """The layers of one side, with the scores by distance that they share."""

  def __init__(self, config: EncDecConfig, block: type[nnx.Module], num_layers: int, rngs: nnx.Rngs):
    self.layers = nnx.List(block(config, rngs) for _ in range(num_layers))
    self.distance_bias = init_weight(rngs, (config.num_heads, config.num_buckets), config.width, config.dtype)
    self.final_norm = _norm(config)


class EncDec(nnx.Module):
  """A `LanguageModel` with an encoder. Used as a tree of parameters: nothing in it changes when it is called."""

  has_encoder = True
  takes_trees = True

  def __init__(self, config: EncDecConfig, rngs: nnx.Rngs):
    self.config = config
    self.embed = init_weight(rngs, (config.vocab_size, config.width), 1, config.dtype)
    self.encoder = Tower(config, EncoderBlock, config.num_encoder_layers, rngs)
    self.decoder = Tower(config, DecoderBlock, config.num_layers, rngs)
    self.head = nnx.data(None)
    if not config.tied_embedding:
      self.head = init_weight(rngs, (config.vocab_size, config.width), config.width, config.dtype)

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  @property
  def max_positions(self) -> int:
    return self.config.max_positions

  @property
  def lm_head(self) -> Array:
    """[V, D]: what heads borrow of this model."""
    return (self.embed if self.head is None else self.head).get_value()

  def encode(self, source: Source) -> Array:
    """[B, S, D]: the vectors of the source; those past its length mean nothing."""
    with jax.named_scope('encoder'):
      width = source.tokens_BS.shape[1]
      bias_KSS = bias_over_row(self.encoder.distance_bias[...], width, self._ranges(bidirectional=True))
      bias_BKGSS = bias_KSS[None, :, None] + source_bias(source.length_B, width)
      x_BSD = constrain(self.embed[source.tokens_BS], 'BTD')
      for layer in self.encoder.layers:
        x_BSD = layer(x_BSD, bias_BKGSS)
      return rms_norm(x_BSD, self.encoder.final_norm[...], self.config.norm_eps)

  def init_cache(self, batch: int, capacity: int, source: Source) -> KVCache:
    """An empty cache for texts that go with these sources, which the encoder reads here and nowhere else."""
    config, encoded_BSD = self.config, self.encode(source)
    cache = KVCache.zeros(
        config.num_layers, batch, config.num_heads, capacity, config.head_dim, jnp.dtype(config.dtype), config.split)
    with jax.named_scope('cross'):
      k, v = zip(*(layer.cross.project_source(encoded_BSD) for layer in self.decoder.layers), strict=True)
    return cache.replace(cross=CrossCache(k, v, source.length_B)).laid_out()

  def __call__(self, tokens_BT: Array, positions_BT: Array, mask_BTS: Array, cache: KVCache,
               rows_BR: Array | None = None) -> Output:
    """See `LanguageModel.__call__`. Logits are float32."""
    cache = cache.mark_positions(positions_BT)
    num_live = jnp.max(cache.length_B) + tokens_BT.shape[1]
    distance_BTS = positions_BT[:, :, None] - cache.position_BS[:, None]
    bias_BKTS = bias_at(self.decoder.distance_bias[...], distance_BTS, self._ranges(bidirectional=False))
    bias_BKGTS = jnp.where(mask_BTS[:, None], bias_BKTS, MASKED)[:, :, None]
    unseen = source_bias(cache.cross.length_B, cache.cross.k[0].shape[2])
    x_BTD = constrain(self.embed[tokens_BT], 'BTD')
    for number, layer in enumerate(self.decoder.layers):
      x_BTD, cache = layer(x_BTD, bias_BKGTS, unseen, number, cache, num_live)
    hidden_BTD = self._to_head(x_BTD)
    rows_BRD = hidden_BTD
    if rows_BR is not None:
      rows_BRD = jnp.take_along_axis(hidden_BTD, rows_BR[..., None], axis=1)
    return Output(logits_BRV=self.logits(rows_BRD), hidden_BTD=hidden_BTD, cache=cache)

  def over_rows(self, source: Source, tokens_BT: Array) -> Array:
    """[B, T, D]: the vectors before the LM head of whole texts, without a cache, as in training."""
    width = tokens_BT.shape[1]
    bias_KTT = bias_over_row(self.decoder.distance_bias[...], width, self._ranges(bidirectional=False))
    bias_BKGTT = jnp.where(jnp.tri(width, dtype=bool), bias_KTT, MASKED)[None, :, None]
    encoded_BSD, unseen = self.encode(source), source_bias(source.length_B, source.tokens_BS.shape[1])
    x_BTD = constrain(self.embed[tokens_BT], 'BTD')
    for layer in self.decoder.layers:
      x_BTD = layer.over_row(x_BTD, bias_BKGTT, unseen, encoded_BSD)
    return self._to_head(x_BTD)

  def logits(self, hidden_BRD: Array) -> Array:
    """The LM head on the vectors that `__call__` returns, [B, R, V] float32."""
    with jax.named_scope('lm_head'):
      logits_BRV = output_major('VD,BRD->VBR', self.lm_head, hidden_BRD, preferred_element_type=jnp.float32)
      return gather_last(logits_BRV) if self.config.split else whole(logits_BRV)

  def with_head(self, head_UD: Array) -> 'EncDec':
    """This model with another LM head, which may speak of fewer tokens, sharing every other array."""
    other = self.first_layers(self.config.num_layers)
    other.head = nnx.Param(head_UD)
    return other

  def first_layers(self, num_layers: int) -> 'EncDec':
    """The first layers of the decoder with all else of this model, sharing every array."""
    config = dataclasses.replace(self.config, num_layers=num_layers)
    graph = nnx.eval_shape(lambda: EncDec(config, nnx.Rngs(0)))
    graph.embed, graph.head, graph.encoder = self.embed, self.head, self.encoder
    graph.decoder.distance_bias, graph.decoder.final_norm = self.decoder.distance_bias, self.decoder.final_norm
    graph.decoder.layers = nnx.List(self.decoder.layers[:num_layers])
    return graph

  def _ranges(self, bidirectional: bool):
    return bucket_ranges(self.config.num_buckets, self.config.max_distance, bidirectional)

  def _to_head(self, x_BTD: Array) -> Array:
    hidden_BTD = rms_norm(x_BTD, self.decoder.final_norm[...], self.config.norm_eps)
    return hidden_BTD * self.config.width ** -0.5 if self.config.scaled_output else hidden_BTD


def source_bias(length_B: Array, width: int) -> Array:
  """[B, 1, 1, 1, S]: hides the slots past the length of each source."""
  return jnp.where(jnp.arange(width) < length_B[:, None], 0.0, MASKED)[:, None, None, None]
