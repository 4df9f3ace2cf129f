"""Decoders with random weights, made by numpy: far quicker than compiling an initialiser for each shape."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from models.config import DecoderConfig
from models.decoder import Decoder


def random_decoder(config: DecoderConfig, seed: int = 0) -> Decoder:
  rng = np.random.default_rng(seed)
  abstract = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
  return jax.tree.map(
      lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32) * 0.2, leaf.dtype), abstract)
