"""Models with random weights, made where they will lie: no device and no host ever holds more than its part."""

from collections.abc import Callable

from flax import nnx
import jax
from jax.sharding import Mesh

from models.abstract import AnyConfig, AnyModel, abstract_decoder, new_model
from models.kv_heads import repeat_kv_heads, with_repeats
from models.sharding import shardings


def random_decoder(config: AnyConfig, seed: int, mesh: Mesh | None = None) -> AnyModel:
  """The same model on every mesh, except that kv heads are repeated where that spreads them evenly."""
  if mesh is None:
    return new_model(config, nnx.Rngs(seed))
  placed, times = with_repeats(config, mesh)
  graph, leaves = abstract_decoder(placed)

  def make() -> nnx.State:
    state = nnx.state(new_model(config, nnx.Rngs(seed)))
    return nnx.from_flat_state([(path, leaf.replace(repeat_kv_heads(path, leaf.get_value(), times)))
                                for path, leaf in nnx.to_flat_state(state)])

  places = shardings(nnx.from_flat_state(leaves.items()), mesh, config.split)
  return nnx.merge(graph, jax.jit(make, out_shardings=places)())


def new_module(make: Callable[[], nnx.Module], mesh: Mesh | None = None) -> nnx.Module:
  """What `make` builds, such as heads: every parameter by itself where the table of `models.sharding` puts it."""
  if mesh is None:
    return make()
  graph, abstract = nnx.split(nnx.eval_shape(make))
  return nnx.merge(graph, jax.jit(lambda: nnx.state(make()), out_shardings=shardings(abstract, mesh))())
