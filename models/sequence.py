"""A decoder for training: whole rows at once, no cache, its layers stacked so that one scan runs them.

The same function as `Decoder` on an empty cache. A scan compiles one layer instead of L, and with `remat` keeps one
layer's activations instead of all; for decoding it would be the worse choice (design: weight prefetch).
"""

from flax import nnx, struct
import jax
from jax import Array
import jax.numpy as jnp

from models.abstract import abstract_decoder
from models.attention import window_mask
from models.config import DecoderConfig
from models.decoder import Block, Decoder
from models.errors import InputError
from models.layers import rms_norm, rope_angles, sinusoids
from models.sharding import constrain


@struct.dataclass
class Vectors:
  """What a pass over rows returns.

  Attributes:
    hidden_BTD: the vectors before the LM head, after the final norm.
    taps_BTF: the outputs of the layers that the config taps, side by side; None where it taps none.
  """

  hidden_BTD: Array
  taps_BTF: Array | None = None


class Stack(nnx.Module):
  """A decoder whose layers are one `Block` with a leading dimension L on every parameter.

  Parameters have the names that they have in `Decoder`, but for the number of the layer.
  """

  def __init__(self, config: DecoderConfig, embed: nnx.Param, layers: Block, final_norm: nnx.Param,
               head: nnx.Param | None):
    self.config = config
    self.embed, self.layers, self.final_norm = embed, layers, final_norm
    self.head = nnx.data(head)

  @property
  def lm_head(self) -> Array:
    """[V, D]."""
    return (self.embed if self.head is None else self.head).get_value()

  def __call__(self, tokens_BT: Array, positions_BT: Array | None = None, segments_BT: Array | None = None,
               remat: bool = False) -> Vectors:
    """Runs whole rows.

    Args:
      tokens_BT: token ids.
      positions_BT: of each token in its document; None counts from 0.
      segments_BT: the document of each token: it sees the tokens up to its own that have the same number. None: each
        row is one document.
      remat: compute a layer's activations again in the backward pass instead of keeping them.
    """
    config, width = self.config, tokens_BT.shape[1]
    if positions_BT is None:
      positions_BT = jnp.broadcast_to(jnp.arange(width), tokens_BT.shape)
    mask_BTT = row_mask(positions_BT, segments_BT, config.window(0))
    angles = rope_angles(config, positions_BT) if config.positions == 'rope' else None
    distances_TD = sinusoids(width, config.width)[::-1] if config.positions == 'relative' else None

    def one(carry: tuple[Array, tuple[Array, ...]], numbered: tuple[Array, Block]) -> tuple[tuple, None]:
      (x_BTD, taps), (number, layer) = carry, numbered
      x_BTD = layer.over_row(x_BTD, mask_BTT, angles, distances_TD)
      taps = tuple(jnp.where(number == tap, x_BTD, kept) for tap, kept in zip(config.taps, taps, strict=True))
      return (x_BTD, taps), None

    x_BTD = constrain(self.embed[tokens_BT], 'BTD')
    start = x_BTD, tuple(jnp.zeros_like(x_BTD) for _ in config.taps)
    body = jax.checkpoint(one, prevent_cse=False) if remat else one
    (x_BTD, taps), _ = jax.lax.scan(body, start, (jnp.arange(config.num_layers), self.layers))
    hidden_BTD = rms_norm(x_BTD, self.final_norm[...], config.norm_eps)
    return Vectors(hidden_BTD, jnp.concatenate(taps, axis=-1) if taps else None)

  def logits(self, hidden_BTD: Array) -> Array:
    """The LM head on vectors after the final norm, [B, T, V] float32, V over the axis `model`."""
    with jax.named_scope('lm_head'):
      logits_BTV = jnp.einsum('BTD,VD->BTV', hidden_BTD, self.lm_head, preferred_element_type=jnp.float32)
      return constrain(logits_BTV, 'BTV')


def row_mask(positions_BT: Array, segments_BT: Array | None, window: int | None) -> Array:
  """[B, T, T]: token i sees the tokens 0..i of its own document, with a `window` the newest of them."""
  width = positions_BT.shape[1]
  mask_BTT = jnp.broadcast_to(jnp.tri(width, dtype=bool), (positions_BT.shape[0], width, width))
  if segments_BT is not None:
    mask_BTT &= segments_BT[:, :, None] == segments_BT[:, None, :]
  return window_mask(mask_BTT, positions_BT, positions_BT, window)


def stack(decoder: Decoder) -> Stack:
  """Copies the layers together, first layer first.

  Raises:
    InputError: see `check_alike`.
  """
  check_alike(decoder.config)
  leaves = zip(*(jax.tree.leaves(layer) for layer in decoder.layers), strict=True)
  stacked = jax.tree.unflatten(jax.tree.structure(decoder.layers[0]), [jnp.stack(same) for same in leaves])
  return Stack(decoder.config, decoder.embed, stacked, decoder.final_norm, decoder.head)


def unstack(stacked: Stack) -> Decoder:
  """The decoder again, which every other command runs; sharing what is not of a layer."""
  decoder = nnx.merge(*_graph_and_shapes(stacked.config))
  decoder.embed, decoder.final_norm, decoder.head = stacked.embed, stacked.final_norm, stacked.head
  decoder.layers = nnx.List(
      jax.tree.unflatten(jax.tree.structure(layer), [leaf[number] for leaf in jax.tree.leaves(stacked.layers)])
      for number, layer in enumerate(decoder.layers))
  return decoder


def check_alike(config: DecoderConfig) -> None:
  """That one program can run every layer.

  Raises:
    InputError: if windows differ between layers.
  """
  if len(set(config.windows)) > 1:
    raise InputError('layers with different windows cannot be trained: one scan runs them all, so give every layer the '
                     'same window, or none')


def _graph_and_shapes(config: DecoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
  graph, leaves = abstract_decoder(config)
  return graph, nnx.from_flat_state(leaves.items())
