"""The toy models and engines that tests share, and the plainest way to decode.

A toy engine takes seconds to compile, and equal engines share their compiled programs, so tests keep to few of them.
Batch, vocabulary, widths and layers all differ in size.
"""

from collections.abc import Sequence
import dataclasses
import functools

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from models.config import DecoderConfig
from models.decoder import Decoder
from models.kv_cache import KVCache
from models.protocol import LanguageModel
from specdec.accept import RULES
from specdec.commit import Origin
from specdec.drafters import Drafter, Model
from specdec.engine import Engine, Params, Request, Result, run, slots_for, to_result
from specdec.metrics import Metrics
from specdec.state import DecodeState
from specdec.warp import Sampling

VOCAB = 64
CONFIG = DecoderConfig.tiny(vocab_size=VOCAB, max_positions=2048, attention_block=None)
CAPACITY = 600
SLOTS = slots_for(CAPACITY, 4, 1)
PROMPTS = ((1,), (2, 3), tuple(range(10, 27)))
SEEDS = (7, 8, 9)
GREEDY = Sampling.create(0.0)
SAMPLED = Sampling.create(1.0, 0, 0.95)


def random_toy(config: DecoderConfig, seed: int = 0) -> Decoder:
  """Gaussian weights, wide enough that greedy text does not circle and laws have a few likely tokens."""
  rng = np.random.default_rng(seed)
  abstract = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))

  def fill(leaf: jax.ShapeDtypeStruct) -> Array:
    if leaf.ndim == 1:
      return jnp.ones(leaf.shape, leaf.dtype)
    return jnp.asarray(rng.standard_normal(leaf.shape, np.float32) * 2 * config.width ** -0.5, leaf.dtype)

  return jax.tree.map(fill, abstract)


@functools.cache
def target() -> Decoder:
  return random_toy(CONFIG)


@functools.cache
def blocked() -> Decoder:
  """The target, its cache read in blocks much shorter than the texts, as loaded models read theirs."""
  return random_toy(dataclasses.replace(CONFIG, attention_block=16))


@functools.cache
def draft() -> Decoder:
  """One layer; the target's argmax a quarter of the time."""
  return target().first_layers(1)


@functools.cache
def opposite() -> Decoder:
  """The target with all logits negated: greedy, it proposes the target's least likely token."""
  model = target().first_layers(CONFIG.num_layers)
  model.head = nnx.Param(-target().head[...])
  return model


def engine(drafter: Drafter, gamma: int, rule: str = 'rejection', **changes) -> Engine:
  return Engine(drafter, RULES[rule], gamma, **({'capacity': CAPACITY, 'num_tokens': VOCAB} | changes))


def model_engine(gamma: int, rule: str = 'rejection', **changes) -> Engine:
  return engine(Model(VOCAB), gamma, rule, **changes)


def request(max_new_tokens: int, sampling: Sampling = GREEDY, prompts: Sequence[Sequence[int]] = PROMPTS,
            seeds: Sequence[int] = SEEDS, **changes) -> Request:
  return Request(prompts, seeds, sampling, max_new_tokens, **changes)


@jax.jit
def forward(model: LanguageModel, tokens_BT: Array) -> Array:
  """[B, T, V]: logits of one pass over the whole text, with nothing cached."""
  batch, width = tokens_BT.shape
  cache = model.init_cache(batch, width)
  position_BT = jnp.broadcast_to(jnp.arange(width), (batch, width))
  return model(tokens_BT, position_BT, cache.causal_mask(width), cache).logits_BRV


@functools.partial(jax.jit, static_argnames='bucket')
def _next_greedy(model: LanguageModel, tokens_BT: Array, length_B: Array, bucket: int) -> Array:
  logits_BTV = forward(model, tokens_BT[:, :bucket])
  return jnp.argmax(jnp.take_along_axis(logits_BTV, length_B[:, None, None] - 1, axis=1)[:, 0], axis=-1)


def plain_greedy(model: LanguageModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
  """Greedy text by one uncached pass over everything for each token: what all engines are measured by."""
  length_B = np.array([len(prompt) for prompt in prompts])
  bucket = -(-(length_B.max() + max_new_tokens) // 32) * 32
  tokens_BT = np.zeros((len(prompts), bucket), np.int32)
  for row, prompt in enumerate(prompts):
    tokens_BT[row, :len(prompt)] = prompt
  for i in range(max_new_tokens):
    tokens_BT[np.arange(len(prompts)), length_B + i] = _next_greedy(model, tokens_BT, length_B + i, bucket)
  return [row[start:start + max_new_tokens].tolist() for row, start in zip(tokens_BT, length_B, strict=True)]


@functools.cache
def greedy_text(max_new_tokens: int = 64) -> list[list[int]]:
  """What the target says after `PROMPTS`."""
  return plain_greedy(target(), PROMPTS, max_new_tokens)


def recorded(texts: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]] = PROMPTS, slots: int = SLOTS) -> Array:
  """[B, L]: prompts and texts as the simulated drafter wants them."""
  tokens_BL = np.zeros((len(prompts), slots), np.int32)
  for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
    tokens_BL[row, :len(prompt) + len(text)] = [*prompt, *text]
  return jnp.asarray(tokens_BL)


def checked(result: Result) -> Result:
  """The result, after what must hold of every one: counts agree with the tokens (faults 63 and 64)."""
  for tokens, origins, metrics in zip(result.tokens, result.origins, result.metrics, strict=True):
    assert metrics.emitted == len(tokens) == len(origins)
    assert metrics.accepted == origins.count(Origin.ACCEPTED) == sum(metrics.accepted_at)
    assert metrics.passes == sum(metrics.passes_by_width) <= metrics.emitted
    assert metrics.accepted <= metrics.tested <= metrics.drafted
    assert all(a <= t <= d for a, t, d in zip(metrics.accepted_at, metrics.tested_at, metrics.drafted_at, strict=True))
    assert Origin.PROMPT not in origins
  assert repr(result.total) == repr(Metrics.total(result.metrics)), 'an overlap that is NaN does not equal itself'
  return result


def decode(engine: Engine, params: Params, request: Request) -> tuple[Result, DecodeState]:
  """What `generate` returns, and the state behind it."""
  state = run(engine, params, engine.start(params, request))
  return checked(to_result(state)), state


@functools.partial(jax.jit, static_argnames='slots')
def fresh_cache(model: LanguageModel, tokens_BL: Array, length_B: Array, slots: int) -> KVCache:
  """The cache after one pass over the texts."""
  batch = tokens_BL.shape[0]
  cache = model.init_cache(batch, slots)
  position_BT = jnp.broadcast_to(jnp.arange(slots), (batch, slots))
  none_BR = jnp.zeros((batch, 0), jnp.int32)
  return model(tokens_BL[:, :slots], position_BT, cache.causal_mask(slots), cache, none_BR).cache.with_length(length_B)


def assert_same_live_slots(actual: KVCache, expected: KVCache):
  """Equal in all committed slots of each row to 1e-5 of the layer's largest entry; what lies beyond does not matter."""
  actual, expected = jax.device_get((actual, expected))
  np.testing.assert_array_equal(actual.length_B, expected.length_B)
  for row, length in enumerate(actual.length_B):
    np.testing.assert_array_equal(actual.position_BS[row, :length], np.arange(length))
    for mine, other in zip(actual.k + actual.v, expected.k + expected.v, strict=True):
      mine, other = mine[row, :, :length], other[row, :, :length]
      np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5 * np.abs(other).max(initial=0))
