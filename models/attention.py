"""Grouped-query attention over the cache, with rotary or relative positions."""

from collections.abc import Callable

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp

from models.config import DecoderConfig
from models.kv_cache import KVCache
from models.layers import init_weight, of_rows, output_major, rms_norm, rotate

MASKED = -1e30  # finite, so that a fully masked block gives exp(MASKED - max) = 0 and no NaN


def window_mask(mask_BTS: Array, positions_BT: Array, position_BS: Array, window: int | None) -> Array:
  """Keeps of `mask` the slots fewer than `window` positions back (Mistral's sliding window)."""
  if window is None:
    return mask_BTS
  return mask_BTS & (positions_BT[:, :, None] - position_BS[:, None, :] < window)


def attend(q_BKGTH: Array, k_BKSH: Array, v_BKSH: Array, bias_BKGTS: Array, num_live: Array,
           block: int | None) -> Array:
  """Softmax attention with float32 scores, [B, K, G, T, H] float32.

  With a `block`, slots are read block by block up to `num_live` (any row's last visible slot + 1) and
  combined by the streaming softmax (Milakov and Gimelshein, 2018); later blocks are never touched.

  Args:
    q_BKGTH: queries, already scaled by 1 / sqrt(H).
    k_BKSH, v_BKSH: the cache of one layer.
    bias_BKGTS: added to the scores: `MASKED` where hidden; sizes of 1 broadcast.
    num_live: scalar.
    block: slots per block; None reads all S at once.
  """
  capacity = k_BKSH.shape[2]
  shape = q_BKGTH.shape
  q_BKQH = q_BKGTH.reshape(*shape[:2], shape[2] * shape[3], shape[4])

  def score(k, bias):
    scores_BKQS = jnp.einsum('BKQH,BKSH->BKQS', q_BKQH, k, preferred_element_type=jnp.float32)
    return (scores_BKQS.reshape(*shape[:4], -1) + bias).reshape(scores_BKQS.shape)

  def mix(weights_BKQS, v):
    return jnp.einsum('BKQS,BKSH->BKQH', weights_BKQS.astype(v.dtype), v, preferred_element_type=jnp.float32)

  if block is None or capacity <= block:
    return mix(jax.nn.softmax(score(k_BKSH, bias_BKGTS), axis=-1), v_BKSH).reshape(shape)

  def one_block(index, carry):
    top, total, mixed = carry
    start = jnp.minimum(index * block, capacity - block)
    k, v, bias = (jax.lax.dynamic_slice_in_dim(x, start, block, axis) for x, axis in (
        (k_BKSH, 2), (v_BKSH, 2), (bias_BKGTS, 4)))
    fresh = start + jnp.arange(block) >= index * block  # the last block may overlap the one before
    scores = score(k, jnp.where(fresh, bias, MASKED))
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new_top[..., None])
    decay = jnp.exp(top - new_top)
    return (new_top, total * decay + jnp.sum(weights, axis=-1),
            mixed * decay[..., None] + mix(weights, v))

  rows = q_BKQH.shape[:3]
  init = (jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros(q_BKQH.shape, jnp.float32))
  _, total, mixed = jax.lax.fori_loop(0, (num_live + block - 1) // block, one_block, init)
  return (mixed / total[..., None]).reshape(shape)


def by_slot(by_distance_BKGTS: Array, start_B: Array | None) -> Array:
  """Turns scores of the distances S-1..0 into scores of the slots 0..S-1, for queries in the slots start..start+T-1.

  Without `start` queries begin in slot 0.

  Each query's scores move by its own number of slots: by the start of its row in one slice, and by its place in the
  row in log2(T) static shifts. A gather would do the same, one score at a time on a TPU. What moves in from the end
  belongs to slots after the query, which it does not see.
  """
  batch, width, capacity = by_distance_BKGTS.shape[0], *by_distance_BKGTS.shape[-2:]
  padded = jnp.pad(by_distance_BKGTS, ((0, 0),) * 4 + ((0, capacity),))
  if start_B is None:
    scores = padded[..., capacity - width:2 * capacity - 1]
  else:
    scores = jnp.stack([
        jax.lax.dynamic_slice_in_dim(padded[row], capacity - width - start_B[row], capacity + width - 1, axis=-1)
        for row in range(batch)])
  left_T1 = width - 1 - jnp.arange(width)[:, None]
  shift = 1 << (width - 1).bit_length()
  scores = jnp.pad(scores, ((0, 0),) * 4 + ((0, shift - width),))
  while shift > 1:
    shift //= 2
    scores = jnp.where(left_T1 & shift > 0, scores[..., shift:], scores[..., :-shift])
  return scores


class Attention(nnx.Module):
  """Queries, keys and values come from one fused weight, grouped by kv head: [K, G + 2, H, D].

  Of the G + 2 slices of a kv head the first G are its queries, then come its key and its value, so that
  sharding the K axis keeps every group whole. What they are made of may be wider than the output (`input_width`).
  """

  def __init__(self, config: DecoderConfig, layer: int, rngs: nnx.Rngs, input_width: int | None = None):
    self.config, self.layer = config, layer
    groups = (config.num_kv_heads, config.group_size + 2, config.head_dim)
    input_width = input_width or config.width
    self.qkv = init_weight(rngs, (*groups, input_width), input_width, config.dtype)
    mixed = config.num_heads * config.head_dim
    self.out = init_weight(rngs, (config.width, mixed), mixed, config.dtype)
    self.qkv_bias = nnx.Param(jnp.zeros(groups, config.dtype)) if config.qkv_bias else None
    self.q_norm = nnx.Param(jnp.ones(config.head_dim, config.dtype)) if config.qk_norm else None
    self.k_norm = nnx.Param(jnp.ones(config.head_dim, config.dtype)) if config.qk_norm else None
    if config.positions == 'relative':
      heads = (config.num_heads, config.head_dim)
      self.relative = init_weight(rngs, (config.width, *heads), config.width, config.dtype)
      self.content_bias = nnx.Param(jnp.zeros(heads, config.dtype))
      self.position_bias = nnx.Param(jnp.zeros(heads, config.dtype))

  def project_distances(self, distances_SD: Array) -> Array:
    """Keys of the distances, [N, S, H]: the same for every token, so computed once per cache."""
    return jnp.einsum('SD,DNH->NSH', distances_SD.astype(self.relative.dtype), self.relative[...])

  def __call__(self, x_BTD: Array, positions_BT: Array, mask_BTS: Array, angles, cache: KVCache,
               num_live: Array) -> tuple[Array, KVCache]:
    """Writes this layer's keys and values into the cache and attends; [B, T, D] and the cache."""
    q_BTKGH, k_BTKH, v_BTKH = self._project(x_BTD, angles, output_major)
    cache = cache.write_layer(self.layer, k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2))
    mask = window_mask(mask_BTS, positions_BT, cache.position_BS, self.config.window(self.layer))
    relative_NSH = cache.relative[self.layer] if cache.relative else None
    mixed_BTQ = self._mix(q_BTKGH, cache.k[self.layer], cache.v[self.layer], mask, relative_NSH, cache.length_B,
                          num_live, self.config.attention_block)
    return output_major('DQ,BTQ->DBT', self.out[...], mixed_BTQ), cache

  def over_row(self, x_BTD: Array, mask_BTT: Array, angles, relative_NTH: Array | None) -> Array:
    """Attention of the tokens of whole rows to each other, [B, T, D]: no cache, as in training."""
    q_BTKGH, k_BTKH, v_BTKH = self._project(x_BTD, angles, of_rows)
    mixed_BTQ = self._mix(q_BTKGH, k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2), mask_BTT, relative_NTH, None,
                          x_BTD.shape[1], None)
    return of_rows('DQ,BTQ->DBT', self.out[...], mixed_BTQ)

  def _project(self, x_BTD: Array, angles, product: Callable[..., Array]) -> tuple[Array, Array, Array]:
    """Queries [B, T, K, G, H], keys and values [B, T, K, H], normed and rotated."""
    config = self.config
    # The barrier in `output_major` also keeps XLA:TPU from re-laying the whole weight out in every layer.
    qkv = product('KXHD,BTD->KXHBT', self.qkv[...], x_BTD)
    if self.qkv_bias is not None:
      qkv = qkv + self.qkv_bias[...]
    q_BTKGH, k_BTKH, v_BTKH = qkv[:, :, :, :-2], qkv[:, :, :, -2], qkv[:, :, :, -1]
    if self.q_norm is not None:
      q_BTKGH = rms_norm(q_BTKGH, self.q_norm[...], config.norm_eps)
      k_BTKH = rms_norm(k_BTKH, self.k_norm[...], config.norm_eps)
    if config.positions == 'rope':
      cos, sin = angles  # [B, T, H/2]
      q_BTKGH = rotate(q_BTKGH, cos[:, :, None, None], sin[:, :, None, None])
      k_BTKH = rotate(k_BTKH, cos[:, :, None], sin[:, :, None])
    return q_BTKGH, k_BTKH, v_BTKH

  def _mix(self, q_BTKGH: Array, k_BKSH: Array, v_BKSH: Array, mask_BTS: Array, relative_NSH: Array | None,
           start_B: Array | None, num_live: Array | int, block: int | None) -> Array:
    """[B, T, N H]: what the queries, in the slots from `start` on, see."""
    config = self.config
    batch, width = q_BTKGH.shape[:2]
    bias = jnp.where(mask_BTS, 0.0, MASKED)[:, None, None]
    q_BKGTH = q_BTKGH.transpose(0, 2, 3, 1, 4) * (config.head_dim ** -0.5)
    if relative_NSH is not None:
      bias = bias + self._distance_scores(q_BKGTH, relative_NSH, start_B)
      q_BKGTH = q_BKGTH + self._per_group(self.content_bias) * (config.head_dim ** -0.5)
    mixed = attend(q_BKGTH, k_BKSH, v_BKSH, bias, num_live, block)
    return mixed.astype(q_BTKGH.dtype).transpose(0, 3, 1, 2, 4).reshape(batch, width, -1)

  def _per_group(self, bias: nnx.Param) -> Array:
    config = self.config
    return bias[...].reshape(config.num_kv_heads, config.group_size, 1, config.head_dim)

  def _distance_scores(self, q_BKGTH: Array, relative_NSH: Array, start_B: Array | None) -> Array:
    """Terms (b) and (d) of Dai et al. (2019), equation 5, [B, K, G, T, S]; a distance counts slots: no trees here."""
    config = self.config
    relative_KGSH = relative_NSH.reshape(config.num_kv_heads, config.group_size, -1, config.head_dim)
    query = q_BKGTH + self._per_group(self.position_bias) * (config.head_dim ** -0.5)
    by_distance = jnp.einsum('BKGTH,KGSH->BKGTS', query, relative_KGSH, preferred_element_type=jnp.float32)
    return by_slot(by_distance, start_B)
