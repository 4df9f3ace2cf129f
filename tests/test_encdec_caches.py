"""The caches of an encoder-decoder in the loop: what the source gave stays, the rest follows the text."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from launch.mesh import make_mesh
from models.sharding import shardings
from models.source import Source
from specdec.drafters import Model
from specdec.engine import Params, run, step_once, to_result
from specdec.state import DecodeState
from specdec.warp import Sampling
from tests import toys
from tests.encdec_toys import (
  CONFIG,
  SOURCES,
  VOCAB,
  engine,
  request,
  source_of,
  stranger,
  target,
)

SAMPLED = Sampling.create(1.0, 0, 0.9)


def of_source(cache) -> list[np.ndarray]:
  return [np.asarray(x) for x in jax.tree.leaves(cache.cross)]


def test_what_was_read_of_the_source_never_changes():
  """Of target and draft, through rounds that accept and rounds that reject; it is what the encoder gives."""
  eng, params = engine(Model(VOCAB), 4), Params(target(), stranger())
  state = eng.start(params, request(100, SAMPLED))
  source = source_of(SOURCES)
  before = of_source(state.cache), of_source(state.draft_state.cache)
  for model, found in zip((target(), stranger()), before, strict=True):
    expected = model.init_cache(4, 8, source).cross
    same_values(found, jax.tree.leaves(expected))
  for _ in range(12):
    state = step_once(eng, params, state)
    for old, new in zip(before, (of_source(state.cache), of_source(state.draft_state.cache)), strict=True):
      for one, other in zip(old, new, strict=True):
        np.testing.assert_array_equal(one, other)


def same_values(found, expected):
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@jax.jit
def fresh(model, tokens_BL, source: Source):
  batch, slots = tokens_BL.shape
  cache = model.init_cache(batch, slots, source)
  position_BT = jnp.broadcast_to(jnp.arange(slots), (batch, slots))
  return model(tokens_BL, position_BT, cache.causal_mask(slots), cache, jnp.zeros((batch, 0), jnp.int32)).cache


def test_caches_after_random_rounds_equal_a_fresh_prefill():
  eng, params = engine(Model(VOCAB), 4), Params(target(), stranger())
  state = eng.start(params, request(150, SAMPLED))
  accepted = set()
  for _ in range(15):
    before_B = np.asarray(state.counters.accepted_B)
    state = step_once(eng, params, state)
    accepted |= set((np.asarray(state.counters.accepted_B) - before_B).tolist())
  assert len(accepted) > 2, 'rounds must differ'
  for model, cache in ((target(), state.cache), (stranger(), state.draft_state.cache)):
    expected = fresh(model, state.tokens_BL, source_of(SOURCES)).with_length(cache.length_B)
    toys.assert_same_live_slots(cache, expected)


@jax.jit
def poisoned(state: DecodeState) -> DecodeState:
  """Rubbish behind each source, in the cross caches and in what lookup searches."""

  def spoil(cache):
    dead_BS = jnp.arange(cache.cross.k[0].shape[2]) >= cache.cross.length_B[:, None]
    rubbish = lambda arrays: tuple(jnp.where(dead_BS[:, None, :, None], 1e4, x) for x in arrays)
    return cache.replace(cross=cache.cross.replace(k=rubbish(cache.cross.k), v=rubbish(cache.cross.v)))

  width = state.source.tokens_BS.shape[1]
  seen_BS = jnp.arange(width) < state.source.length_B[:, None]
  source = state.source.replace(tokens_BS=jnp.where(seen_BS, state.source.tokens_BS, state.newest_B[:, None]))
  draft_state = state.draft_state.replace(cache=spoil(state.draft_state.cache))
  return state.replace(cache=spoil(state.cache), draft_state=draft_state, source=source)


def test_what_lies_behind_a_source_is_never_seen():
  eng, params = engine(Model(VOCAB), 4), Params(target(), stranger())
  clean, _ = toys.decode(eng, params, request(30, SAMPLED))
  result = to_result(run(eng, params, poisoned(eng.start(params, request(30, SAMPLED)))))
  assert result.tokens == clean.tokens and result.metrics == clean.metrics


def test_on_a_mesh():
  """Heads over two devices: the same text, and the caches of the source split like the others."""
  eng, sampled = engine(Model(VOCAB), 4), request(40, SAMPLED)
  expected, _ = toys.decode(eng, Params(target(), stranger()), sampled)
  with jax.set_mesh(make_mesh(1, 2, jax.devices()[:2])):
    mesh = jax.sharding.get_mesh()
    params = Params(placed(target(), mesh), placed(stranger(), mesh))
    state = eng.start(params, sampled)
    assert state.cache.cross.k[0].addressable_shards[0].data.shape == (4, 2, 40, CONFIG.head_dim)
    assert to_result(run(eng, params, state)).tokens == expected.tokens


def placed(model, mesh):
  state = nnx.state(model)
  return nnx.merge(nnx.graphdef(model), jax.device_put(state, shardings(state, mesh)))
