"""The compiled programs: what recompiles, what is copied, what is donated, in which precision, what the host sees."""

from collections.abc import Iterator
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.table import TableModel
from specdec.drafters import Empty, Lookup, Model, Simulated
from specdec.engine import Engine, Params, prefill, run, step
from specdec.stops import stop_table
from specdec.warp import Sampling
from tests.toys import (
  CONFIG,
  GREEDY,
  PROMPTS,
  VOCAB,
  blocked,
  draft,
  engine,
  greedy_text,
  model_engine,
  random_toy,
  recorded,
  request,
  target,
)

pytestmark = pytest.mark.usefixtures('optimized')
DRAFTERS = {
    'none': (Empty(), 0, lambda: None),
    'lookup': (Lookup(), 4, lambda: None),
    'simulated': (Simulated(0.7), 4, lambda: recorded(greedy_text())),
    'draft': (Model(VOCAB), 4, draft),
    'draft, in blocks': (Model(VOCAB), 4, lambda: blocked().first_layers(1)),
}
IN_PLACE = {'parameter', 'get-tuple-element', 'bitcast', 'dynamic-update-slice', 'fusion'}


def quick(*names: str) -> list:
  """All drafters, those of other names for the long run."""
  return [pytest.param(name, marks=[pytest.mark.slow] * (name not in names)) for name in DRAFTERS]


def case(name: str) -> tuple[Engine, Params]:
  drafter, gamma, draft_params = DRAFTERS[name]
  return engine(drafter, gamma), Params(blocked() if 'blocks' in name else target(), draft_params())


@functools.cache
def compiled(name: str) -> jax.stages.Compiled:
  """The whole loop."""
  eng, params = case(name)
  return run.lower(eng, params, eng.start(params, request(30))).compile()


def instructions(program: str) -> Iterator[tuple[str, int, str]]:
  """Operation, elements of the result and text of each line of a compiled program, fused ones included."""
  for line in program.splitlines():
    found = re.search(r'= \w+\[([\d,]*)\]\S* ([a-z\-]+)\(', line)
    if found:
      yield found[2], int(np.prod([int(size) for size in found[1].split(',') if size])), line.strip()


@pytest.mark.parametrize('name', quick('none', 'lookup', 'draft'))
def test_loop_copies_no_cache_and_no_weight(name):
  """Fault 46: whatever has the size of one of them is read where it lies, or updated there by a slice."""
  eng, params = case(name)
  cache = jax.eval_shape(lambda: eng.start(params, request(30))).cache
  sizes = {leaf.size for leaf in jax.tree.leaves((target(), cache.k)) if leaf.ndim > 1}
  copies = [line for operation, size, line in instructions(compiled(name).as_text())
            if size in sizes and operation not in IN_PLACE]
  assert not copies, '\n'.join(copies)


def test_copies_would_be_seen():
  sizes = {size for operation, size, _ in instructions(jax.jit(lambda x: x.T + 1).lower(
      jnp.ones((3, 5))).compile().as_text()) if operation not in IN_PLACE}
  assert 15 in sizes


@pytest.mark.parametrize('name', quick('none', 'lookup', 'draft'))
def test_loop_does_not_talk_to_the_host(name):
  """No callback, no feed, and with all transfers forbidden it runs."""
  operations = {operation for operation, _, line in instructions(compiled(name).as_text())}
  assert not operations & {'infeed', 'outfeed', 'send', 'recv'}
  assert 'callback' not in compiled(name).as_text()
  eng, params = case(name)
  state = eng.start(params, request(30))
  with jax.transfer_guard('disallow'):
    state = compiled(name)(params, state)
  assert int(state.length_B[0]) == len(PROMPTS[0]) + 30


def test_forbidden_transfers_would_be_seen():
  with jax.transfer_guard('disallow'), pytest.raises(RuntimeError, match='Disallowed'):
    jax.jit(lambda x: x + 1)(np.ones(3))


@pytest.mark.parametrize('name', quick('none', 'lookup', 'draft'))
def test_state_is_donated_and_nothing_else(name):
  """Fault 47: no unusable donation (warnings are errors), the old state is gone, weights and request stay."""
  eng, params = case(name)
  req = request(30)
  state = eng.start(params, req)
  before = state.tokens_BL
  compiled(name)(params, state)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.cache, state.draft_state)))
  with pytest.raises(RuntimeError, match='deleted'):
    np.asarray(before)
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, req.sampling)))
  assert 'input_output_alias' in compiled(name).as_text()


