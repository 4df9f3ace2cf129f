"""Block verification: exact on every chain, never behind the token rule, and the same for point masses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import chi_square as chi
from experiments import draft_paths as drafts
from experiments import enumeration, exact_cases
from experiments.enumeration import LARGEST_UNIFORM, Case, Rule, enumerate_case, table_law, tokens_per_round
from specdec.accept import RULES
from specdec.accept.block import Block
from specdec.draft import Draft
from specdec.warp import Sampling

BATCH = 12_500
UNLIKELY = 1e-3


@pytest.mark.parametrize('case', exact_cases.all_cases(), ids=lambda case: case.name)
def test_block_rule_is_exact(case):
  assert enumerate_case(case, Rule.block()).exact, enumerate_case(case, Rule.block())


@pytest.mark.slow
def test_block_rule_is_exact_at_the_largest_size():
  case = exact_cases.all_cases(largest=True)[7]
  assert (case.vocab, case.gamma) == (4, 4)
  assert enumerate_case(case, Rule.block()).exact


@pytest.mark.parametrize(('vocab', 'gamma'), [(3, 3), (3, 4), (2, 4), (4, 2)])
def test_more_tokens_than_the_token_rule(vocab, gamma):
  gained = []
  for seed in range(8):
    target, draft = map(table_law, exact_cases.pair(vocab, seed))
    case = Case('', target, drafts.sampled(draft), gamma, vocab)
    gained.append(tokens_per_round(case, Rule.block()) - tokens_per_round(case))
  assert min(gained) >= -1e-12
  assert np.mean(gained) > 0.02


def test_tokens_per_round_of_known_tables():
  found = {}
  for vocab, gamma, seed in ((3, 3, 1), (2, 4, 0)):
    target, draft = map(table_law, exact_cases.pair(vocab, seed))
    case = Case('', target, drafts.sampled(draft), gamma, vocab)
    found[vocab, gamma] = [round(tokens_per_round(case, rule), 3) for rule in (Rule(), Rule.block())]
  assert found == {(3, 3): [1.788, 2.013], (2, 4): [2.982, 3.224]}


@functools.partial(jax.jit, static_argnames='rule')
def _asked(rule, uniform_BM, draft, target_BTV):
  return rule.num_accepted(uniform_BM, draft, target_BTV)


def random_draft(generator: np.random.Generator, batch: int, gamma: int, vocab: int) -> tuple[Draft, np.ndarray]:
  laws_BMV = generator.dirichlet(np.ones(vocab), (batch, gamma))
  count_B = generator.integers(0, gamma + 1, batch)
  tokens_BM = generator.integers(0, vocab, (batch, gamma))
  return (Draft(jnp.asarray(tokens_BM), jnp.asarray(laws_BMV), jnp.asarray(count_B)),
          generator.dirichlet(np.ones(vocab), (batch, gamma + 1)))


@pytest.mark.parametrize('rule', [Rule(), Rule.block()], ids=['token', 'block'])
def test_each_uniform_is_compared_with_one_value(rule):
  """What the enumeration rests on: uniforms may be moved about on one side of the turning point."""
  generator = np.random.default_rng(0)
  with jax.enable_x64(True):
    draft, target_BTV = random_draft(generator, 4000, 3, 4)
    turn_BM = np.asarray(jax.jit(enumeration.turns, static_argnums=0)(rule, draft, jnp.asarray(target_BTV)))
    uniform_BM = generator.random((4000, 3))
    moved_BM = np.where(uniform_BM < turn_BM, 0.0, LARGEST_UNIFORM)
    kept = [np.asarray(_asked(rule, jnp.asarray(u), draft, jnp.asarray(target_BTV))) for u in (uniform_BM, moved_BM)]
  np.testing.assert_array_equal(*kept)
  assert set(kept[0]) == {0, 1, 2, 3}


def test_point_masses_gain_nothing():
  target, draft = map(table_law, exact_cases.pair(3, seed=5))
  case = Case('', target, drafts.argmax(draft), 3, 3)
  assert tokens_per_round(case, Rule.block()) == pytest.approx(tokens_per_round(case), abs=1e-12)


class ByPosition(Block):
  """Wrong: what was drawn for a position behind a rejection, and looked at, is drawn again in the next step."""

  by_step = False


@functools.cache
def loop(rule: Block) -> chi.Loop:
  return chi.loops(rule, BATCH)['model']


@pytest.mark.slow
def test_joint_law_of_the_loop():
  sample = chi.sample(loop(RULES['block']), 4 * BATCH, 6, Sampling.create(1.0))
  counts, law = sample.counts(4), loop(RULES['block']).law(6)
  assert chi.chi_square(counts.sum(axis=(3, 4, 5)), loop(RULES['block']).law(3)).p_value > UNLIKELY
  assert chi.chi_square(counts.sum(axis=(0, 1, 2)), law.sum(axis=(0, 1, 2))).p_value > UNLIKELY
  assert chi.chi_square(counts, law).p_value > UNLIKELY


@pytest.mark.slow
def test_noise_reused_by_position_would_show():
  sample = chi.sample(loop(ByPosition()), 4 * BATCH, 6, Sampling.create(1.0))
  counts, law = sample.counts(4), loop(RULES['block']).law(6)
  assert chi.chi_square(counts, law).p_value < 1e-9


@pytest.mark.slow
def test_the_loop_keeps_more_than_by_the_token_rule():
  tokens = {name: chi.sample(chi.loops(RULES[name], BATCH)['model'], BATCH, 24, Sampling.create(1.0)).metrics
            for name in ('rejection', 'block')}
  assert tokens['block'].tokens_per_pass > tokens['rejection'].tokens_per_pass + 0.01
