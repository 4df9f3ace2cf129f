"""Draft models of fewer tokens in files: read back as they were written, refused where they do not fit."""

import dataclasses
import json

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.mesh import make_mesh
from models.decoder import Decoder
from models.errors import InputError
from models.loading import export_hf, load_decoder
from models.loading.reduced import head_rows, is_reduced, load_reduced, save_reduced
from tests.toys import CONFIG, forward, random_toy, target

IDS = np.array([3, 7, 9, 20, 41, 60], np.int32)
TOKENS = jnp.asarray([[1, 5, 9, 30, 2]])


def draft(own_head: bool) -> Decoder:
  """One layer of its own, the target's embedding, and a head of six rows."""
  model = random_toy(dataclasses.replace(CONFIG, num_layers=1), seed=3)
  model.embed, head = target().embed, head_rows(target(), IDS)
  return model.with_head(2 * head if own_head else head)


@pytest.mark.parametrize('own_head', [True, False])
def test_round_trip(tmp_path, own_head):
  """Fault 40: the map is in the file; what is borrowed is not, and comes from the target, also on a mesh."""
  model = draft(own_head)
  save_reduced(model, IDS, tmp_path / 'draft', borrows_head=not own_head)
  export_hf(target(), tmp_path / 'target')
  assert is_reduced(tmp_path / 'draft') and not is_reduced(tmp_path / 'target') and not is_reduced('embedded')
  read, ids = load_reduced(tmp_path / 'draft', target(), attention_block=None)
  np.testing.assert_array_equal(ids, IDS)
  expected = forward(model, TOKENS)
  np.testing.assert_array_equal(forward(read, TOKENS), expected)
  assert read.embed is target().embed
  assert (tmp_path / 'draft' / 'model.safetensors').stat().st_size < 4 * sum(
      leaf.size for leaf in jax.tree.leaves(nnx.state(model.layers))) + 4 * own_head * len(IDS) * CONFIG.width + 3000
  mesh = make_mesh(4, 2)
  with jax.set_mesh(mesh):
    its, _ = load_decoder(tmp_path / 'target', mesh=mesh, attention_block=None)
    read, _ = load_reduced(tmp_path / 'draft', its, mesh=mesh, attention_block=None)
    np.testing.assert_allclose(forward(read, TOKENS), expected, atol=1e-4)


def test_refusals(tmp_path):
  save_reduced(draft(True), IDS, tmp_path, borrows_head=False)
  with pytest.raises(InputError, match='made for a target with 64 tokens and vectors of 32, this one has 64 and 16'):
    load_reduced(tmp_path, random_toy(dataclasses.replace(CONFIG, width=16)))
  fields = json.loads((tmp_path / 'config.json').read_text())
  (tmp_path / 'config.json').write_text(json.dumps(fields | {'borrows': ['embed', 'head']}))
  with pytest.raises(InputError, match=r"'lm_head\.weight' is not part of the model"):
    load_reduced(tmp_path, target())
  (tmp_path / 'config.json').write_text(json.dumps(fields | {'num_hidden_layers': 2}))
  with pytest.raises(InputError, match=r"'model\.layers\.1\..* is missing"):
    load_reduced(tmp_path, target())
