"""From logits to the law, against plain numpy: order of the filters, ties, edges (faults 19, 21, 22, 23, 25, 27)."""

import functools

from hypothesis import assume, given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import rng
from specdec.accept import RULES, rejection
from specdec.draft import Draft
from specdec.warp import Sampling, keep_top_k, keep_top_p, warp

VOCAB = 7
jit_warp = jax.jit(warp)
jit_draw = jax.jit(rng.draw, static_argnames='purpose')


def law_of(logits, temperature=1.0, top_k=0, top_p=1.0) -> np.ndarray:
  return np.asarray(jit_warp(jnp.asarray(logits), Sampling.create(temperature, top_k, top_p)))


def reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
  """One row in float64, by sorting: temperature, then top-k, then top-p, each with the ties of its last token."""
  scaled = np.asarray(logits, np.float64) / temperature
  law = np.exp(scaled - scaled.max())
  law /= law.sum()
  descending = np.sort(law)[::-1]
  if 0 < top_k < len(law):
    law = np.where(law >= descending[top_k - 1], law, 0)
    law /= law.sum()
  if top_p < 1:
    descending = np.sort(law)[::-1]
    last = np.argmax(np.cumsum(descending) >= top_p)
    law = np.where(law >= descending[last], law, 0)
    law /= law.sum()
  return law


def boundaries(logits: np.ndarray, temperature: float, top_k: int) -> np.ndarray:
  """The masses at which top-p takes in one more token."""
  return np.cumsum(np.sort(reference(logits, temperature, top_k, 1.0))[::-1])


half_steps = st.integers(-8, 8).map(lambda n: n / 2)  # many ties


@settings(max_examples=200, deadline=None)
@given(st.lists(half_steps, min_size=VOCAB, max_size=VOCAB), st.sampled_from([0.3, 0.7, 1.0, 1.5]),
       st.sampled_from([0, 2, 3, 5, VOCAB]), st.floats(0.05, 0.9999) | st.just(1.0))
def test_equals_the_reference(logits, temperature, top_k, top_p):
  logits = np.array(logits, np.float32)
  assume(np.abs(boundaries(logits, temperature, top_k)[:-1] - top_p).min() > 1e-5)  # there rounding decides
  law = law_of(logits, temperature, top_k, top_p)
  np.testing.assert_allclose(law, reference(logits, temperature, top_k, top_p), atol=2e-6)
  assert law.sum() == pytest.approx(1, abs=1e-6)


@functools.partial(jax.jit, static_argnames='keep')
def kept(keep, law, bound):
  return keep(law, bound) > 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=11, max_size=11), st.integers(1, 2**12))
def test_top_p_by_bisection_equals_sorting_to_the_bit(counts, wanted):
  """Probabilities that are multiples of 2^-12 add up without rounding, so even an exactly met bound must agree."""
  assume(sum(counts) <= 2**12)
  law = np.append(counts, 2**12 - sum(counts)) / 2**12
  descending = np.sort(law)[::-1]
  least = descending[np.argmax(np.cumsum(descending) >= wanted / 2**12)]
  got = kept(keep_top_p, jnp.asarray(law, jnp.float32), jnp.float32(wanted / 2**12))
  np.testing.assert_array_equal(got, (law >= least) & (law > 0))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=VOCAB, max_size=VOCAB), st.integers(1, VOCAB - 1))
def test_top_k_keeps_ties(weights, top_k):
  law = np.array(weights) / sum(weights)
  got = kept(keep_top_k, jnp.asarray(law, jnp.float32), jnp.int32(top_k))
  np.testing.assert_array_equal(got, np.array(weights) >= np.sort(weights)[::-1][top_k - 1])


def test_top_p_over_a_large_vocabulary():
  """Sums over many tiles, and a length that is no multiple of a tile."""
  law = np.random.default_rng(0).dirichlet(np.full(1003, 0.1)).astype(np.float32)
  got = np.asarray(kept(keep_top_p, jnp.asarray(law), jnp.float32(0.9)))
  exact = law.astype(np.float64)
  smallest = exact[got].min()
  assert exact[got].sum() >= 0.9 - 1e-6
  assert exact[exact > smallest].sum() < 0.9 + 1e-6  # one token fewer would not do


