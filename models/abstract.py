"""A model without values: its graph and the shapes of its parameters."""

from collections.abc import Callable

from flax import nnx

from models.config import DecoderConfig, EncDecConfig
from models.decoder import Decoder
from models.encdec import EncDec

AnyConfig = DecoderConfig | EncDecConfig
AnyModel = Decoder | EncDec


def new_model(config: AnyConfig, rngs: nnx.Rngs) -> AnyModel:
  """The model that the config is of, its weights random."""
  return EncDec(config, rngs) if isinstance(config, EncDecConfig) else Decoder(config, rngs)


def abstract_module(make: Callable[[], nnx.Module]) -> tuple[nnx.GraphDef, dict[tuple, nnx.Variable]]:
  """What `nnx.merge` wants, and parameter path -> shape and dtype, to be replaced by values."""
  graph, state = nnx.split(nnx.eval_shape(make))
  return graph, dict(nnx.to_flat_state(state))


def abstract_decoder(config: AnyConfig) -> tuple[nnx.GraphDef, dict[tuple, nnx.Variable]]:
  """`abstract_module` of a decoder, or of an encoder-decoder."""
  return abstract_module(lambda: new_model(config, nnx.Rngs(0)))
