"""The real jitted loop draws from the target's law: joint law of several tokens, every drafter (faults 1 to 4).

One compiled loop per drafter serves all tests: sampling parameters and tables are values.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import chi_square as chi
from experiments import enumeration, mutations
from models.table import TableModel
from specdec import rng
from specdec.accept import RULES
from specdec.accept.rejection import Rejection
from specdec.draft import Draft, Verdict
from specdec.drafters import Model
from specdec.engine import Params
from specdec.warp import Sampling

BATCH = 12_500
DRAWS = 50_000
UNLIKELY = 1e-3  # p-value; seeds are fixed, so a test that passes once passes always
REJECTION = RULES['rejection']
PLAIN_SAMPLING = Sampling.create(1.0)


@functools.cache
def loops() -> dict[str, chi.Loop]:
  return chi.loops(REJECTION, BATCH)


@functools.cache
def three_tokens() -> chi.Loop:
  return chi.three_tokens(REJECTION, BATCH)


def with_tables(loop: chi.Loop, target: np.ndarray, draft: np.ndarray) -> chi.Loop:
  """The same compiled loop on other laws, given as [V]: the contexts are there, but do not matter."""
  tables = [np.broadcast_to(law, (len(law),) * (model.order + 1))
            for law, model in ((target, loop.params.target), (draft, loop.params.draft))]
  padded = loop.params.target.vocab_size > len(target)
  models = chi.padded_models(tables) if padded else [TableModel.create(table) for table in tables]
  return dataclasses.replace(loop, params=Params(*models), table=tables[0])


def first_token(loop: chi.Loop) -> np.ndarray:
  """[V]: frequencies of the first token."""
  texts = chi.sample(loop, DRAWS, 2, PLAIN_SAMPLING).texts
  return np.bincount(texts[:, 0], minlength=loop.engine.num_tokens) / len(texts)


@pytest.mark.parametrize('name', [
    'none', 'model', pytest.param('model, fewer tokens', marks=pytest.mark.slow), 'lookup',
    pytest.param('simulated', marks=pytest.mark.slow)])
def test_joint_law_of_tokens(name):
  loop = loops()[name]
  sample = chi.sample(loop, 2 * BATCH, 6, PLAIN_SAMPLING)
  counts, law = sample.counts(4), loop.law(6)
  assert chi.chi_square(counts.sum(axis=(3, 4, 5)), loop.law(3)).p_value > UNLIKELY
  assert chi.chi_square(counts.sum(axis=(0, 1, 2)), law.sum(axis=(0, 1, 2))).p_value > UNLIKELY  # γ cut to fit
  assert chi.chi_square(counts, law).p_value > UNLIKELY
  metrics = sample.metrics
  assert metrics.emitted == 2 * BATCH * 6
  if name == 'none':
    assert metrics.drafted == 0 and metrics.tokens_per_pass == 1
  else:
    assert 0.1 < metrics.alpha < 0.9 and metrics.tokens_per_pass > 1.2
    assert metrics.alpha == pytest.approx(metrics.overlap, abs=0.01)


@pytest.mark.parametrize('name', [
    'none', 'model', *(pytest.param(name, marks=pytest.mark.slow) for name in ('lookup', 'simulated'))])
def test_joint_law_under_filters(name):
  loop, filters = loops()[name], (0.7, 3, 0.8)
  sample = chi.sample(loop, BATCH, 4, Sampling.create(*filters))
  law = loop.law(4, *filters)
  assert (law == 0).any()
  assert chi.chi_square(sample.counts(4), law).p_value > UNLIKELY


def test_three_tokens_accept_six_in_ten():
  loop = three_tokens()
  sample = chi.sample(loop, DRAWS, 2, PLAIN_SAMPLING)
  assert sample.metrics.alpha == pytest.approx(0.6, abs=0.01)
  assert sample.metrics.overlap == pytest.approx(0.6, abs=1e-4)
  first = chi.chi_square(sample.counts(3).sum(axis=1), loop.law(1))
  assert first.p_value > UNLIKELY and first.max_deviation < 0.01


def test_fault_01_nothing_is_kept_of_a_draft_the_target_forbids():
  loop = with_tables(loops()['model'], np.eye(4)[0], np.eye(4)[1])
  sample = chi.sample(loop, BATCH, 5, PLAIN_SAMPLING)
  assert (sample.texts == 0).all()
  assert sample.metrics.drafted > 0 and sample.metrics.accepted == 0 and sample.metrics.tokens_per_pass == 1


@dataclasses.dataclass(frozen=True)
class FilteredDraft:
  """A model drafter with filters of its own, which may report another law than it draws from.

  `params` is (model, its filters, the law to report, whether to).
  """

  model: Model
  name = 'filtered'
  reads, is_tree, draws = Model.reads, False, True

  def levels(self, gamma: int) -> int:
    return gamma

  def init(self, params: Any, *arguments) -> Any:
    return self.model.init(params[0], *arguments)

  def propose(self, params: Any, state: Any, context: Any, gamma: int) -> tuple[Draft, Any]:
    draft_model, sampling, reported_V, lie = params
    draft, state = self.model.propose(draft_model, state, context.replace(sampling=sampling), gamma)
    return dataclasses.replace(draft, probs_BMV=jnp.where(lie, reported_V, draft.probs_BMV)), state

  def observe(self, state: Any, length_B: Any, features_BEF: Any) -> Any:
    return self.model.observe(state, length_B, features_BEF)


def filtered_loop(sampling: Sampling, lie: bool) -> chi.Loop:
  loop = with_tables(three_tokens(), mutations.TARGET_TABLE, mutations.DRAFT_TABLE)
  params = loop.params.draft, sampling, jnp.asarray(mutations.DRAFT_TABLE, jnp.float32), jnp.bool_(lie)
  engine = dataclasses.replace(loop.engine, drafter=FilteredDraft(loop.engine.drafter))
  return dataclasses.replace(loop, engine=engine, params=Params(loop.params.target, params))


@pytest.mark.parametrize('values', [
    (0.0, 0), (0.5, 0), *(pytest.param(values, marks=pytest.mark.slow) for values in ((1.0, 0), (2.0, 0))), (1.0, 1),
    *(pytest.param(values, marks=pytest.mark.slow) for values in ((1.0, 2), (1.0, 3)))])
def test_faults_02_and_03_filtered_draft_that_reports_its_law(values):
  """A greedy draft is one whose temperature is 0."""
  frequencies = first_token(filtered_loop(Sampling.create(*values), lie=False))
  np.testing.assert_allclose(frequencies, mutations.TARGET_TABLE, atol=0.01)


@pytest.mark.parametrize(('values', 'wrong'), [
    ((0.0, 0), (0.4, 0.6, 0)), pytest.param((0.5, 0), (0.447, 0.395, 0.158), marks=pytest.mark.slow)])
def test_faults_02_and_03_would_show(values, wrong):
  frequencies = first_token(filtered_loop(Sampling.create(*values), lie=True))
  np.testing.assert_allclose(frequencies, wrong, atol=0.01)


def test_fault_04_correction_comes_from_the_residual():
  loop = with_tables(three_tokens(), mutations.TARGET_TABLE, mutations.DRAFT_TABLE)
  np.testing.assert_allclose(first_token(loop), mutations.TARGET_TABLE, atol=0.01)


@dataclasses.dataclass(frozen=True)
class Planted(Rejection):
  """The token rule with parts exchanged."""

  parts: enumeration.Rule
  name = 'planted'

  def __call__(self, row_key_B, position_B, draft: Draft, target_probs_BTV) -> Verdict:
    uniform_BM = rng.uniforms(row_key_B, position_B, draft.width, rng.Purpose.ACCEPT)
    num_accepted_B = self.parts.num_accepted(uniform_BM, draft, target_probs_BTV)
    law_BV = self.parts.next_law(draft, target_probs_BTV, num_accepted_B)
    return Verdict(num_accepted_B, rng.draw(row_key_B, position_B + num_accepted_B, law_BV, rng.Purpose.EMIT))


def test_fault_04_would_show():
  loop = with_tables(three_tokens(), mutations.TARGET_TABLE, mutations.DRAFT_TABLE)
  rule = Planted(enumeration.Rule(next_law=mutations.correction_from_target))
  wrong = dataclasses.replace(loop, engine=dataclasses.replace(loop.engine, rule=rule))
  sample = chi.sample(wrong, DRAWS, 2, PLAIN_SAMPLING)
  np.testing.assert_allclose(sample.counts(3).sum(axis=1) / DRAWS, [0.35, 0.39, 0.26], atol=0.01)
  assert chi.chi_square(sample.counts(3), loop.law(2)).p_value < 1e-9


def test_a_rows_text_does_not_depend_on_the_batch():
  """A small batch writes its cache row by row, a large one by scatter."""
  loop = three_tokens()
  large = chi.sample(loop, BATCH, 8, PLAIN_SAMPLING).texts
  small = chi.sample(dataclasses.replace(loop, batch=5), 20, 8, PLAIN_SAMPLING).texts
  np.testing.assert_array_equal(small, large[:20])


def test_chi_square_by_hand():
  test = chi.chi_square(np.array([60, 40]), np.array([0.5, 0.5]))
  assert (test.statistic, test.freedom, test.draws) == (4.0, 1, 100)
  assert test.p_value == pytest.approx(0.0455, abs=1e-4)
  assert test.max_deviation == pytest.approx(0.1)


def test_chi_square_pools_rare_cells():
  law = np.array([0.01, 0.02, 0.03, 0.44, 0.5])
  test = chi.chi_square(np.array([3, 2, 1, 44, 50]), law)  # the first three expect 6 of 100 together
  assert test.freedom == 2
  assert test.statistic == pytest.approx(0)
  assert chi.chi_square(np.array([3, 97]), np.array([0.01, 0.99])).freedom == 0


def test_chi_square_of_a_forbidden_draw():
  assert chi.chi_square(np.array([1, 999]), np.array([0.0, 1.0])).p_value == 0


def test_p_values_of_fair_counts_are_spread_evenly():
  generator = np.random.default_rng(0)
  law = generator.dirichlet(np.ones(30))
  p_values = [chi.chi_square(generator.multinomial(5000, law), law).p_value for _ in range(400)]
  np.testing.assert_allclose(np.quantile(p_values, [0.1, 0.25, 0.5, 0.75, 0.9]), [0.1, 0.25, 0.5, 0.75, 0.9], atol=0.08)
