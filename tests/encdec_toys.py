"""The toy encoder-decoders that tests share, and the plainest way to decode with one."""

from collections.abc import Sequence
import functools

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from models.config import EncDecConfig
from models.encdec import EncDec
from models.source import Source
from specdec.drafters import Drafter
from specdec.engine import Engine, Request
from specdec.warp import Sampling
from tests import toys

VOCAB = 64
CONFIG = EncDecConfig.tiny(vocab_size=VOCAB, attention_block=None)
SOURCE_CAPACITY = 40
SOURCES = (tuple(range(3, 40)), (5,), (9, 8, 7, 6, 5, 9, 8, 7), (1, 60) * 7)
STARTS = ((0,),) * 4
SEEDS = (7, 8, 9, 10)


def random_encdec(config: EncDecConfig, seed: int = 0) -> EncDec:
  """Weights wide enough that greedy text does not circle, that positions count, and that norms are uneven."""
  model = EncDec(config, nnx.Rngs(seed))
  rng = np.random.default_rng(seed)

  def widen(path: tuple, leaf: Array) -> Array:
    if leaf.ndim == 1:
      return leaf * jnp.asarray(1 + 0.2 * rng.standard_normal(leaf.shape), leaf.dtype)
    return leaf * (8 if 'distance_bias' in jax.tree_util.keystr(path) else 2)

  return jax.tree_util.tree_map_with_path(widen, model)


@functools.cache
def target() -> EncDec:
  return random_encdec(CONFIG)


@functools.cache
def draft() -> EncDec:
  """The target with one layer of its decoder."""
  return target().first_layers(1)


@functools.cache
def stranger() -> EncDec:
  """A draft with an encoder of its own, of other sizes."""
  return random_encdec(EncDecConfig.tiny(vocab_size=VOCAB, width=24, num_layers=1, num_encoder_layers=1, mlp='relu',
                                         tied_embedding=True, scaled_output=True), 1)


def engine(drafter: Drafter, gamma: int, rule: str = 'rejection', **changes) -> Engine:
  return toys.engine(drafter, gamma, rule, **({'capacity': 200, 'source_capacity': SOURCE_CAPACITY} | changes))


def request(max_new_tokens: int, sampling: Sampling = toys.GREEDY, rows: int = 4, **changes) -> Request:
  """The first rows; with one row the longest source, with four sources of different lengths."""
  fields = {'prompts': STARTS[:rows], 'seeds': SEEDS[:rows], 'sources': SOURCES[:rows]}
  return Request(**fields | {'sampling': sampling, 'max_new_tokens': max_new_tokens} | changes)


def source_of(texts: Sequence[Sequence[int]], width: int = SOURCE_CAPACITY, padding: int = 0) -> Source:
  tokens_BS = np.full((len(texts), width), padding, np.int32)
  for row, text in enumerate(texts):
    tokens_BS[row, :len(text)] = text
  return Source(jnp.asarray(tokens_BS), jnp.asarray([len(text) for text in texts], jnp.int32))


@jax.jit
def forward(model: EncDec, source: Source, tokens_BT: Array) -> Array:
  """[B, T, V]: logits of whole texts, with nothing cached."""
  return model.logits(model.over_rows(source, tokens_BT))


@functools.cache
def greedy_text(max_new_tokens: int = 40) -> list[list[int]]:
  """What the target says to `SOURCES`, by one uncached pass over everything for each token."""
  tokens_BT = np.zeros((len(SOURCES), max_new_tokens + 1), np.int32)
  for i in range(max_new_tokens):
    tokens_BT[:, i + 1] = np.argmax(forward(target(), source_of(SOURCES), tokens_BT)[:, i], axis=-1)
  return tokens_BT[:, 1:].tolist()
