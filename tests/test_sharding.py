"""The same text on one device and on eight, and the layout that makes it so."""

from collections.abc import Iterator
import contextlib
import functools

from flax import nnx
import jax
from jax.sharding import Mesh
import numpy as np
import pytest

from launch.mesh import make_mesh
from models.config import DecoderConfig
from models.decoder import Decoder
from models.errors import InputError
from models.sharding import kv_repeats, shardings, spec
from specdec.accept import RULES
from specdec.drafters import Empty, Lookup, Model, Simulated
from specdec.engine import Engine, Params, Request, Result, run, to_result
from specdec.warp import Sampling

VOCAB, CAPACITY = 64, 100
PROMPTS = ((1,), (2, 3), tuple(range(10, 27)), (5, 6, 7, 5, 6, 7), (9, 9), (8,), (4, 4, 4), (3,))
NAMES = ('none', 'lookup', 'self', 'coupled self', 'model', 'replicated model', 'coupled lookup', 'simulated')
SAMPLINGS = {'greedy': Sampling.create(0.0), 'sampled': Sampling.create(0.9, 0, 0.95)}
CONFIG = DecoderConfig.tiny(vocab_size=VOCAB, num_heads=8, num_kv_heads=8, attention_block=32)


@functools.cache
def model(seed: int = 0, **changes) -> Decoder:
  return Decoder(DecoderConfig.tiny(**({'vocab_size': VOCAB, 'num_heads': 8, 'num_kv_heads': 8} | changes)),
                 nnx.Rngs(seed))


@contextlib.contextmanager
def on_mesh(data: int, parts: int) -> Iterator[Mesh]:
  mesh = make_mesh(data, parts)
  with jax.set_mesh(mesh):
    yield mesh


def placed(decoder: Decoder, mesh: Mesh | None) -> Decoder:
  if mesh is None:
    return decoder
  state = nnx.state(decoder)
  return nnx.merge(nnx.graphdef(decoder), jax.device_put(state, shardings(state, mesh, decoder.config.split)))


def request(sampling: str, rows: int = 8) -> Request:
  return Request(PROMPTS[:rows], range(rows), SAMPLINGS[sampling], 24)


def cases(sampling: str, mesh: Mesh | None = None) -> dict[str, tuple[Engine, Params]]:
  """An engine and its parameters for every drafter."""
  target, draft, whole_draft = (placed(decoder, mesh) for decoder in (
      model(), model(seed=1, num_layers=1), model(seed=1, num_layers=1, split=False)))
  engine = lambda drafter, gamma, rule: Engine(drafter, RULES[rule], gamma, CAPACITY, VOCAB)
  text_BL = plain_text(sampling)
  return {
      'none': (engine(Empty(), 0, 'rejection'), Params(target)),
      'lookup': (engine(Lookup(), 3, 'rejection'), Params(target)),
      'self': (engine(Model(VOCAB), 3, 'rejection'), Params(target, target.first_layers(1))),
      'coupled self': (engine(Model(VOCAB, rows=8), 3, 'coupled'), Params(target, target.first_layers(1))),
      'model': (engine(Model(VOCAB), 3, 'rejection'), Params(target, draft)),
      'replicated model': (engine(Model(VOCAB), 3, 'rejection'), Params(target, whole_draft)),
      'coupled lookup': (engine(Lookup(), 3, 'coupled'), Params(target)),
      'simulated': (engine(Simulated(0.7), 3, 'rejection'), Params(target, text_BL)),
  }


@functools.cache
def plain_text(sampling: str) -> np.ndarray:
  """[B, L]: what the simulated drafter drafts."""
  engine = Engine(Empty(), RULES['rejection'], 0, CAPACITY, VOCAB)
  params = Params(model())
  return np.asarray(run(engine, params, engine.start(params, request(sampling))).tokens_BL)


def decode(engine: Engine, params: Params, req: Request) -> Result:
  return to_result(run(engine, params, engine.start(params, req)))


@functools.cache
def alone(name: str, sampling: str) -> list[list[int]]:
  return decode(*cases(sampling)[name], request(sampling)).tokens


@pytest.mark.parametrize('data, parts, names, sampling', [
    (2, 4, ('replicated model',), 'sampled'),
    *(pytest.param(data, parts, names, sampling, marks=pytest.mark.slow)
      for data, parts, names in ((1, 8, ('none', 'model')), (2, 4, NAMES[4:]), (8, 1, ('lookup', 'self')))
      for sampling in SAMPLINGS)])
def test_text_is_that_of_one_device(data, parts, names, sampling):
  expected = {name: alone(name, sampling) for name in names}
  with on_mesh(data, parts) as mesh:
    for name in names:
      engine, params = cases(sampling, mesh)[name]
      result = decode(engine, params, request(sampling))
      assert result.tokens == expected[name], name
      if name == 'simulated':
        accepted = [metrics.accepted for metrics in result.metrics]
        assert len(set(accepted)) > 1  # rows really part


