"""Chinchilla's schedule and the optimiser: tokens from parameters, cosine to a tenth, what decays."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.decoder import Decoder
from models.errors import InputError
from models.sequence import stack
from specdec.training.config import TrainConfig
from specdec.training.optimizer import adamw, decayed
from specdec.training.schedule import learning_rate, planned_tokens, steps_for
from tests.toys import CONFIG

TRAIN = TrainConfig(steps=101, batch=1, learning_rate=3e-4, warmup_steps=10)


def test_tokens_from_parameters():
  """Hoffmann et al. (2022): 70B parameters, 1.4T tokens."""
  assert planned_tokens(70_000_000_000) == 1_400_000_000_000
  assert planned_tokens(10, 1.55) == 16
  assert steps_for(1_400, batch=3, row_tokens=100) == 5 and steps_for(1, 8, 128) == 1
  with pytest.raises(InputError, match='must be positive'):
    planned_tokens(10, 0.0)


def test_cosine_to_a_tenth():
  rate = learning_rate(TRAIN)
  rates = np.array([rate(step) for step in range(101)])
  np.testing.assert_allclose(rates[:10], 3e-4 * np.arange(1, 11) / 11, rtol=1e-5)
  assert rates[10] == pytest.approx(3e-4) == rates.max() and rates[100] == pytest.approx(3e-5)
  assert np.all(np.diff(rates[10:]) < 0) and rates[55] == pytest.approx(3e-4 * 0.55)
  assert rate(1000) == pytest.approx(3e-5)


def test_without_warm_up():
  rate = learning_rate(dataclasses.replace(TRAIN, warmup_steps=0))
  assert rate(0) == pytest.approx(3e-4)
  one_step = learning_rate(dataclasses.replace(TRAIN, steps=1, warmup_steps=0))
  assert np.isfinite(one_step(0))


@pytest.mark.parametrize('changes', [{}, {'qkv_bias': True, 'qk_norm': True}, {'positions': 'relative'}], ids=str)
def test_norms_and_biases_do_not_decay(changes):
  """With no gradient, what decays shrinks by rate x decay, and nothing else moves."""
  stacked = stack(Decoder(dataclasses.replace(CONFIG, **changes), nnx.Rngs(0)))
  names = {jax.tree_util.keystr(path, simple=True, separator='.').removesuffix('.value'): value
           for path, value in jax.tree_util.tree_leaves_with_path(decayed(stacked))}
  assert names['embed'] and names['layers.attn.qkv'] and names['layers.mlp.down']
  assert not names['final_norm'] and not names['layers.attn_norm']
  assert not any(names.get(f'layers.attn.{name}') for name in ('qkv_bias', 'q_norm', 'content_bias', 'position_bias'))
  optimizer = adamw(dataclasses.replace(TRAIN, warmup_steps=0, weight_decay=0.5))
  updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, stacked), optimizer.init(stacked), stacked)
  np.testing.assert_allclose(updates.embed[...], -0.5 * 3e-4 * stacked.embed[...], rtol=1e-5)
  assert not np.any(updates.final_norm[...])


def test_clipping():
  """By the norm of all parameters together; 0 switches it off."""
  parameters, grads = {'a': jnp.zeros(2), 'b': jnp.zeros(1)}, {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([4.0])}
  for norm, expected in ((1.0, 0.6), (0.0, 3.0)):
    _, state = adamw(dataclasses.replace(TRAIN, clip_norm=norm, beta1=0.0)).update(
        grads, adamw(dataclasses.replace(TRAIN, clip_norm=norm, beta1=0.0)).init(parameters), parameters)
    first = optax.tree_utils.tree_get(state, 'mu')
    assert first['a'][0] == pytest.approx(expected)
