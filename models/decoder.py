"""The decoder: the Llama family and Chinchilla / Gopher, by config."""

from collections.abc import Callable
import dataclasses

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp

from models.attention import Attention
from models.config import DecoderConfig
from models.kv_cache import KVCache
from models.layers import Mlp, init_weight, of_rows, output_major, rms_norm, rope_angles, sinusoids
from models.protocol import Output
from models.sharding import constrain, gather_last, whole


class Block(nnx.Module):
  """Pre-norm attention and MLP."""

  def __init__(self, config: DecoderConfig, layer: int, rngs: nnx.Rngs):
    self.eps = config.norm_eps
    self.attn_norm = nnx.Param(jnp.ones(config.width, config.dtype))
    self.attn = Attention(config, layer, rngs)
    self.mlp_norm = nnx.Param(jnp.ones(config.width, config.dtype))
    self.mlp = Mlp(config, rngs)

  def __call__(self, x_BTD: Array, positions_BT: Array, mask_BTS: Array, angles, cache: KVCache,
               num_live: Array) -> tuple[Array, KVCache]:
    with jax.named_scope('attention'):
      mixed_BTD, cache = self.attn(
          rms_norm(x_BTD, self.attn_norm[...], self.eps), positions_BT, mask_BTS, angles, cache, num_live)
    return self._add(x_BTD, mixed_BTD, output_major), cache

  def over_row(self, x_BTD: Array, mask_BTT: Array, angles, distances_TD: Array | None) -> Array:
    """As `__call__` over whole rows, without a cache; with relative positions `distances_TD` is their embedding."""
    with jax.named_scope('attention'):
      relative_NTH = None if distances_TD is None else self.attn.project_distances(distances_TD)
      mixed_BTD = self.attn.over_row(rms_norm(x_BTD, self.attn_norm[...], self.eps), mask_BTT, angles, relative_NTH)
    return self._add(x_BTD, mixed_BTD, of_rows)

  def _add(self, x_BTD: Array, mixed_BTD: Array, product: Callable[..., Array]) -> Array:
    """The residual stream after attention and MLP."""
    x_BTD = constrain(x_BTD + mixed_BTD, 'BTD')
    with jax.named_scope('mlp'):
      return constrain(x_BTD + self.mlp(rms_norm(x_BTD, self.mlp_norm[...], self.eps), product), 'BTD')


class Decoder(nnx.Module):
  """A `LanguageModel`. Used as a tree of parameters: nothing in it changes when it is called."""

  has_encoder = False

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
    self.config = config
    self.embed = init_weight(rngs, (config.vocab_size, config.width), config.width, config.dtype)
    self.layers = nnx.List(Block(config, layer, rngs) for layer in range(config.num_layers))
    self.final_norm = nnx.Param(jnp.ones(config.width, config.dtype))
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
  def takes_trees(self) -> bool:
    return self.config.positions == 'rope'  # relative distances count slots

  @property
  def lm_head(self) -> Array:
    """[V, D]: what heads borrow of this model."""
    return (self.embed if self.head is None else self.head).get_value()

  def init_cache(self, batch: int, capacity: int) -> KVCache:
    """An empty cache; with relative positions it holds the projected distances (Dai et al., 2019)."""
    config = self.config
    cache = KVCache.zeros(
        config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim, jnp.dtype(config.dtype), config.split)
    if config.positions == 'rope':
      return cache
    distances_SD = sinusoids(capacity, config.width)[::-1]
    return cache.replace(
        relative=tuple(layer.attn.project_distances(distances_SD) for layer in self.layers)).laid_out()

  def __call__(self, tokens_BT: Array, positions_BT: Array, mask_BTS: Array, cache: KVCache,
               rows_BR: Array | None = None) -> Output:
    """See `LanguageModel.__call__`. Logits are float32."""
    width = tokens_BT.shape[1]
    cache = cache.mark_positions(positions_BT)
    angles = rope_angles(self.config, positions_BT) if self.config.positions == 'rope' else None
    num_live = jnp.max(cache.length_B) + width
    x_BTD = constrain(self.embed[tokens_BT], 'BTD')
    taps = []
    for number, layer in enumerate(self.layers):
      x_BTD, cache = layer(x_BTD, positions_BT, mask_BTS, angles, cache, num_live)
      if number in self.config.taps:
        taps.append(x_BTD)
    hidden_BTD = rms_norm(x_BTD, self.final_norm[...], self.config.norm_eps)
    rows_BRD = hidden_BTD
    if rows_BR is not None:
      rows_BRD = jnp.take_along_axis(hidden_BTD, rows_BR[..., None], axis=1)
    taps_BTF = jnp.concatenate(taps, axis=-1) if taps else None
    return Output(logits_BRV=self.logits(rows_BRD), hidden_BTD=hidden_BTD, cache=cache, taps_BTF=taps_BTF)

  def logits(self, hidden_BRD: Array) -> Array:
    """The LM head on vectors after the final norm, [B, R, V] float32."""
    with jax.named_scope('lm_head'):
      logits_BRV = output_major('VD,BRD->VBR', self.lm_head, hidden_BRD, preferred_element_type=jnp.float32)
      if not self.config.split:
        return whole(logits_BRV)
      return gather_last(logits_BRV)  # one gather here, instead of a reduction over devices in every halving of top-p

  def with_head(self, head_UD: Array) -> 'Decoder':
    """This model with another LM head, which may speak of fewer tokens, sharing every other array."""
    other = self.first_layers(self.config.num_layers)
    other.head = nnx.Param(head_UD)
    return other

  def first_layers(self, num_layers: int) -> 'Decoder':
    """The first layers with this model's embedding, final norm and head, sharing every array."""
    config = dataclasses.replace(self.config, num_layers=num_layers, windows=self.config.windows[:num_layers], taps=())
    graph = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
    graph.embed, graph.final_norm, graph.head = self.embed, self.final_norm, self.head
    graph.layers = nnx.List(self.layers[:num_layers])
    return graph