def test_order_is_temperature_then_top_k_then_top_p():
  base = np.array([0.45, 0.25, 0.15, 0.1, 0.05])
  right = law_of(np.log(base), 0.5, 0, 0.8)
  swapped = law_of(jnp.log(law_of(np.log(base), 1.0, 0, 0.8)), 0.5)
  np.testing.assert_allclose(right, np.array([0.2025, 0.0625, 0, 0, 0]) / 0.265, atol=1e-6)
  assert np.abs(right - swapped).sum() / 2 == pytest.approx(0.078, abs=5e-4)


def test_fault_22_top_p_after_top_k_is_a_share_of_what_top_k_left():
  np.testing.assert_allclose(law_of(np.log([0.4, 0.3, 0.2, 0.1]), 1, 3, 0.75), [4 / 7, 3 / 7, 0, 0], atol=1e-6)
  flat = law_of(np.zeros(10, np.float32), 1, 1, 0.8)
  np.testing.assert_array_equal(flat, np.eye(10)[0])


def test_fault_19_more_dimensions_are_rows():
  """Row for row what one row gives, in every filter."""
  logits = np.random.default_rng(1).normal(size=(2, 3, VOCAB)).astype(np.float32) * 3
  for values in [(0.7, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.6), (0.8, 4, 0.7), (0.0, 0, 1.0)]:
    rows = [[law_of(row, *values) for row in block] for block in logits]
    np.testing.assert_allclose(law_of(logits, *values), rows, atol=1e-6)
    assert values == (0.7, 0, 1.0) or (law_of(logits, *values) == 0).any()


@pytest.mark.parametrize('top_k', [0, -1, None, 3, 8])
def test_fault_21_disabled_top_k_keeps_every_token(top_k):
  law = law_of(np.log([0.5, 0.3, 0.2]), 1.0, top_k)
  np.testing.assert_allclose(law, [0.5, 0.3, 0.2], atol=1e-6)
  keys, position = rng.row_keys(jnp.arange(300)), jnp.zeros((300,), jnp.int32)
  for purpose in (rng.Purpose.EMIT, rng.Purpose.SHARED):
    tokens = jit_draw(keys, position, jnp.broadcast_to(law, (300, 3)), purpose=purpose)
    assert set(np.unique(tokens)) == {0, 1, 2}


def test_fault_21_top_k_of_one_is_greedy():
  logits = np.random.default_rng(2).normal(size=(5, VOCAB)).astype(np.float32)
  logits[3] = 0  # ties: the first, as argmax takes
  np.testing.assert_array_equal(law_of(logits, 1.0, 1), law_of(logits, 0.0))
  np.testing.assert_array_equal(law_of(logits, 0.0), np.eye(VOCAB)[logits.argmax(axis=-1)])


