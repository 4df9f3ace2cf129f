"""Which tokens a draft may speak of, from a file (Zhao et al., 2025, FR-Spec): a JSON list of the target's ids."""

import json
import os

import numpy as np

from models.errors import InputError


def read_draft_ids(path: str | os.PathLike, num_tokens: int) -> np.ndarray:
  """[U] ascending int32.

  Args:
    path: of the file.
    num_tokens: ids of the target.

  Raises:
    InputError: a file that cannot be read, or that holds anything but ids of the target, each once.
  """
  try:
    with open(path, encoding='utf-8') as file:
      ids = json.load(file)
  except (OSError, ValueError, RecursionError) as error:
    raise InputError(f'{path}: {error}: draft_vocab is a JSON file with a list of token ids') from error
  known = isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < num_tokens for i in ids)
  if not known or len(set(ids)) < len(ids):
    raise InputError(f'{path}: wants a list of token ids in 0..{num_tokens - 1}, each once and at least one')
  return np.sort(np.asarray(ids, np.int32))
