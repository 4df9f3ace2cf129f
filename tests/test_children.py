"""Children of a row: drawn as they say, the likeliest otherwise, in the target's own ids."""

from jax import Array
import jax.numpy as jnp
import numpy as np
import pytest

from models.errors import InputError
from specdec import rng
from specdec.drafters.children import choose
from specdec.drafters.draft_vocab import DraftVocab
from specdec.drafters.protocol import Context
from specdec.warp import Sampling
from tests.toys import GREEDY

LAW = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
PLAIN = Sampling.create(1.0)


def context(rows: int, sampling: Sampling = PLAIN, purpose: rng.Purpose = rng.Purpose.DRAFT) -> Context:
  length_B = jnp.full((rows,), 7)
  return Context(tokens_BL=jnp.zeros((rows, 9), jnp.int32), length_B=length_B, gamma_B=length_B, live_B=length_B > 0,
                 row_key_B=rng.row_keys(jnp.arange(rows)), sampling=sampling, purpose=purpose)


def chosen(kind: str, count: int, context: Context, law: np.ndarray = LAW, vocab: DraftVocab | None = None,
           soften: bool = True) -> tuple[Array, Array | None]:
  logits_BRU = jnp.broadcast_to(jnp.log(jnp.asarray(law)), (len(context.length_B), 1, len(law)))
  return choose(logits_BRU, count, kind, context, 1, vocab or DraftVocab(None, len(law)), soften)


@pytest.mark.parametrize('kind', ['without', 'with'])
def test_drawn_children(kind):
  """Ordered pairs come as often as they should; the law that is reported is the one they come from."""
  rows = 20_000
  tokens_BRK, laws_BRV = chosen(kind, 2, context(rows))
  np.testing.assert_allclose(laws_BRV[0, 0], LAW, atol=1e-6)
  expected = np.outer(LAW, LAW)
  if kind == 'without':
    expected = np.outer(LAW / (1 - LAW), LAW) * (1 - np.eye(len(LAW)))
  count = np.zeros_like(expected)
  np.add.at(count, tuple(np.asarray(tokens_BRK[:, 0]).T), 1)
  assert not count[expected == 0].any()
  seen = expected > 0
  assert np.sum((count - rows * expected)[seen] ** 2 / (rows * expected)[seen]) < 52  # 24 degrees of freedom: 1e-3


def test_children_that_the_law_does_not_have():
  tokens_BRK, laws_BRV = chosen('without', 4, context(50, Sampling.create(1.0, top_k=2)))
  kept = np.take_along_axis(np.asarray(laws_BRV[:, 0]), np.asarray(tokens_BRK[:, 0]), axis=1) > 0
  np.testing.assert_array_equal(kept, np.tile([True, True, False, False], (50, 1)))


@pytest.mark.parametrize('kind', ['top', 'without', 'with'])
def test_children_with_shared_noise(kind):
  """The first is what the target would choose if it had this law."""
  shared = context(50, purpose=rng.Purpose.SHARED)
  tokens_BRK, _ = chosen(kind, 3, shared)
  law_BV = jnp.broadcast_to(jnp.asarray(LAW, jnp.float32), (50, 5))
  first_B = rng.draw(shared.row_key_B, shared.length_B + 1, law_BV, rng.Purpose.SHARED)
  np.testing.assert_array_equal(tokens_BRK[:, 0, 0], first_B)
  assert len(set(np.asarray(first_B).tolist())) > 2


@pytest.mark.parametrize('kind', ['top', 'without', 'with'])
def test_greedy_children(kind):
  """The likeliest, and each with some mass, so that none is passed over."""
  tokens_BRK, laws_BRV = chosen(kind, 3, context(2, GREEDY))
  np.testing.assert_array_equal(tokens_BRK[:, 0], [[0, 1, 2]] * 2)
  assert laws_BRV is None or (laws_BRV[:, 0, :3] > 0).all()
  tokens_BRK, laws_BRV = chosen(kind, 1, context(2, GREEDY), soften=False)
  np.testing.assert_array_equal(tokens_BRK[:, 0], [[0]] * 2)
  assert laws_BRV is None or (laws_BRV[:, 0, 0] == 1).all()


@pytest.mark.parametrize('purpose', [rng.Purpose.DRAFT, rng.Purpose.SHARED])
@pytest.mark.parametrize('kind', ['top', 'without', 'with'])
def test_reduced_vocabulary(kind, purpose):
  """Fault 40: draft id 1 is target id 7, and the law is that of the target's ids; id 9 is padding in a target of 9."""
  law, ids_U = np.array([0.2, 0.7, 0.1]), jnp.array([3, 7, 9])
  for num_tokens, known in ((10, [3, 7, 9]), (9, [3, 7])):
    tokens_BRK, laws_BRV = chosen(kind, 2, context(300, purpose=purpose), law, DraftVocab(ids_U, num_tokens))
    assert set(np.unique(tokens_BRK[:, :, 0])) == ({7} if (kind, purpose) == ('top', rng.Purpose.DRAFT) else {*known})
    if laws_BRV is not None:
      expected_V = np.zeros(num_tokens)
      expected_V[known] = law[:len(known)] / law[:len(known)].sum()
      np.testing.assert_allclose(laws_BRV[0, 0], expected_V, atol=1e-6)


def test_more_children_than_tokens():
  with pytest.raises(InputError, match='has 6 children, and 5 tokens can be drafted'):
    chosen('top', 6, context(2))
