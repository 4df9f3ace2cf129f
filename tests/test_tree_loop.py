"""The real jitted loop over trees draws from the target's law: every kind of children (faults 2 to 5)."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import chi_square as chi
from specdec.accept import RULES
from specdec.accept.multiround import Multiround
from specdec.drafters import children
from specdec.warp import Sampling

BATCH = 12_500
UNLIKELY = 1e-3  # p-value; seeds are fixed, so a test that passes once passes always
PLAIN_SAMPLING = Sampling.create(1.0)
LENGTH = 6
NAMES = [f'tree, {kind}' for kind in children.KINDS]


@functools.cache
def loops(rule: str) -> dict[str, chi.Loop]:
  return chi.tree_loops(RULES[rule], BATCH)


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=[pytest.mark.slow] * (name != 'tree, without')) for name in NAMES])
def test_joint_law_of_tokens(name):
  loop = loops('multiround')[name]
  sample = chi.sample(loop, 4 * BATCH, LENGTH, PLAIN_SAMPLING)
  counts, law = sample.counts(4), loop.law(LENGTH)
  assert chi.chi_square(counts.sum(axis=(3, 4, 5)), loop.law(3)).p_value > UNLIKELY
  assert chi.chi_square(counts.sum(axis=(0, 1, 2)), law.sum(axis=(0, 1, 2))).p_value > UNLIKELY
  assert chi.chi_square(counts, law).p_value > UNLIKELY
  metrics = sample.metrics
  assert metrics.emitted == 4 * BATCH * LENGTH
  assert len(metrics.accepted_at) == 3 and min(metrics.accepted_at) > 0
  assert metrics.tokens_per_pass > 1.5


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=[pytest.mark.slow] * (name != 'tree, top')) for name in NAMES])
def test_joint_law_under_filters(name):
  """Top-k leaves some rows fewer tokens than children."""
  loop, filters = loops('multiround')[name], (0.7, 3, 0.8)
  sample = chi.sample(loop, BATCH, 4, Sampling.create(*filters))
  law = loop.law(4, *filters)
  assert (law == 0).any()
  assert chi.chi_square(sample.counts(4), law).p_value > UNLIKELY


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=[pytest.mark.slow] * (name == 'tree, with')) for name in NAMES])
def test_greedy_text(name):
  loop = loops('multiround')[name]
  sample = chi.sample(loop, BATCH, 4, Sampling.create(0.0))
  assert (sample.texts == np.argwhere(loop.law(4, 0.0))[0]).all()


@pytest.mark.slow
def test_without_replacement_more_is_kept():
  tokens = {name: chi.sample(loops('multiround')[name], BATCH, LENGTH, PLAIN_SAMPLING).metrics.tokens_per_pass
            for name in NAMES}
  assert tokens['tree, without'] > tokens['tree, with'] + 0.02


@functools.cache
def coupled_texts(name: str) -> np.ndarray:
  """'none' is plain decoding."""
  loop = loops('coupled').get(name) or chi.loops(RULES['coupled'], BATCH)[name]
  return chi.sample(loop, BATCH, LENGTH, PLAIN_SAMPLING).texts


@pytest.mark.parametrize('name', [pytest.param('tree, top', marks=pytest.mark.slow), 'tree, without'])
def test_coupled_text_is_that_of_plain_decoding(name):
  np.testing.assert_array_equal(coupled_texts(name), coupled_texts('none'))


@pytest.mark.slow
def test_point_masses_leave_the_text_as_it_is():
  """All children are point masses: the multi-round rule then draws as plain decoding does with the same seed."""
  plain = chi.sample(chi.loops(RULES['multiround'], BATCH)['none'], BATCH, LENGTH, PLAIN_SAMPLING).texts
  tree = chi.sample(loops('multiround')['tree, top'], BATCH, LENGTH, PLAIN_SAMPLING).texts
  np.testing.assert_array_equal(tree, plain)


@dataclasses.dataclass(frozen=True)
class RawLaws(Multiround):
  """Wrong: later siblings are judged by the law that the first was drawn from."""

  name = 'raw_laws'

  def __call__(self, row_key_B, position_B, draft, target_probs_BTV):
    return super().__call__(row_key_B, position_B, dataclasses.replace(draft, replacement=True), target_probs_BTV)


@dataclasses.dataclass(frozen=True)
class PointsAsDrawn(Multiround):
  """Wrong: the likeliest children are judged as if they had been drawn evenly from all tokens."""

  name = 'points_as_drawn'

  def __call__(self, row_key_B, position_B, draft, target_probs_BTV):
    rows, vocab = draft.width, target_probs_BTV.shape[-1]
    laws_BRV = jnp.full((draft.tokens_BM.shape[0], rows, vocab), 1 / vocab)
    drawn = dataclasses.replace(draft, laws_BRV=laws_BRV, internal=tuple(range(rows)), num_drawn=draft.width)
    return super().__call__(row_key_B, position_B, drawn, target_probs_BTV)


@pytest.mark.parametrize(('name', 'rule'), [
    pytest.param('tree, without', RawLaws(), marks=pytest.mark.slow), ('tree, top', PointsAsDrawn())])
def test_wrong_laws_would_show(name, rule):
  loop = loops('multiround')[name]
  wrong = dataclasses.replace(loop, engine=dataclasses.replace(loop.engine, rule=rule))
  sample = chi.sample(wrong, 2 * BATCH, 4, PLAIN_SAMPLING)
  assert chi.chi_square(sample.counts(4), loop.law(4)).p_value < 1e-9
