"""Typical acceptance against an exact rule: the distance by hand, by enumeration on tables, and on the toy."""


import numpy as np
import pytest

from configs import tiny
from experiments import typical_bias
from experiments.enumeration import table_law
from models.errors import InputError
from models.table import TableModel
from specdec.accept import RULES
from specdec.drafters import Lookup
from specdec.engine import Engine, Params, Request
from specdec.warp import Sampling

SAMPLED = Sampling.create(1.0)


def test_distance_by_hand():
  mean, (low, high) = typical_bias.distances([np.array([1.0, .5]), np.array([.25])])
  assert mean == pytest.approx(1.25 / 3) and (low, high) == pytest.approx((.25, .75))


def test_joint_distance_is_that_of_the_definition():
  """Half the sum of differences over all texts of three tokens, against the shortcut for a text that is certain."""
  vocab = 3
  law_of = table_law(np.random.default_rng(0).dirichlet(np.ones(vocab), vocab))
  text, total = (2, 0, 2), 0.0
  for index in np.ndindex(vocab, vocab, vocab):
    probability = np.prod([law_of((1, *index[:place]))[index[place]] for place in range(3)])
    total += abs(probability - (index == text)) / 2
  assert typical_bias.joint_total_variation(law_of, [text], [(1,)]) == pytest.approx(total)


@pytest.mark.parametrize('certain', [True, False])
def test_law_of_typical_texts_on_tables(certain):
  """The loop's texts are the same for all seeds, and as far from the target as their probability says: not at all only
  where the target is certain."""
  vocab, new_tokens = 7, 4
  rng = np.random.default_rng(1)
  table = np.eye(vocab)[rng.permutation(vocab)] if certain else rng.dirichlet(np.full(vocab, .5), vocab)
  engine = Engine(Lookup(), RULES['typical'], 3, 40, vocab)
  prompts = [(first, 3, first) for first in range(vocab)]
  texts = [engine.generate(Params(TableModel.create(table)), Request(prompts, range(seed, seed + vocab), SAMPLED,
                                                                     new_tokens)).tokens for seed in (0, 50)]
  assert texts[0] == texts[1]
  distance = typical_bias.joint_total_variation(table_law(table), texts[0], prompts)
  assert distance == pytest.approx(0, abs=1e-6) if certain else .3 < distance < 1


def test_rows_on_the_toy():
  config = tiny.get_config('lookup')
  config.sampling.temperature, config.sampling.max_new_tokens, config.engine.capacity = 1.0, 12, 256
  exact, typical = typical_bias.rows_of(config)
  assert (exact['rule'], exact['lossless'], exact['total_variation']) == ('rejection', True, 0)
  assert (typical['rule'], typical['lossless'], typical['emitted']) == ('typical', False, 12)
  assert 0 < typical['total_variation'] < 1 and exact['tokens_per_pass_gain'] == 0
  assert typical['total_variation'] >= typical['total_variation_of_greedy']
  low, high = typical['total_variation_interval']
  assert low <= typical['total_variation'] <= high
  assert typical['likelihood'] == pytest.approx(1 - typical['total_variation'], abs=1e-5)


@pytest.mark.parametrize('variant, rule, message', [
    ('lookup', 'typical', 'is not exact'), ('self', 'rejection', 'judges point masses only')])
def test_wrong_input(variant, rule, message):
  config = tiny.get_config(variant)
  config.accept.rule, config.sampling.temperature = rule, 1.0
  with pytest.raises(InputError, match=message):
    typical_bias.rows_of(config)
