"""The file of the tokens that a draft may say, from the config to the text."""

import json

import jax
import numpy as np
import pytest

from configs import tiny
from launch.draft_ids import read_draft_ids
from launch.prompts import load_prompts
from launch.session import Session
from models.errors import InputError
from specdec.drafters import ReducedModel


def written(tmp_path, content) -> str:
  path = tmp_path / 'ids.json'
  path.write_text(content if isinstance(content, str) else json.dumps(content))
  return str(path)


def test_ids_are_sorted(tmp_path):
  np.testing.assert_array_equal(read_draft_ids(written(tmp_path, [5, 0, 3]), 6), [0, 3, 5])


@pytest.mark.parametrize('content', [[], [0, 0], [6], [-1], [1.5], [True], ['1'], {'ids': [1]}, '[1,', 'null'])
def test_what_is_no_list_of_ids(tmp_path, content):
  with pytest.raises(InputError, match=r'ids\.json: .*list'):
    read_draft_ids(written(tmp_path, content), 6)


def test_no_file(tmp_path):
  with pytest.raises(InputError, match='No such file'):
    read_draft_ids(tmp_path / 'none.json', 6)


def session_of(variant: str, path: str, data: int = 1, model: int = 1) -> Session:
  config = tiny.get_config(variant)
  config.mesh.data, config.mesh.model = data, model
  config.drafter.draft_vocab = path
  return Session.from_config(config)


def texts(*arguments: str | int) -> tuple[Session, list[str]]:
  session = session_of(*arguments)
  return session, [completion.text for completion in session.generate(load_prompts(session.config.data))]


def test_a_draft_has_the_tokens_of_its_file(tmp_path):
  ids = list(range(0, 256, 2))
  draft = session_of('model', written(tmp_path, ids)).params.draft
  assert isinstance(draft, ReducedModel) and draft.model.lm_head.shape[0] == 128
  np.testing.assert_array_equal(draft.ids_U, ids)


@pytest.mark.slow
@pytest.mark.parametrize('variant', ['self', 'model'])
def test_text_stays_with_fewer_drafted_tokens(tmp_path, variant):
  """Greedy, on one device and split over eight."""
  path = written(tmp_path, list(range(0, 256, 2)))
  session, reduced = texts(variant, path)
  assert isinstance(session.params.draft, ReducedModel)
  assert session.params.draft.model.lm_head.shape[0] == 128
  assert reduced == texts(variant, '')[1]
  with jax.set_mesh(None):  # the session sets its own: here it ends with the test
    assert texts(variant, path, 4, 2)[1] == reduced
