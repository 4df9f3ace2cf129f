"""A model without values: its graph and the shapes of its parameters."""

from collections.abc import Callable

from flax import nnx

from models.config import DecoderConfig
from models.decoder import Decoder


def abstract_module(make: Callable[[], nnx.Module]) -> tuple[nnx.GraphDef, dict[tuple, nnx.Variable]]:
  """What `nnx.merge` wants, and parameter path -> shape and dtype, to be replaced by values."""
  graph, state = nnx.split(nnx.eval_shape(make))
  return graph, dict(nnx.to_flat_state(state))


def abstract_decoder(config: DecoderConfig) -> tuple[nnx.GraphDef, dict[tuple, nnx.Variable]]:
  """`abstract_module` of a decoder."""
  return abstract_module(lambda: Decoder(config, nnx.Rngs(0)))
