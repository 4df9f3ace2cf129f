"""Norms, positions and MLPs: the pieces of a decoder block that have no cache."""

import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from models.config import DecoderConfig, EncDecConfig, RopeScaling

ACTIVATIONS = {'swiglu': jax.nn.silu, 'geglu': jax.nn.gelu, 'gelu': jax.nn.gelu, 'relu': jax.nn.relu}
GATED = ('swiglu', 'geglu')


def rms_norm(x, scale_D, eps: float):
  """Zhang and Sennrich (2019), over the last axis, computed in float32, returned in the dtype of `x`."""
  x32 = x.astype(jnp.float32)
  x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
  return (x32 * scale_D.astype(jnp.float32)).astype(x.dtype)


def linear_scaling(frequency: np.ndarray, scaling: RopeScaling) -> np.ndarray:
  return frequency / scaling.factor


def llama3_scaling(frequency: np.ndarray, scaling: RopeScaling) -> np.ndarray:
  """Long waves are stretched by `factor`, short ones kept, a linear blend between."""
  rotations = scaling.original_max_positions * frequency / (2 * np.pi)
  blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
  blend = np.clip(blend, 0.0, 1.0)
  return frequency * (blend + (1 - blend) / scaling.factor)


def yarn_scaling(frequency: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
  """Peng et al. (2023), section 3.2: interpolate slow dimensions, keep fast ones, ramp between."""
  head_dim = 2 * len(frequency)

  def dimension(rotations):
    return head_dim * math.log(scaling.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

  low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  if low == high:
    high += 0.001
  ramp = np.clip((np.arange(len(frequency)) - low) / (high - low), 0.0, 1.0)
  return frequency / scaling.factor * ramp + frequency * (1 - ramp)


def rope_frequencies(config: DecoderConfig) -> tuple[np.ndarray, float]:
  """Angular frequencies [H/2] in radians per position, and the factor on cos and sin (1 except for yarn)."""
  frequency = config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
  scaling = config.rope_scaling
  if scaling is None:
    return frequency, 1.0
  if scaling.kind == 'linear':
    return linear_scaling(frequency, scaling), 1.0
  if scaling.kind == 'llama3':
    return llama3_scaling(frequency, scaling), 1.0
  factor = scaling.attention_factor
  if factor is None:
    factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
  return yarn_scaling(frequency, scaling, config.rope_theta), factor


def rope_angles(config: DecoderConfig, positions_BT):
  """cos and sin [B, T, H/2] in float32. Angles are computed, never looked up: no table to run off."""
  frequency, factor = rope_frequencies(config)
  angle = positions_BT[..., None].astype(jnp.float32) * jnp.asarray(frequency, jnp.float32)
  return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x, cos, sin):
  """Rotary embedding in the half-split layout (dimension i pairs with i + H/2); `x` [..., H]."""
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x.dtype)


def sinusoids(num_distances: int, width: int):
  """Sinusoidal embedding of distances 0..num_distances-1, [distance, D] float32 (Vaswani et al., 2017)."""
  frequency = 10_000.0 ** -(jnp.arange(0, width, 2, dtype=jnp.float32) / width)
  angle = jnp.arange(num_distances, dtype=jnp.float32)[:, None] * frequency
  return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def init_weight(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: str):
  """Gaussian with variance 1 / fan_in; the barrier keeps XLA from rounding another way when it compiles this."""
  normal = jax.lax.optimization_barrier(jax.random.normal(rngs.params(), shape, jnp.float32).astype(dtype))
  return nnx.Param(normal * (fan_in ** -0.5))


def output_major(equation: str, weight, x, **options):
  """einsum of a weight stored with its outputs first and `x` [B, T, ...]; `equation` puts B and T last, here they lead.

  Every weight is stored like that, as checkpoints store it. The product is formed as W x^T and turned round behind a
  barrier: XLA's CPU backend works on eight rows of x at a time that way, so that a pass over 8 rows of SmolLM2 costs
  1.5 passes over one, and one over 5 no less.
  """
  product = jax.lax.optimization_barrier(jnp.einsum(equation, weight, x, **options))
  return jnp.moveaxis(product, (-2, -1), (0, 1))


def of_rows(equation: str, weight, x):
  """What `output_major` computes, for so many rows that the compiler should choose how: in training."""
  operands, _, result = equation.partition('->')
  return jnp.einsum(f'{operands}->BT{result.removesuffix("BT")}', weight, x)


class Mlp(nnx.Module):
  """SwiGLU or GEGLU (Shazeer, 2020) with gate and up fused, or the plain MLP of Chinchilla (GELU) or T5 v1.0 (ReLU)."""

  def __init__(self, config: DecoderConfig | EncDecConfig, rngs: nnx.Rngs):
    width, ff = config.width, config.ff_width
    self.kind = config.mlp
    up_shape = (2, ff, width) if self.kind in GATED else (ff, width)
    self.up = init_weight(rngs, up_shape, width, config.dtype)
    self.down = init_weight(rngs, (width, ff), ff, config.dtype)

  def __call__(self, x_BTD, product=output_major):
    activate = ACTIVATIONS[self.kind]
    if self.kind in GATED:
      both = product('CFD,BTD->CFBT', self.up[...], x_BTD)
      hidden_BTF = activate(both[:, :, 0]) * both[:, :, 1]
    else:
      hidden_BTF = activate(product('FD,BTD->FBT', self.up[...], x_BTD))
    return product('DF,BTF->DBT', self.down[...], hidden_BTF)