@pytest.mark.parametrize('temperature', [0.0, 1e-10, 1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_fault_23_tiny_temperatures(temperature, dtype):
  logits = jnp.asarray([[1e4, -1e4, 3.0, 1e4 - 64], [0.5, 0.25, 0.5, -1.0], [-1e4, -2e4, -3e4, -3e4]], dtype)
  law = law_of(logits, temperature)
  assert np.isfinite(law).all()
  np.testing.assert_allclose(law.sum(axis=-1), 1, atol=1e-6)
  greedy = np.eye(4)[[0, 0, 0]]
  if temperature <= 1e-5:
    np.testing.assert_array_equal(law, greedy)
  else:
    np.testing.assert_allclose(law, [greedy[0], [0.5, 0, 0.5, 0], greedy[2]], atol=1e-6)


@pytest.mark.parametrize('rule', RULES)
def test_fault_23_no_randomness_at_temperature_zero(rule):
  """The first draft is right, the second right then wrong, the third wrong: the same verdict under every key."""
  laws_BTV = np.tile(np.eye(VOCAB)[[4, 2, 6]], (3, 1, 1)).astype(np.float32)
  tokens_BM = jnp.array([[4, 2], [4, 3], [1, 2]])
  verdict = jax.jit(RULES[rule].__call__)
  for laws_BMV in (None, jax.nn.one_hot(tokens_BM, VOCAB)):
    draft = Draft(tokens_BM, laws_BMV, jnp.full((3,), 2))
    for seed in range(20):
      keys = rng.row_keys(jnp.arange(3) + 3 * seed)
      got = verdict(keys, jnp.zeros((3,), jnp.int32), draft, jnp.asarray(laws_BTV))
      assert (got.num_accepted_B.tolist(), got.next_token_B.tolist()) == ([2, 1, 0], [6, 2, 4])


LAW = np.array([0.5, 0.25, 0.125, 0.125], np.float32)


@pytest.mark.parametrize('other', [LAW, np.nextafter(LAW, np.float32(2)), np.nextafter(LAW, np.float32(-1))])
def test_fault_25_refusal_without_a_residual(other):
  """Draft and target equal to the last bit, and refused all the same."""
  draft = Draft(jnp.array([[1]]), jnp.asarray(other)[None, None], jnp.array([1]))
  target_BTV = jnp.broadcast_to(LAW, (1, 2, 4))
  law = np.asarray(rejection.next_law(draft, target_BTV, jnp.array([0])))[0]
  assert np.isfinite(law).all() and law.sum() == pytest.approx(1)
  if (other >= LAW).all():  # no residual at all
    np.testing.assert_array_equal(law, LAW)


@pytest.mark.parametrize(('target_prob', 'draft_prob', 'uniform', 'kept'), [
    (0.0, 0.5, 0.0, False), (0.0, 0.0, 0.0, False), (0.5, 0.0, 0.999, True), (0.25, 0.5, 0.0, True),
    (0.25, 0.5, 0.499, True), (0.25, 0.5, 0.5, False), (0.5, 0.5, 0.999, True)])
def test_fault_25_acceptance_at_the_edges(target_prob, draft_prob, uniform, kept):
  """What the target forbids is never kept; what the draft could not have drawn, but for the target, always."""
  laws = [jnp.array([prob, 1 - prob]) for prob in (draft_prob, target_prob)]
  draft = Draft(jnp.array([[0]]), laws[0][None, None], jnp.array([1]))
  target_BTV = jnp.broadcast_to(laws[1], (1, 2, 2))
  num_accepted_B = rejection.num_accepted(jnp.array([[uniform]]), draft, target_BTV)
  assert bool(num_accepted_B[0]) == kept
  law = rejection.next_law(draft, target_BTV, num_accepted_B)
  assert jnp.isfinite(law).all() and jnp.sum(law) == pytest.approx(1)


@pytest.mark.parametrize('purpose', [rng.Purpose.EMIT, pytest.param(rng.Purpose.SHARED, marks=pytest.mark.slow)])
def test_fault_27_flat_bfloat16_logits_over_a_large_vocabulary(purpose):
  vocab, rows, draws = 32_000, 250, 2_500
  law_BV = jnp.broadcast_to(law_of(jnp.zeros((vocab,), jnp.bfloat16)), (rows, vocab))
  draw = lambda keys: jit_draw(keys, jnp.zeros((rows,), jnp.int32), law_BV, purpose=purpose)
  tokens = np.concatenate([draw(rng.row_keys(first + jnp.arange(rows))) for first in range(0, draws, rows)])
  assert tokens.mean() == pytest.approx(16_000, abs=600)
  assert len(np.unique(tokens)) > 0.9 * vocab * (1 - np.exp(-draws / vocab))  # nearly as many as chance leaves


def test_law_is_float32_from_any_type():
  logits = jnp.asarray([0.0, 1.0, 2.0], jnp.bfloat16)
  assert law_of(logits).dtype == np.float32
  np.testing.assert_allclose(law_of(logits), reference(np.arange(3), 1, 0, 1.0), atol=1e-6)


def test_hidden_and_broken_logits():
  """Minus infinity hides a token; a NaN or plus infinity breaks the whole row, and only that row."""
  logits = np.array([[0.0, -np.inf, 1.0], [0.0, np.nan, 1.0], [0.0, np.inf, 1.0], [-np.inf] * 3], np.float32)
  for values in [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 2, 0.9)]:
    law = law_of(logits, *values)
    assert law[0, 1] == 0 and law[0].sum() == pytest.approx(1)
    assert np.isnan(law[1:]).all()


@pytest.mark.parametrize(('values', 'message'), [
    ((-1.0, 0, 1.0), 'temperature'), ((float('nan'), 0, 1.0), 'temperature'), ((float('inf'), 0, 1.0), 'temperature'),
    ((1.0, 0, 0.0), 'top_p'), ((1.0, 0, 1.5), 'top_p')])
def test_wrong_values(values, message):
  with pytest.raises(ValueError, match=message):
    Sampling.create(*values)


def test_changing_values_compiles_nothing(count_compiles):
  logits = jnp.zeros((2, VOCAB))
  samplings = [Sampling.create(*values) for values in [(0.0, 0, 1.0), (1.0, 3, 0.9), (0.7, 0, 0.5)]]
  jit_warp(logits, samplings[0])
  with count_compiles() as count:
    for sampling in samplings:
      jit_warp(logits, sampling)
  assert count.total == 0
