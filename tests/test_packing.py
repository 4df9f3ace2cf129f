"""Packed rows: every token of every document predicted once, nothing attended across documents."""

import dataclasses
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from models.sequence import stack
from specdec.training.next_token import NextToken
from specdec.training.packing import PADDING, PackedRows, pack, predicted_slots
from tests.toys import CONFIG, VOCAB, forward, random_toy

DOCUMENTS = st.lists(st.lists(st.integers(1, VOCAB - 1), min_size=0, max_size=40), max_size=12)
LENGTHS = st.integers(2, 17)


def batch_of(rows: PackedRows) -> dict[str, np.ndarray]:
  return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@given(documents=DOCUMENTS, length=LENGTHS)
def test_every_token_is_predicted_once(documents, length):
  """In order, from the token before it in its document."""
  pairs = []
  for row in pack(documents, length):
    for at in np.flatnonzero(predicted_slots(row['segments'][None])[0]):
      pairs.append((row['tokens'][at], row['tokens'][at + 1]))
  assert pairs == [pair for document in documents for pair in itertools.pairwise(document)]
  assert pack(documents, length).predicted == len(pairs)


@given(documents=DOCUMENTS, length=LENGTHS)
def test_rows(documents, length):
  """Segments count from 1, positions restart in each, nothing stands behind the padding, and there is little of it."""
  rows = list(pack(documents, length))
  for number, row in enumerate(rows):
    assert all(values.shape == (length,) and values.dtype == np.int32 for values in row.values())
    used = np.count_nonzero(row['segments'] != PADDING)
    assert not np.any(row['tokens'][used:]) and not np.any(row['segments'][used:])
    steps = np.diff(row['segments'][:used], prepend=0)
    assert set(steps) <= {0, 1} and steps[0] == 1
    expected = -1
    for position, starts in zip(row['positions'][:used], steps, strict=True):
      expected = 0 if starts else expected + 1
      assert position == expected
    assert used >= length - 1 or number == len(rows) - 1


def test_worked_example():
  rows = pack([[1, 2, 3], [4], [5, 6, 7, 8, 9]], 5)
  assert [row['tokens'].tolist() for row in rows] == [[1, 2, 3, 5, 6], [6, 7, 8, 9, 0]]
  assert [row['segments'].tolist() for row in rows] == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]
  assert [row['positions'].tolist() for row in rows] == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
  assert len(pack([], 5)) == 0
  with pytest.raises(ValueError, match='predict nothing'):
    pack([], 1)


@settings(max_examples=10, deadline=None)
@given(documents=st.lists(st.lists(st.integers(1, VOCAB - 1), min_size=2, max_size=9), min_size=3, max_size=6))
def test_loss_is_that_of_each_document_alone(documents):
  """Documents that end in the row they begin in: the packed loss is the sum of their own."""
  rows = pack(documents, 64)
  model = model_of()
  loss, sums = LOSS(stack(model), batch_of(rows))
  expected = 0.0
  for document in documents:
    padded_T = np.zeros(16, int)
    padded_T[:len(document)] = document
    logp_TV = np.asarray(jax.nn.log_softmax(forward(model, padded_T[None]))[0], np.float64)
    expected -= sum(logp_TV[at, token] for at, token in enumerate(document[1:]))
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert sums['count'] == sum(len(document) - 1 for document in documents)


LOSS = jax.jit(lambda stacked, batch: NextToken().loss(stacked, None, batch, jax.random.key(0)))


def model_of():
  return random_toy(CONFIG, seed=5)


def test_no_gradient_across_documents():
  """The loss of the second document does not move with the embedding of a token that only the first holds."""
  rows = pack([[1, 2, 3, 2], [4, 5, 4, 5]], 8)
  batch = batch_of(rows)
  batch['segments'] = np.where(batch['segments'] == 1, 7, batch['segments'])  # numbers mean nothing

  def second_only(stacked):
    hidden_BTD = stacked(batch['tokens'][:, :-1], batch['positions'][:, :-1], batch['segments'][:, :-1]).hidden_BTD
    return hidden_BTD[:, 4:].sum()

  grads = jax.jit(jax.grad(second_only))(stack(model_of()))
  moved = np.any(np.asarray(grads.embed[...]) != 0, axis=1)
  assert set(np.flatnonzero(moved)) == {4, 5}


def test_rows_with_nothing_to_predict():
  """Fault 42: padding has no loss and no gradient."""
  empty = {name: np.zeros((2, 6), np.int32) for name in ('tokens', 'segments', 'positions')}
  (loss, sums), grads = jax.jit(jax.value_and_grad(
      lambda stacked: NextToken().loss(stacked, None, empty, jax.random.key(0)), has_aux=True))(stack(model_of()))
  assert loss == sums['count'] == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_accuracy():
  """A model that copies: untied head and embedding set so that each token predicts itself."""
  model = random_toy(dataclasses.replace(CONFIG, num_layers=1), seed=6)
  model.layers[0].attn.out.set_value(model.layers[0].attn.out[...] * 0)
  model.layers[0].mlp.down.set_value(model.layers[0].mlp.down[...] * 0)
  table = np.random.default_rng(0).standard_normal((VOCAB, CONFIG.width)).astype(np.float32)
  table /= np.linalg.norm(table, axis=1, keepdims=True)
  model.embed.set_value(table)
  model.head.set_value(table)
  _, sums = LOSS(stack(model), batch_of(pack([[3, 3, 3, 9, 9, 1]], 6)))
  assert sums['accuracy'] == 3 and sums['count'] == 5


def test_rows_from_all_over():
  rows = pack([[number, number] for number in range(1, 51)], 2)
  assert [row['tokens'][0] for row in rows.spread(5)] == [1, 13, 25, 38, 50]
  assert len(rows.spread(80)) == 50 and len(rows.spread(1)) == 1
