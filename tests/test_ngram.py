"""Unigrams and bigrams as a draft: their laws from counts, and that text stays what it is."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny
from experiments.chi_square import Loop, chi_square, make_engine, sample
from experiments.exact_cases import REPEATING, pair
from launch.build_drafter import build_drafter
from launch.ngram_counts import DISCOUNT, laws_of, read_tokens
from launch.session import Session
from models.byte_tokenizer import ByteTokenizer
from models.errors import InputError
from models.table import TableModel
from specdec.accept import RULES
from specdec.drafters import Ngram
from specdec.engine import Params
from specdec.warp import Sampling
from tests import encdec_toys, toys

TOKENS = np.array([0, 1, 2, 0, 1, 2, 0, 2, 2, 1, 0, 1])


def dense(laws, num_tokens: int) -> np.ndarray:
  return np.asarray(laws.after(jnp.arange(num_tokens)))


def test_unigrams_are_the_counts():
  law = dense(laws_of(TOKENS, 4, 0), 4)
  np.testing.assert_allclose(law, np.tile(np.array([4, 4, 4, 0]) / 12, (4, 1)), atol=1e-7)


@pytest.mark.parametrize('followers', [1, 2, 4])
def test_bigrams_by_hand(followers):
  """After 0 come 1 (three times) and 2 (once): each count less .75, the rest by unigrams."""
  law = dense(laws_of(TOKENS, 4, followers), 4)
  np.testing.assert_allclose(law.sum(axis=1), 1, atol=1e-6)
  unigram_V = np.array([4, 4, 4, 0]) / 12
  own_V = np.array([0, 3 - DISCOUNT, (1 - DISCOUNT) * (followers > 1), 0]) / 4
  np.testing.assert_allclose(law[0], own_V + (1 - own_V.sum()) * unigram_V, atol=1e-6)
  np.testing.assert_allclose(law[3], unigram_V, atol=1e-7, err_msg='never seen: unigrams')


def test_more_followers_than_tokens_and_pairs_kept_by_count():
  rng = np.random.default_rng(0)
  tokens = rng.choice(8, 400, p=np.arange(1, 9) / 36)
  whole, cut = dense(laws_of(tokens, 8, 8), 8), laws_of(tokens, 8, 3)
  np.testing.assert_allclose(whole.sum(axis=1), 1, atol=1e-6)
  counts = np.zeros((8, 8))
  np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
  for token in range(8):
    kept = set(np.asarray(cut.followers_VK[token]).tolist())
    assert min(counts[token, list(kept)]) >= max(counts[token, [t for t in range(8) if t not in kept]])


def drafting(num_tokens: int, followers: int = 4):
  return laws_of(np.random.default_rng(1).integers(0, num_tokens, 500), num_tokens, followers)


@pytest.mark.parametrize(('rule', 'gamma'), [
    pytest.param(rule, gamma, marks=[pytest.mark.slow] * ((rule, gamma) != ('coupled', 4)))
    for rule in ('rejection', 'block', 'coupled') for gamma in (1, 4)])
def test_greedy_text_of_a_decoder(rule, gamma):
  result, _ = toys.decode(toys.engine(Ngram(toys.VOCAB), gamma, rule), Params(toys.target(), drafting(toys.VOCAB)),
                          toys.request(64))
  assert result.tokens == toys.greedy_text()
  assert result.total.drafted > 0


@pytest.mark.slow
def test_text_of_an_encoder_decoder():
  """Greedy, and sampled under the coupled rule."""
  params = Params(encdec_toys.target(), drafting(encdec_toys.VOCAB))
  result, _ = toys.decode(encdec_toys.engine(Ngram(encdec_toys.VOCAB), 3), params, encdec_toys.request(40))
  assert result.tokens == encdec_toys.greedy_text()


@pytest.mark.parametrize('rule', [
    'rejection', *(pytest.param(rule, marks=pytest.mark.slow) for rule in ('block', 'coupled'))])
def test_law_of_the_loop(rule):
  """χ² of three tokens, filters on."""
  tables = pair(4, seed=3)
  loop = Loop(make_engine(Ngram(4), RULES[rule], 3, 4), Params(TableModel.create(tables[0]), drafting(4)), tables[0],
              REPEATING, 2000)
  drawn = sample(loop, 8000, 3, Sampling.create(0.8, 0, 0.95))
  assert chi_square(drawn.counts(4), loop.law(3, 0.8, 0, 0.95)).p_value > 1e-3
  assert 0 < drawn.metrics.alpha < 1


def test_the_law_that_is_reported_is_the_one_drawn_from():
  """Overlap of a table with itself is 1: a target that is the bigram table accepts every draft."""
  laws = drafting(6)
  target = TableModel.create(np.float64(dense(laws, 6)) / np.float64(dense(laws, 6)).sum(axis=1, keepdims=True))
  eng = dataclasses.replace(toys.engine(Ngram(6), 4), capacity=80, num_tokens=6)
  result, _ = toys.decode(eng, Params(target, laws), toys.request(60, toys.SAMPLED, prompts=[[1], [2], [3]]))
  assert result.total.alpha > 0.99 and result.total.overlap == pytest.approx(1, abs=1e-3)


def config_of(name: str, counts: str, **fields):
  config = tiny.get_config('none').copy_and_resolve_references()
  with config.unlocked():
    config.drafter = {'name': name, 'counts': counts} | fields
    config.engine.gamma = 3
  return config


@pytest.mark.parametrize(('name', 'fields'), [('unigram', {}), ('bigram', {'followers': 8})])
def test_from_a_config(tmp_path, name, fields):
  path = tmp_path / 'counts.txt'
  path.write_text('a b a b a c')
  session = Session.from_config(config_of(name, str(path), **fields))
  law_V = dense(session.params.draft, 257)[ord('a')]
  assert law_V[ord(' ')] == pytest.approx(((3 - DISCOUNT) / 3 + DISCOUNT / 3 * 5 / 11) if fields else 5 / 11, abs=1e-6)
  np.save(tmp_path / 'counts.npy', np.frombuffer(b'a b a b a c', np.uint8))
  _, again = build_drafter(config_of(name, str(tmp_path / 'counts.npy'), **fields), session.params.target,
                           session.tokenizer)
  np.testing.assert_array_equal(dense(again, 257), dense(session.params.draft, 257))


@pytest.mark.parametrize(('file', 'content', 'message'), [
    ('a.csv', b'x', '.txt file of text'), ('a.txt', b'', 'holds no row of token ids'),
    ('a.txt', b'\xff\xfe', 'cannot be read'), ('a.npy', b'x', 'cannot be read'), ('none.txt', None, 'No such file')])
def test_counts_that_are_refused(tmp_path, file, content, message):
  if content is not None:
    (tmp_path / file).write_bytes(content)
  with pytest.raises(InputError, match=message) as caught:
    read_tokens(str(tmp_path / file), ByteTokenizer())
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(('tokens', 'message'), [
    (np.array([300]), 'ids outside of 0..256'), (np.zeros((2, 2), int), 'no row'), (np.zeros(3), 'no row')])
def test_arrays_that_are_refused(tmp_path, tokens, message):
  np.save(tmp_path / 'a.npy', tokens)
  with pytest.raises(InputError, match=message):
    read_tokens(str(tmp_path / 'a.npy'), ByteTokenizer())


def test_followers_are_checked(tmp_path):
  with pytest.raises(InputError, match=r'drafter.followers=0'):
    Session.from_config(config_of('bigram', 'x.txt', followers=0))
