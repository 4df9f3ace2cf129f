"""The coupled rule: text depends on the seed alone, whatever drafts and how many tokens at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import chi_square as chi
from specdec import rng
from specdec.accept import RULES, coupled
from specdec.adaptive import AdaptiveGamma
from specdec.draft import Draft
from specdec.engine import Params
from specdec.warp import Sampling

BATCH = 4000
LENGTH = 12
COUPLED = RULES['coupled']
SAMPLINGS = {'sampled': (1.0, 0, 1.0), 'filtered': (0.7, 3, 0.8), 'greedy': (0.0, 0, 1.0)}
ADAPTIVE = AdaptiveGamma(draft_cost=0.2, verify_cost=(1.0, 1.25, 1.3, 1.4, 1.5), prior=0.6)
DRAFTERS = ['model, gamma 1', 'model, gamma 4', 'model, adaptive gamma', 'lookup, gamma 2', 'simulated, gamma 3']


@functools.cache
def loop_of(name: str) -> chi.Loop:
  drafter, _, gamma = name.partition(', gamma ')
  if name == 'model, adaptive gamma':
    loop = chi.loops(COUPLED, BATCH, gamma=4)['model']
    return dataclasses.replace(loop, engine=dataclasses.replace(loop.engine, adaptive=ADAPTIVE))
  return chi.loops(COUPLED, BATCH, gamma=int(gamma or 0))[drafter]


@functools.cache
def texts(name: str, sampling: str) -> chi.Sample:
  return chi.sample(loop_of(name), BATCH, LENGTH, Sampling.create(*SAMPLINGS[sampling]), seed=100)


def is_long(name: str, sampling: str) -> bool:
  return name == 'model, gamma 1' or (sampling == 'filtered' and not name.startswith('lookup'))


@pytest.mark.parametrize(('name', 'sampling'), [
    pytest.param(name, sampling, marks=[pytest.mark.slow] * is_long(name, sampling))
    for name in DRAFTERS for sampling in SAMPLINGS])
def test_text_is_that_of_plain_decoding(name, sampling):
  plain, drafted = texts('none', sampling), texts(name, sampling)
  np.testing.assert_array_equal(drafted.texts, plain.texts)
  assert plain.metrics.drafted == 0 and drafted.metrics.accepted > 0
  assert drafted.metrics.passes < plain.metrics.passes
  if sampling != 'greedy':
    assert len(np.unique(plain.texts, axis=0)) > BATCH / 4
    assert 0.1 < drafted.metrics.alpha < 0.9


def test_gamma_adapts_to_each_row():
  metrics = texts('model, adaptive gamma', 'sampled').metrics
  drafted = np.array(metrics.drafted_at)
  assert metrics.passes > drafted[0] > drafted[-1] > 0


@pytest.mark.parametrize('sampling', ['sampled', 'filtered'])
def test_text_follows_the_targets_law(sampling):
  sample, law = texts('none', sampling), loop_of('none').law(3, *SAMPLINGS[sampling])
  counts = chi.Sample(sample.texts[:, :3], sample.metrics).counts(4)
  assert chi.chi_square(counts, law).p_value > 1e-3


def test_another_draft_gives_the_same_text():
  """A draft that knows nothing costs passes, not correctness."""
  loop = loop_of('model, gamma 4')
  flat = chi.padded_models([loop.table, np.full((4, 4), 0.25)])[1]
  other = dataclasses.replace(loop, params=Params(loop.params.target, flat))
  sample = chi.sample(other, BATCH, LENGTH, Sampling.create(1.0), seed=100)
  np.testing.assert_array_equal(sample.texts, texts('none', 'sampled').texts)
  assert sample.metrics.passes != texts('model, gamma 4', 'sampled').metrics.passes


def test_target_as_its_own_draft_is_always_kept():
  """The tables that look one token back serve both."""
  loop = loop_of('model, gamma 4')
  table = np.random.default_rng(5).dirichlet(np.ones(4), 4)
  target, draft = chi.padded_models([np.broadcast_to(table, (4, 4, 4)), table])
  sample = chi.sample(dataclasses.replace(loop, params=Params(target, draft)), BATCH, LENGTH, Sampling.create(1.0))
  assert sample.metrics.accepted == sample.metrics.tested > 0


def agreement(target_V: np.ndarray, draft_V: np.ndarray) -> float:
  """P(both choose the same token) = sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) (Daliri et al., 2024)."""
  ratio = lambda law_V: law_V[None, :] / law_V[:, None]
  return float(np.sum(1 / np.sum(np.maximum(ratio(target_V), ratio(draft_V)), axis=1)))


@functools.partial(jax.jit, static_argnames='draws')
def kept_share(target_V, draft_V, key, draws: int):
  """How often one drafted token is kept, through the rule's own parts."""
  noise_BTV = jax.random.gumbel(key, (draws, 2, target_V.shape[0]))
  laws_BTV = jnp.broadcast_to(target_V, noise_BTV.shape)
  tokens_BM = rng.gumbel_max(draft_V, noise_BTV[:, :1])
  draft = Draft(tokens_BM, None, jnp.ones((draws,), jnp.int32))
  return jnp.mean(coupled.match(coupled.choices(noise_BTV, laws_BTV), draft).num_accepted_B)


@pytest.mark.parametrize('seed', range(6))
def test_agreement_probability(seed):
  generator, draws = np.random.default_rng(seed), 40_000
  target_V, draft_V = generator.dirichlet(np.ones(16), 2)
  expected, distance = agreement(target_V, draft_V), np.abs(target_V - draft_V).sum() / 2
  measured = kept_share(target_V, draft_V, jax.random.key(seed), draws)
  assert measured == pytest.approx(expected, abs=4 * (expected * (1 - expected) / draws)**0.5)
  assert (1 - distance) / (1 + distance) <= expected <= 1 - distance
  assert expected > np.sum(target_V * draft_V) + 0.1  # independent draws agree far less


def test_agreement_of_equal_laws_is_certain():
  law_V = np.random.default_rng(0).dirichlet(np.ones(16))
  assert agreement(law_V, law_V) == pytest.approx(1)
  assert kept_share(law_V, law_V, jax.random.key(0), 40_000) == 1


def test_match_by_hand():
  """Row 0 keeps all and takes the bonus, row 1 differs at its second token, row 2 drafted one token, row 3 none."""
  choices_BT = jnp.array([[4, 5, 6], [4, 5, 6], [4, 5, 6], [4, 5, 6]])
  draft = Draft(jnp.array([[4, 5], [4, 7], [4, 5], [4, 5]]), None, jnp.array([2, 2, 1, 0]))
  verdict = coupled.match(choices_BT, draft)
  assert verdict.num_accepted_B.tolist() == [2, 1, 1, 0]
  assert verdict.next_token_B.tolist() == [6, 5, 5, 4]
