"""Typical acceptance against an exact rule: the distance by hand, by enumeration on tables, and on the toy."""


import numpy as np
import pytest

from configs import tiny
from experiments import typical_bias
from experiments.enumeration import table_law
from launch.prompts import load_prompts
from launch.session import Session
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
  laws_TV = [[table_law(table)((*prompt, *text[:place])) for place in range(new_tokens)]
             for prompt, text in zip(prompts, texts[0], strict=True)]
  distance, _ = typical_bias.distances([np.array(laws_TV)[row, range(new_tokens), text]
                                        for row, text in enumerate(texts[0])])
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


def test_texts_are_scored_as_they_were_drawn():
  """At temperature 1, with no filter, what a pass over the text gives is what the loop recorded of each token."""
  config = tiny.get_config('lookup')
  config.sampling.temperature, config.sampling.max_new_tokens, config.engine.capacity = 1.0, 12, 256
  config.data.limit = 1
  session, prompts = Session.from_config(config), load_prompts(config.data)
  said, = session.generate(prompts)
  emitted, likeliest = typical_bias.emitted_probs(session, prompts[0], said)
  assert np.log(emitted) == pytest.approx(said.logprobs, abs=1e-4)
  assert (likeliest >= emitted).all() and (likeliest > emitted + 1e-3).any()


@pytest.mark.parametrize('variant, fields, message', [
    ('lookup', {'accept.rule': 'typical'}, 'is not exact'),
    ('self', {}, 'judges point masses only'),
    ('self', {'sampling.temperature': 0.0}, 'judges point masses only'),
    ('lookup', {'target.source': 'random:tiny_encdec_target'}, 'targets without an encoder')])
def test_wrong_input(variant, fields, message, monkeypatch):
  monkeypatch.setattr(Session, 'generate', None)
  config = tiny.get_config(variant).unlock()
  config.sampling.temperature = 1.0
  config.update_from_flattened_dict(fields)
  config.engine.source_capacity = 64 if 'encdec' in config.target.source else 0
  with pytest.raises(InputError, match=message):
    typical_bias.rows_of(config)


def test_lenience_is_refused():
  config = tiny.get_config('lookup').unlock()
  config.accept.lenience = .5
  with pytest.raises(InputError, match=r'accept\.lenience=0\.5'):
    typical_bias.rows_of(config)