@pytest.mark.slow
def test_a_model_as_its_own_draft_has_two_caches():
  """Fault 47: weights are shared, caches are not."""
  eng, params = model_engine(4), Params(target(), target())
  state = eng.start(params, request(8))
  caches = [leaf.unsafe_buffer_pointer() for cache in (state.cache, state.draft_state.cache)
            for leaf in jax.tree.leaves(cache)]
  assert len(set(caches)) == len(caches)
  assert eng.generate(params, request(8)).tokens == [text[:8] for text in greedy_text()]
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_few_programs_serve_all_lengths(count_compiles):
  """Fault 44: 20 prompts of 5 to 60 tokens: per γ one loop and one program for each of two buckets."""
  params = Params(TableModel.create(np.random.default_rng(0).dirichlet(np.ones(VOCAB), VOCAB)))
  prompts = [np.arange(size) % VOCAB for size in np.linspace(5, 60, 20).astype(int)]

  def all_prompts():
    for gamma in (1, 3):
      for prompt in prompts:
        engine(Lookup(), gamma, capacity=100).generate(params, request(5, prompts=[prompt], seeds=[0]))

  with count_compiles() as first:
    all_prompts()
  assert 0 < first.total <= 2 * 3
  with count_compiles() as second:
    all_prompts()
  assert second.total == 0


@pytest.mark.parametrize('name', quick('none', 'draft'))
def test_values_compile_nothing(name, count_compiles):
  """Fault 44: temperature, top-k, top-p, seeds, EOS, lengths, budgets, stop strings of one size."""
  eng, params = case(name)
  pieces = [bytes([65 + token]) for token in range(VOCAB)]

  def generate(*, count=20, sampling=GREEDY, stop='ABC', **changes):
    return eng.generate(params, request(count, sampling, stop_table=stop_table([stop], pieces), **changes)).tokens

  texts = [generate()]
  Sampling.create(0.5, 3, 0.5)  # making the scalars compiles something of its own
  with count_compiles() as count:
    for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.5)):
      texts.append(generate(sampling=Sampling.create(temperature, top_k, top_p)))
    texts.append(generate(sampling=Sampling.create(1.0), seeds=(1, 2, 3)))
    texts.append(generate(eos_ids=[texts[0][0][3]]))
    texts.append(generate(prompts=((5, 6, 7), (8,), range(30))))
    texts += [generate(count=count) for count in (1, 3, 50)]
    texts.append(generate(stop=b''.join(pieces[token] for token in texts[0][0][2:5]).decode()))
  assert count.total == 0
  assert len({str(text) for text in texts}) == len(texts), 'every value must have an effect'


def equations(jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
  """Those of a traced program and of all programs inside it."""
  for equation in jaxpr.eqns:
    yield equation
    for value in equation.params.values():
      for inner in value if isinstance(value, tuple | list) else (value,):
        inner = getattr(inner, 'jaxpr', inner)
        if hasattr(inner, 'eqns'):
          yield from equations(inner)


def traced_step():
  eng, params = case('draft')
  state = jax.eval_shape(lambda: eng.start(params, request(30)))
  return jax.make_jaxpr(lambda params, state: step(eng, params, state))(params, state).jaxpr


@pytest.mark.parametrize('precision', ['highest', 'default'])
def test_every_product_has_the_configured_precision(precision):
  """Fault 8: none sets its own, else wide and narrow passes would round differently."""
  with jax.default_matmul_precision(precision):
    found = [equation.params['precision'] for equation in equations(traced_step())
             if equation.primitive.name == 'dot_general']
  wanted = jax.lax.Precision(precision)
  assert len(found) > 20
  assert set(found) == {(wanted, wanted)}


WIDE = dataclasses.replace(CONFIG, vocab_size=4096)


def wide_case() -> tuple[Engine, Params]:
  model = random_toy(WIDE)
  return engine(Model(WIDE.vocab_size), 4, num_tokens=WIDE.vocab_size), Params(model, model)


def lm_head_rows(jaxpr) -> set[tuple[int, ...]]:
  """Shapes of all results that are vocabulary wide, without that dimension."""
  shapes = {tuple(out.aval.shape) for equation in equations(jaxpr) for out in equation.outvars}
  return {shape[:-1] for shape in shapes if shape and shape[-1] == WIDE.vocab_size}


def test_prefill_makes_no_logits():
  """Fault 48: 512 prompt tokens, 4096 ids; nothing in the program is [512, 4096] or larger."""
  eng, params = wide_case()
  req = request(8, prompts=[range(500)] * 3)
  jaxpr = jax.make_jaxpr(lambda params: eng.start(params, req))(params).jaxpr
  assert any(equation.params.get('name') == prefill.__name__ for equation in equations(jaxpr))
  assert not lm_head_rows(jaxpr) - {(0,), (3, 0)}
  largest = max(out.aval.size for equation in equations(jaxpr) for out in equation.outvars)
  assert largest < 3 * 512 * 4096


def test_verify_makes_logits_of_its_rows_only():
  """Fault 48: γ + 1 rows of a wide pass, 1 of a narrow one and of each draft pass."""
  eng, params = wide_case()
  state = jax.eval_shape(lambda: eng.start(params, request(8)))
  jaxpr = jax.make_jaxpr(lambda params, state: step(eng, params, state))(params, state).jaxpr
  heads = {tuple(equation.outvars[0].aval.shape) for equation in equations(jaxpr)
           if equation.primitive.name == 'dot_general'}
  assert {shape[1:] for shape in heads if shape[0] == WIDE.vocab_size} - {(3, 0)} == {(3, 5), (3, 1)}
