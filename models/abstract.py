"""A model without values: its graph and the shapes of its parameters."""

from flax import nnx

from models.config import DecoderConfig
from models.decoder import Decoder


def abstract_decoder(config: DecoderConfig) -> tuple[nnx.GraphDef, dict[tuple, nnx.Param]]:
  """What `nnx.merge` wants, and parameter path -> shape and dtype, to be replaced by values."""
  graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
  return graph, dict(nnx.to_flat_state(state))
