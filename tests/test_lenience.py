"""Lenience of the token rule: its exact law, its bound, and that without it nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny
from experiments import draft_paths, exact_cases
from experiments.enumeration import (
  Case,
  Rule,
  compare,
  enumerate_case,
  plain_law,
  speculative_law,
  table_law,
  tokens_per_round,
)
from launch.build import build_rule, check_fields
from models.errors import InputError
from specdec.accept import RULES, rejection
from specdec.accept.rejection import Rejection
from specdec.draft import Draft, prob_of
from specdec.drafters import Model
from specdec.engine import Engine, Params
from specdec.rng import Purpose, row_keys, uniforms
from tests import toys

LENIENCES = (0.1, 0.3, 0.5, 0.9)


def lenient(lenience: float) -> Rule:
  """What `Rejection` makes of the parts."""
  return Rule(num_accepted=lambda uniform_BM, *rest: rejection.num_accepted(lenience * uniform_BM, *rest))


def formula(target_V: np.ndarray, draft_V: np.ndarray, lenience: float) -> np.ndarray:
  """min(target / l, draft), and what is refused goes where the token rule sends it (appendix A.5)."""
  kept_V = np.minimum(target_V / lenience, draft_V)
  residual_V = np.maximum(target_V - draft_V, 0)
  return kept_V + (1 - kept_V.sum()) * residual_V / max(residual_V.sum(), 1e-300)


@pytest.mark.parametrize('lenience', LENIENCES)
def test_law_of_the_first_token(lenience):
  """Exact, by enumeration of the rule itself; kept with probability sum min(target / l, draft)."""
  target, draft = map(table_law, exact_cases.pair(4, seed=1))
  case = Case('lenient', target, draft_paths.sampled(draft), 1, 4)
  law = speculative_law(case, lenient(lenience)).sum(axis=1)
  target_V, draft_V = target(case.prompt), draft(case.prompt)
  assert compare(law, formula(target_V, draft_V, lenience)).exact
  assert (law <= target_V / lenience + 1e-12).all()
  kept = np.minimum(target_V / lenience, draft_V).sum()
  assert tokens_per_round(case, lenient(lenience)) == pytest.approx(1 + kept, rel=1e-12)
  assert not compare(law, target_V).exact


@pytest.mark.parametrize('lenience', LENIENCES)
def test_law_of_a_whole_round(lenience):
  """Two drafted tokens: each tested token by itself follows the formula, given the text before it."""
  target, draft = map(table_law, exact_cases.pair(3, seed=2))
  case = Case('lenient', target, draft_paths.sampled(draft), 2, 3)
  law = speculative_law(case, lenient(lenience))
  plain = plain_law(case)
  assert law.sum() == pytest.approx(1, abs=1e-12)
  assert (law <= plain / lenience ** 3 + 1e-12).all()
  first_V = law.sum(axis=(1, 2))
  np.testing.assert_allclose(first_V, formula(target(case.prompt), draft(case.prompt), lenience), atol=1e-12)


def jaxpr(rule: Rejection) -> str:
  drafted = Draft(jnp.zeros((2, 3), jnp.int32), jnp.full((2, 3, 4), 0.25), jnp.full(2, 3))
  arguments = row_keys(jnp.arange(2, dtype=jnp.uint32)), jnp.ones(2, jnp.int32), jnp.full((2, 4, 4), 0.25)
  return str(jax.make_jaxpr(lambda keys, at, laws: rule(keys, at, drafted, laws))(*arguments))


def test_no_lenience_is_the_same_rule():
  """No operation more, and exact; with lenience there is one."""
  assert Rejection() == RULES['rejection'] and Rejection().lossless and Rejection().name == 'rejection'
  assert jaxpr(Rejection()) == jaxpr(Rejection(lenience=1.0)) != jaxpr(Rejection(lenience=0.5))
  assert jaxpr(Rejection()).count('mul') + 1 == jaxpr(Rejection(lenience=0.5)).count('mul')
  assert enumerate_case(exact_cases.all_cases()[0]).exact


@pytest.mark.parametrize('lenience', LENIENCES)
def test_the_rule_is_its_parts(lenience):
  """`Rejection` keeps what the parts keep that were enumerated, with the same uniforms."""
  random = np.random.default_rng(0)
  laws = lambda width: jnp.asarray(random.dirichlet(np.ones(5), (200, width)), jnp.float32)
  drafted = Draft(jnp.asarray(random.integers(0, 5, (200, 3))), laws(3), jnp.full(200, 3))
  keys, at_B, target = row_keys(jnp.arange(200, dtype=jnp.uint32)), jnp.zeros(200, jnp.int32), laws(4)
  verdict = Rejection(lenience=lenience)(keys, at_B, drafted, target)
  uniform_BM = uniforms(keys, at_B, 3, Purpose.ACCEPT)
  np.testing.assert_array_equal(verdict.num_accepted_B, lenient(lenience).num_accepted(uniform_BM, drafted, target))
  kept_BM = uniform_BM * lenience * drafted.prob_of_tokens() < prob_of(target[:, :3], drafted.tokens_BM)
  np.testing.assert_array_equal(verdict.num_accepted_B, jnp.sum(jnp.cumprod(kept_BM, axis=1), axis=1))


def test_point_masses():
  """A drafted token of probability p is kept with min(1, p / l)."""
  drafted = Draft(jnp.asarray([[2]]), None, jnp.asarray([1]))
  law = jnp.asarray([[[0.5, 0.2, 0.3], [1, 0, 0]]])
  kept = [int(lenient(0.5).num_accepted(jnp.asarray([[u]]), drafted, law)[0]) for u in (0.59, 0.61)]
  assert kept == [1, 0]


def test_lenient_text_is_marked_and_lossy():
  """It says so, and more is accepted; greedy text is the target's."""
  rule = Rejection(lenience=0.2)
  assert not rule.lossless and rule.name == 'rejection, lenience 0.2'
  run = lambda rule, sampling: Engine(
      Model(toys.VOCAB), rule, 4, toys.CAPACITY, toys.VOCAB).generate(
          Params(toys.target(), toys.draft()), toys.request(100, sampling))
  strict, loose = run(Rejection(), toys.SAMPLED).total, run(rule, toys.SAMPLED).total
  assert loose.alpha > strict.alpha + 0.05
  assert run(rule, toys.GREEDY).tokens == toys.greedy_text(100)


@pytest.mark.parametrize('lenience', [0.0, -1.0, 1.5, float('nan')])
def test_leniences_that_are_refused(lenience):
  with pytest.raises(ValueError, match='lenience must lie in'):
    Rejection(lenience=lenience)


def test_lenience_of_a_config():
  config = tiny.get_config().copy_and_resolve_references()
  with config.unlocked():
    config.accept.lenience = 0.5
  assert build_rule(config.accept) == Rejection(lenience=0.5)
  config.accept.rule = 'coupled'
  with pytest.raises(InputError, match=r"accept.lenience=0.5 is for accept.rule='rejection'"):
    check_fields(config)
  config.accept.rule, config.accept.lenience = 'rejection', 2.0
  with pytest.raises(InputError, match='accept: lenience'):
    check_fields(config)
