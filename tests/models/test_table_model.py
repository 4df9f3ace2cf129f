"""Table models: the law after a text, read through mask, positions and cache."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.table import TableModel

VOCAB = 3


def table(order: int) -> np.ndarray:
  return np.random.default_rng(order).dirichlet(np.ones(VOCAB), (VOCAB,) * order)


def laws_after(model: TableModel, tokens_BT, rows_BR=None, cache=None) -> tuple[np.ndarray, object]:
  tokens_BT = jnp.asarray(tokens_BT)
  batch, width = tokens_BT.shape
  cache = model.init_cache(batch, 8) if cache is None else cache
  position_BT = cache.length_B[:, None] + jnp.arange(width)
  output = model(tokens_BT, position_BT, cache.causal_mask(width), cache, rows_BR)
  assert output.hidden_BTD.shape == (batch, width, 0)
  return np.exp(output.logits_BRV), output.cache


@pytest.mark.parametrize('order', [0, 1, 2])
def test_law_by_the_last_tokens(order):
  law = table(order)
  tokens_BT = [[2, 1, 1, 0], [0, 2, 0, 1]]
  got, _ = laws_after(TableModel.create(law), tokens_BT)
  for row, tokens in enumerate(tokens_BT):
    for i in range(4):
      context = ([0, 0, *tokens[:i + 1]])[3 + i - order:]  # before the text: id 0
      np.testing.assert_allclose(got[row, i], law[tuple(context)], rtol=1e-6)


def test_rows_that_need_logits():
  model = TableModel.create(table(2))
  every, _ = laws_after(model, [[2, 1, 1, 0], [0, 2, 0, 1]])
  some, _ = laws_after(model, [[2, 1, 1, 0], [0, 2, 0, 1]], jnp.array([[3, 0], [1, 2]]))
  np.testing.assert_array_equal(some, every[[[0, 0], [1, 1]], [[3, 0], [1, 2]]])
  none, cache = laws_after(model, [[2, 1, 1, 0]], jnp.zeros((1, 0), jnp.int32))
  assert none.shape == (1, 0, VOCAB)
  assert cache.k[0][0, 0, :4, 0].tolist() == [2, 1, 1, 0]


def test_rollback_forgets():
  """After rolling back, what was written past the length is invisible; the tokens before it are not."""
  model = TableModel.create(table(2))
  _, cache = laws_after(model, [[2, 1, 1, 0], [0, 2, 0, 1]])
  got, _ = laws_after(model, [[2], [2]], cache=cache.with_length(jnp.array([2, 1])))
  np.testing.assert_allclose(got[:, 0], [table(2)[1, 2], table(2)[0, 2]], rtol=1e-6)


def test_hidden_slots_are_not_seen():
  """A context token that the mask hides counts as missing: the mask is read, as attention reads it."""
  model = TableModel.create(table(2))
  _, cache = laws_after(model, [[1, 2]])
  cache = cache.with_length(jnp.array([2]))
  mask_BTS = cache.causal_mask(1) & (jnp.arange(8) != 1)
  output = model(jnp.array([[1]]), jnp.array([[2]]), mask_BTS, cache)
  np.testing.assert_allclose(np.exp(output.logits_BRV[0, 0]), table(2)[0, 1], rtol=1e-6)


def test_positions_not_slots_order_the_context():
  """In a tree two tokens share a position: the mask says which of them is the parent."""
  model = TableModel.create(table(2))
  cache = model.init_cache(1, 8)
  mask_BTS = jnp.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)
  mask_BTS = jnp.pad(mask_BTS, ((0, 0), (0, 0), (0, 5)))
  output = model(jnp.array([[1, 2, 0]]), jnp.array([[0, 1, 1]]), mask_BTS, cache)
  np.testing.assert_allclose(np.exp(output.logits_BRV[0]), [table(2)[0, 1], table(2)[1, 2], table(2)[1, 0]], rtol=1e-6)


def test_padding_and_sizes():
  model = TableModel.create(table(1), num_padding=2, padding_weight=5.0)
  assert (model.vocab_size, model.order) == (5, 1)
  got, _ = laws_after(model, [[2]])
  np.testing.assert_allclose(got[0, 0], [*table(1)[2], 5, 5], rtol=1e-6)


@pytest.mark.parametrize('law', [
    np.ones((3, 2)) / 2, np.ones((2, 2, 2, 2)) / 2, np.array([0.5, 0.6]), np.array([1.5, -0.5]), np.array(1.0)])
def test_what_is_no_table_of_laws(law):
  with pytest.raises(ValueError, match='law'):
    TableModel.create(law)
