"""Lenience of the token rule: its exact law, its bound, and that without it nothing changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny
from experiments import draft_paths, exact_cases
from experiments.enumeration import Case, Rule, compare, plain_law, speculative_law, table_law, tokens_per_round
from launch.build import build_rule, check_fields
from models.errors import InputError
from specdec.accept import RULES, rejection
from specdec.accept.rejection import Rejection
from specdec.draft import Draft
from specdec.drafters import Model
from specdec.engine import Engine, Params
from tests import toys

LENIENCES = (0.1, 0.3, 0.5, 0.9)


def lenient(lenience: float) -> Rule:
  return Rule(num_accepted=functools.partial(rejection.num_accepted, lenience=lenience))


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


def test_no_lenience_is_the_same_rule():
  """The same numbers, and no operation more."""
  case = exact_cases.all_cases()[0]
  np.testing.assert_array_equal(speculative_law(case, lenient(1.0)), speculative_law(case))
  assert compare(speculative_law(case, lenient(1.0)), plain_law(case)).exact
  assert Rejection() == RULES['rejection'] and Rejection(1.0).lossless and Rejection().name == 'rejection'
  drafted = Draft(jnp.zeros((2, 3), jnp.int32), jnp.full((2, 3, 4), 0.25), jnp.full(2, 3))
  jaxpr = lambda *lenience: str(jax.make_jaxpr(lambda u, t: rejection.num_accepted(u, drafted, t, *lenience))(
      jnp.zeros((2, 3)), jnp.full((2, 4, 4), 0.25)))
  assert jaxpr() == jaxpr(1.0) != jaxpr(0.5)


def test_point_masses():
  """A drafted token of probability p is kept with min(1, p / l)."""
  drafted = Draft(jnp.asarray([[2]]), None, jnp.asarray([1]))
  law = jnp.asarray([[[0.5, 0.2, 0.3], [1, 0, 0]]])
  kept = [int(rejection.num_accepted(jnp.asarray([[u]]), drafted, law, 0.5)[0]) for u in (0.59, 0.61)]
  assert kept == [1, 0]


def test_lenient_text_is_marked_and_lossy():
  """It says so, and more is accepted; greedy text is the target's."""
  rule = Rejection(0.2)
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
    Rejection(lenience)


def test_lenience_of_a_config():
  config = tiny.get_config().copy_and_resolve_references()
  with config.unlocked():
    config.accept.lenience = 0.5
  assert build_rule(config.accept) == Rejection(0.5)
  config.accept.rule = 'coupled'
  with pytest.raises(InputError, match=r"accept.lenience=0.5 is for accept.rule='rejection'"):
    check_fields(config)
  config.accept.rule, config.accept.lenience = 'rejection', 2.0
  with pytest.raises(InputError, match='accept: lenience'):
    check_fields(config)
