"""γ that follows the acceptance: lossless, per row, up and down."""

from collections.abc import Sequence
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from models.table import TableModel
from specdec import theory
from specdec.adaptive import AcceptanceEstimate, AdaptiveGamma
from specdec.drafters import Empty, Model
from specdec.engine import Engine, Params, context_of
from tests.toys import GREEDY, SAMPLED, VOCAB, decode, engine, request

GAMMA = 4
COSTS = (1.0, 1.1, 1.2, 1.3, 1.4)
HALF = VOCAB // 2
PROMPTS = ((1,), (40,), (2, 3))  # row 1 lives in the upper half of the vocabulary


def tables() -> Params:
  """A target whose two halves never meet, and a draft that is right in the lower half and wrong in the upper."""
  law, rng = np.zeros((VOCAB, VOCAB)), np.random.default_rng(0)
  for half in (slice(0, HALF), slice(HALF, VOCAB)):
    law[half, half] = rng.dirichlet(np.full(HALF, 0.2), HALF)
  draft = law.copy()
  draft[HALF:, HALF:] = law[HALF:, HALF:] < 1e-3
  return Params(TableModel.create(law), TableModel.create(draft / draft.sum(axis=1, keepdims=True)))


def adaptive() -> Engine:
  return engine(Model(VOCAB), GAMMA, 'coupled', adaptive=AdaptiveGamma(0.3, COSTS))


@pytest.mark.parametrize('sampling', [GREEDY, SAMPLED], ids=['greedy', 'sampled'])
def test_lossless(sampling):
  """The text of the seed, as without a draft."""
  plain, _ = decode(engine(Empty(), 0, 'coupled'), Params(tables().target), request(60, sampling, PROMPTS))
  result, _ = decode(adaptive(), tables(), request(60, sampling, PROMPTS))
  assert result.tokens == plain.tokens


def test_follows_the_acceptance_of_each_row():
  """Up to all of γ where the draft is right, down to 0 (and trying again now and then) where it is wrong."""
  result, _ = decode(adaptive(), tables(), request(120, prompts=PROMPTS))
  right, wrong, also_right = result.metrics
  assert right.alpha == also_right.alpha == 1
  assert wrong.alpha == 0
  assert right.drafted / right.passes > 0.9 * GAMMA
  assert also_right.tokens_per_pass > 0.9 * (GAMMA + 1)
  assert 0 < wrong.drafted / wrong.passes < 0.3
  assert wrong.drafted_at[0] > 3, 'γ = 0 must be left again'


def test_estimate_of_an_ended_row_rests():
  """Fault 18: row 1 ends with its third token; that its neighbours go on changes nothing of it."""
  text = decode(adaptive(), tables(), request(60, prompts=PROMPTS))[0].tokens[1]
  assert text[2] not in text[:2]
  long, short = (decode(adaptive(), tables(), request(count, prompts=PROMPTS, eos_ids=text[2:3])) for count in (60, 12))
  assert long[0].tokens[1] == short[0].tokens[1] == text[:3]
  assert long[0].metrics[0].passes > short[0].metrics[0].passes == 3
  assert float(short[1].estimate.tested_B[1]) > 0
  for before, after in zip(vars(short[1].estimate).values(), vars(long[1].estimate).values(), strict=True):
    assert before[1] == after[1]


EVERY_WIDTH = range(1, GAMMA + 2)


def choose(alpha: float, draft_cost: float, widths: Sequence[int] = EVERY_WIDTH) -> int:
  """γ once the acceptance is well known."""
  estimate = AcceptanceEstimate(jnp.asarray([1e6 * alpha]), jnp.asarray([1e6]))
  return int(AdaptiveGamma(draft_cost, COSTS).choose(estimate, widths)[0])


def test_choice_is_the_fastest_by_the_theory():
  assert choose(0.0, 0.1) == choose(0.5, 2.0) == 0
  assert choose(1.0, 0.0) == choose(0.99, 0.05) == GAMMA
  chosen = [choose(alpha, 0.2) for alpha in (0.1, 0.4, 0.6, 0.8, 0.95)]
  assert chosen == sorted(chosen) and len(set(chosen)) > 2


@pytest.mark.parametrize('widths', [EVERY_WIDTH, (1, 5), (1, 3, 5), (5,)], ids=str)
@pytest.mark.parametrize('alpha', [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize('draft_cost', [0.0, 0.1, 0.3])
def test_a_draft_costs_the_pass_that_will_run(alpha, draft_cost, widths):
  """Without a pass of γ + 1 tokens the next wider one runs, and is what γ must be weighed by."""
  cost = [COSTS[min(width for width in widths if width > gamma) - 1] for gamma in range(GAMMA + 1)]
  speedups = [theory.speedup_measured(theory.expected_tokens(alpha, gamma), gamma, draft_cost, cost[gamma])
              for gamma in range(GAMMA + 1)]
  assert speedups[choose(alpha, draft_cost, widths)] == pytest.approx(max(speedups), rel=1e-6)


@pytest.mark.parametrize(('widths', 'gamma'), [((1,), 0), (tuple(EVERY_WIDTH), 1)])
def test_the_engine_weighs_the_widths_it_has(widths, gamma):
  """With half of the drafts right, one token pays by a pass of two, but not by a pass of five."""
  eng = dataclasses.replace(adaptive(), adaptive=AdaptiveGamma(0.2, COSTS), widths=widths)
  state = adaptive().start(tables(), request(4, prompts=PROMPTS))
  state = state.replace(estimate=AcceptanceEstimate(jnp.full(3, 5e5), jnp.full(3, 1e6)))
  assert context_of(eng, state).gamma_B.tolist() == [gamma] * 3


def test_prior_decides_before_anything_is_known():
  unknown = AcceptanceEstimate.zeros(1)
  assert [AdaptiveGamma(0.2, COSTS, prior).choose(unknown, EVERY_WIDTH) for prior in (0.05, 0.95)] == [0, GAMMA]
