"""The exact law of speculative text equals that of plain decoding: every kind of draft, filter and count."""

import numpy as np
import pytest

from experiments import draft_paths as drafts
from experiments import enumeration, exact_cases
from experiments.enumeration import Case, coupled_texts, enumerate_case, table_law, warped

NOISE_KV = np.random.default_rng(3).gumbel(size=(4, 3))


@pytest.mark.parametrize('case', exact_cases.all_cases(), ids=lambda case: case.name)
def test_token_rule_is_exact(case):
  assert enumerate_case(case).exact, enumerate_case(case)


@pytest.mark.slow
def test_token_rule_is_exact_at_the_largest_size():
  case = exact_cases.all_cases(largest=True)[7]
  assert (case.vocab, case.gamma) == (4, 4)
  assert enumerate_case(case).exact


@pytest.mark.parametrize(('case', 'propose'), exact_cases.coupled_cases(), ids=lambda x: getattr(x, 'name', ''))
def test_coupled_text_is_the_plain_text_under_every_noise(case, propose):
  plain, drafted = coupled_texts(case, None, NOISE_KV), coupled_texts(case, propose, NOISE_KV)
  assert len(plain) == len(NOISE_KV)**(case.gamma + 1)
  np.testing.assert_array_equal(drafted, plain)


def test_laws_are_laws():
  case = exact_cases.all_cases()[2]
  assert case.gamma == 3
  assert enumeration.plain_law(case).sum() == pytest.approx(1, abs=1e-12)
  assert enumeration.speculative_law(case).sum() == pytest.approx(1, abs=1e-12)


def test_plain_law_by_hand():
  table = np.array([[0.5, 0.5], [0.25, 0.75]])
  case = Case('', table_law(table), drafts.sampled(table_law(table)), 1, 2, prompt=(0, 1))
  np.testing.assert_allclose(enumeration.plain_law(case), [[0.125, 0.125], [0.1875, 0.5625]])


def test_paths_of_a_drafter_are_a_law():
  draft = table_law(exact_cases.pair(3)[1])
  paths = list(drafts.sampled(draft)((0, 1), 3))
  assert len(paths) == 27
  assert sum(path.prob for path in paths) == pytest.approx(1)
  path = paths[5]
  np.testing.assert_array_equal(path.laws[1], draft((0, 1, path.tokens[0])))


@pytest.mark.parametrize(('text', 'count', 'tokens'), [
    ((0, 1, 2, 0, 1), 2, (2, 0)), ((0, 1, 2, 0, 1), 4, (2, 0, 1)), ((0, 1, 2), 3, ()), ((1, 1), 1, (1,))])
def test_copied_draft(text, count, tokens):
  assert next(drafts.copied(text, count)).tokens == tokens


def test_short_and_empty_drafts_do_occur():
  """Without them the cases of varying counts would show nothing."""
  case = next(case for case in exact_cases.all_cases() if case.name == 'drafts of 0 to gamma tokens')
  counts = {len(path.tokens) for text in [(0, 1), (0, 1, 2), (0, 1, 2, 0), (0, 1, 0, 0, 0)]
            for path in case.drafter(text, case.gamma)}
  assert counts == {0, 1, 2, 3}


def test_gamma_does_adapt():
  case = next(case for case in exact_cases.all_cases() if case.adaptive)
  gammas = [enumeration.gamma_of_round(case, counts) for counts in [(0.0, 0.0), (0.0, 1.0), (2.0, 2.0)]]
  assert gammas == [2, 0, 3]  # at first, after a rejection, after full acceptance


def test_warped_is_normalised_in_float64():
  law = warped(exact_cases.random_table(6, 2, 0), 0.7, 3, 0.8, num_tokens=4)
  assert law.shape == (6, 6, 4)
  np.testing.assert_allclose(law.sum(axis=-1), 1, atol=1e-15)
  assert (law == 0).any()