@pytest.mark.parametrize('data, parts, name', [
    pytest.param(1, 8, 'model', marks=pytest.mark.slow), pytest.param(8, 1, 'self', marks=pytest.mark.slow),
    *(pytest.param(2, 4, name, marks=[pytest.mark.slow] * name.startswith('coupled')) for name in NAMES)])
def test_the_loop_keeps_its_layout(data, parts, name):
  """What goes in lies as what comes out, caches split and donated: nothing is moved between two calls."""
  with on_mesh(data, parts) as mesh:
    engine, params = cases('greedy', mesh)[name]
    state = engine.start(params, request('greedy'))
    compiled = run.lower(engine, params, state).compile()
    before, after = compiled.input_shardings[0][1], compiled.output_shardings
    same = jax.tree.map(lambda a, b, x: a.is_equivalent_to(b, x.ndim), before, after, state)
    assert all(jax.tree.leaves(same))
    shard = state.cache.k[0].addressable_shards[0].data.shape
    assert shard == (8 // data, 8 // parts, engine.slots, CONFIG.head_dim)
    num_bytes = 2 * 2 * np.prod(shard) * 4  # keys and values of two layers, and of the draft's one
    if draft_cache := getattr(state.draft_state, 'cache', None):
      of_draft = draft_cache.k[0].addressable_shards[0].data.shape
      assert of_draft == (8 // data, 8 if name == 'replicated model' else 8 // parts, *shard[2:])
      num_bytes += 2 * np.prod(of_draft) * 4
    assert compiled.memory_analysis().alias_size_in_bytes >= num_bytes


@pytest.mark.slow
@pytest.mark.parametrize('kv_heads', (2, 1))
def test_kv_heads_that_the_axis_does_not_divide(kv_heads):
  """Fault 49: they lie whole on every device, and the text is the same."""
  few = model(num_heads=4, num_kv_heads=kv_heads)
  engine = Engine(Lookup(), RULES['rejection'], 3, CAPACITY, VOCAB)
  for sampling in SAMPLINGS:
    expected = decode(engine, Params(few), request(sampling)).tokens
    with on_mesh(2, 4) as mesh:
      params = Params(placed(few, mesh))
      state = engine.start(params, request(sampling))
      assert state.cache.k[0].addressable_shards[0].data.shape[1] == kv_heads
      compiled = run.lower(engine, params, state).compile()
      before, after = compiled.input_shardings[0][1].cache, compiled.output_shardings.cache
      same = jax.tree.map(lambda a, b, x: a.is_equivalent_to(b, x.ndim), before, after, state.cache)
      assert all(jax.tree.leaves(same))
      assert to_result(run(engine, params, state)).tokens == expected


def test_rows_that_the_axis_does_not_divide():
  engine = Engine(Lookup(), RULES['rejection'], 3, CAPACITY, VOCAB)
  expected = decode(engine, Params(model()), request('sampled', rows=3)).tokens
  with on_mesh(2, 4) as mesh:
    assert decode(engine, Params(placed(model(), mesh)), request('sampled', rows=3)).tokens == expected


@pytest.mark.slow
def test_relative_positions_on_a_mesh():
  """Chinchilla's block: projected distances are split by heads, like the cache."""
  config = DecoderConfig.chinchilla(64, 8, 2, head_dim=8, vocab_size=VOCAB, dtype='float32', max_positions=256)
  chinchilla = Decoder(config, nnx.Rngs(1))
  engine = Engine(Model(VOCAB, rows=8), RULES['rejection'], 3, CAPACITY, VOCAB, rows=8)
  params = lambda decoder: Params(decoder, decoder.first_layers(1))
  expected = decode(engine, params(chinchilla), request('sampled')).tokens
  with on_mesh(1, 8) as mesh:
    on_eight = params(placed(chinchilla, mesh))
    assert decode(engine, on_eight, request('sampled')).tokens == expected
    relative = engine.start(on_eight, request('sampled')).cache.relative
    assert relative[0].addressable_shards[0].data.shape[0] == 1


def test_two_dimensions_over_one_axis():
  with pytest.raises(ValueError, match='twice'):
    spec('NF', (8, 8), make_mesh(1, 8))


def test_what_an_axis_does_not_divide():
  with pytest.raises(InputError, match=r'mesh\.model=8 does not divide the 60 of dimension V'):
    spec('VD', (60, 32), make_mesh(1, 8))


def test_mesh_of_another_size():
  with pytest.raises(InputError, match='must use all 8 devices'):
    make_mesh(2, 2)


@pytest.mark.parametrize('heads, kv_heads, parts, expected', (
    (64, 8, 16, 2), (8, 2, 4, 2), (8, 1, 4, 4), (64, 64, 16, 1), (9, 3, 8, 1)))
def test_kv_repeats(heads, kv_heads, parts, expected):
  assert kv_repeats(DecoderConfig.tiny(num_heads=heads, num_kv_heads=kv_heads), parts) == expected
