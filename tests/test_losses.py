"""Losses of drafts: closed forms, gradients, reduced vocabularies, masks."""

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.training import losses

TARGET, DRAFT = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])  # P3, Q3 of known_faults.md: Σ min = .7
KEPT = np.array([0, 2])  # a draft that may say two of the three


def logs(law) -> jax.Array:
  return jnp.log(jnp.asarray(law, jnp.float32))


@st.composite
def laws(draw, size: int = 5) -> np.ndarray:
  weights = np.array(draw(st.lists(st.floats(0.01, 1), min_size=size, max_size=size)))
  return weights / weights.sum()


@pytest.mark.parametrize('name, expected', [
    ('kl', 0.5 * np.log(2.5) + 0.3 * np.log(0.6) + 0.2 * np.log(2 / 3)), ('total_variation', 0.3),
    ('minus_log_alpha', -np.log(0.7)), ('cross_entropy', -(TARGET * np.log(DRAFT)).sum())])
def test_closed_forms(name, expected):
  """Also of logits that are shifted, and in bfloat16 to its rounding."""
  value = losses.LOSSES[name](logs(TARGET), logs(DRAFT) + 3)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  coarse = losses.LOSSES[name](logs(TARGET), logs(DRAFT).astype(jnp.bfloat16))
  assert coarse.dtype == jnp.float32
  np.testing.assert_allclose(coarse, expected, atol=0.02)


def test_fewer_tokens():
  """Of {0, 2} with target mass .7: the target is not renormalised, so α is what the full laws give."""
  draft = np.array([0.4, 0.6])
  target = logs(TARGET)[KEPT]
  full = np.array([0.4, 0, 0.6])
  alpha = np.minimum(TARGET, full).sum()
  np.testing.assert_allclose(losses.overlap(target, logs(draft)), alpha, rtol=1e-6)
  np.testing.assert_allclose(losses.total_variation(target, logs(draft)), np.abs(TARGET - full).sum() / 2, rtol=1e-6)
  share = TARGET[KEPT] / 0.7
  np.testing.assert_allclose(losses.kl(target, logs(draft)), 0.7 * (share * np.log(share / draft)).sum(), rtol=1e-5)
  np.testing.assert_allclose(losses.kl(target, logs(share)), 0, atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(laws(), laws())
def test_what_holds_of_all(target, draft):
  """α + total variation = 1, Pinsker's inequality, and nothing below zero."""
  target, draft = logs(target), logs(draft)
  overlap = float(losses.overlap(target, draft))
  assert 0 < overlap <= 1 + 1e-6
  np.testing.assert_allclose(losses.total_variation(target, draft), 1 - overlap, atol=1e-6)
  assert losses.kl(target, draft) >= 2 * (1 - overlap) ** 2 - 1e-5
  assert losses.minus_log_alpha(target, draft) >= 1 - overlap - 1e-6
  for loss in losses.LOSSES.values():
    best = loss(target, target)
    assert best <= loss(target, draft) + 1e-5


@settings(max_examples=20, deadline=None)
@given(laws(), laws())
def test_gradients(target, draft):
  """By logits: mass · draft - target of KL and cross entropy."""
  for kept in (np.arange(5), np.array([0, 1, 3])):
    kept_draft = draft[kept] / draft[kept].sum()
    expected = target[kept].sum() * kept_draft - target[kept]
    for loss in (losses.kl, losses.cross_entropy):
      gradient = jax.grad(lambda x, loss=loss, kept=kept: loss(logs(target)[kept], x))(logs(kept_draft))
      np.testing.assert_allclose(gradient, expected, atol=2e-6)


@pytest.mark.parametrize('name', losses.LOSSES)
def test_certain_laws(name):
  """One-hot targets, tokens that the target never says, drafts that are sure: finite, with finite gradients."""
  target = jnp.log(jnp.array([[1.0, 0, 0], [0, 0, 0]]))  # the second: no mass on what can be drafted
  draft = jnp.array([[60.0, -60, -60], [0, 1, 2]])
  value, gradient = jax.value_and_grad(lambda x: losses.LOSSES[name](target, x)[0].sum())(draft)
  np.testing.assert_allclose(value, 0, atol=1e-6)
  assert np.isfinite(gradient).all()
  if name != 'minus_log_alpha':
    assert losses.LOSSES[name](target, draft)[1] == pytest.approx(1.0 if name == 'total_variation' else 0.0)
  gradient = jax.grad(lambda x: losses.LOSSES[name](target, x).sum())(draft)
  assert np.isfinite(gradient).all()


def test_smooth_l1():
  guess, feature = jnp.array([[0.5, 3.0], [0, 0]]), jnp.array([[0.0, 0.0], [0, 0]])
  np.testing.assert_allclose(losses.smooth_l1(guess, feature), [(0.125 + 2.5) / 2, 0])


def test_nothing_counts():
  """Fault 42: what is masked is neither in the sum nor in the gradient, and nothing at all gives 0."""
  draft = jnp.ones((3, 3))
  loss = lambda x, counts: losses.masked_sum(losses.kl(logs(TARGET), x), counts)
  whole, part = (jax.grad(loss)(draft, jnp.array([True, second, True])) for second in (True, False))
  np.testing.assert_array_equal(part[1], 0)
  np.testing.assert_array_equal(part[::2], whole[::2])
  value, gradient = jax.value_and_grad(loss)(draft, jnp.zeros(3, bool))
  assert value == 0 and not gradient.any()
  assert losses.masked_sum(jnp.array([jnp.nan, 2.0]), jnp.array([False, True])) == 2
