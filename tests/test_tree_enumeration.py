"""The exact law of text drafted in trees equals that of plain decoding: every kind of child, tree and filter."""

import numpy as np
import pytest

from experiments import draft_paths, enumeration, exact_cases, tree_cases, tree_enumeration
from experiments import tree_paths as trees
from experiments.enumeration import plain_law, table_law
from experiments.tree_enumeration import TreeCase, coupled_tree_texts, enumerate_tree, tree_law, tree_tokens
from specdec.tree import TreeSpec

LONG = {  # several seconds each; of every kind of children and of every filter there is a shorter one
    *(f'filtered: {name}, likeliest children' for name in exact_cases.FILTERS if name != 'greedy'),
    'likeliest children and a copy', 'all tokens as children', 'with replacement, 4 tokens, nodes per level 3 1',
    'target that forbids tokens, with replacement'}
NOISE_KV = np.random.default_rng(3).gumbel(size=(3, 3))


@pytest.mark.parametrize('case', [
    pytest.param(case, marks=[pytest.mark.slow] * (case.name in LONG)) for case in tree_cases.all_cases()],
                         ids=lambda case: case.name)
def test_multiround_is_exact(case):
  assert enumerate_tree(case).exact, enumerate_tree(case)


@pytest.mark.parametrize(('case', 'propose'), tree_cases.coupled_cases(), ids=lambda x: getattr(x, 'name', ''))
def test_coupled_text_is_the_plain_text_under_every_noise(case, propose):
  plain, drafted = coupled_tree_texts(case, None, NOISE_KV), coupled_tree_texts(case, propose, NOISE_KV)
  assert len(plain) == len(NOISE_KV)**(case.gamma + 1)
  np.testing.assert_array_equal(drafted, plain)


@pytest.mark.parametrize('replacement', [False, True])
def test_paths_of_a_drafter_are_a_law(replacement):
  draft = table_law(exact_cases.pair(3)[1])
  paths = list(trees.drawn(draft, tree_cases.DEEP, replacement).paths((0, 1)))
  assert len(paths) == (3**5 if replacement else 6 * 6 * 3)
  assert sum(path.prob for path in paths) == pytest.approx(1)
  path = paths[-1]
  np.testing.assert_array_equal(path.laws[3], draft((0, 1, path.tokens[0], path.tokens[2])))
  assert path.text_to(5) == (path.tokens[0], path.tokens[2], path.tokens[4])


def test_the_first_child_is_drawn_from_the_law_and_the_second_from_what_is_left():
  law = np.array([0.5, 0.3, 0.2])
  mass = np.zeros((3, 3))
  for path in trees.drawn(lambda text: law, TreeSpec((0, 0))).paths(()):
    mass[path.tokens] += path.prob
  np.testing.assert_allclose(mass, [[0, 0.3, 0.2], [0.3 * 5 / 7, 0, 0.3 * 2 / 7], [0.2 * 5 / 8, 0.2 * 3 / 8, 0]])


@pytest.mark.slow
def test_trees_are_tested_beyond_their_first_branch():
  """All rows are last ones in some round, else the cases would show little."""
  target, draft = map(table_law, exact_cases.pair(3))
  for drafter in (trees.drawn(draft, tree_cases.DEEP), trees.ranked(draft, tree_cases.DEEP)):
    case = TreeCase('', target, drafter, 3)
    last = {row for _, row, prob, _ in tree_enumeration.outcomes(case, tree_enumeration.TreeRule(), [(0, 1)]) if prob}
    assert last == set(range(6))


def test_confident_trees_differ_from_text_to_text():
  draft = table_law(exact_cases.pair(3, seed=5)[1])
  drafter = trees.confident(draft, 3, 2, 5)
  assert len({next(drafter.paths((0, token))).parents for token in range(3)}) > 1


def test_laws_are_laws():
  case = tree_cases.all_cases()[0]
  assert tree_law(case).sum() == pytest.approx(1, abs=1e-12) == plain_law(case).sum()


@pytest.mark.parametrize(('spec', 'more'), [(TreeSpec.chain(1), 0), (TreeSpec((0, 0)), 0.02)])
def test_without_replacement_more_is_kept(spec, more):
  """Of one child there is no difference; of two, a second one that repeats the first is wasted."""
  kept = {False: [], True: []}
  for seed in range(12):
    target, draft = np.random.default_rng(seed).dirichlet(np.ones(6), 2)
    for replacement, found in kept.items():
      drafter = trees.drawn(table_law(draft), spec, replacement)
      found.append(tree_tokens(tree_cases.single(target, drafter, 6)) - 1)
  assert np.mean(kept[False]) - np.mean(kept[True]) >= more
  if not more:
    np.testing.assert_allclose(kept[False], kept[True], atol=1e-12)


@pytest.mark.slow
def test_a_point_mass_tree_keeps_the_mass_of_its_children():
  target, draft = np.random.default_rng(0).dirichlet(np.ones(5), 2)
  best = np.argsort(-draft)[:3]
  case = tree_cases.single(target, trees.ranked(table_law(draft), tree_cases.FLAT), 5)
  assert tree_tokens(case) == pytest.approx(1 + target[best].sum(), abs=1e-12)


def test_one_child_under_each_row_is_the_token_rule():
  target, draft = map(table_law, exact_cases.pair(3, seed=3))
  chain = enumeration.Case('', target, draft_paths.sampled(draft), 3, 3)
  tree = TreeCase('', target, trees.drawn(draft, TreeSpec.chain(3)), 3)
  assert tree_tokens(tree) == pytest.approx(enumeration.tokens_per_round(chain), abs=1e-12)
