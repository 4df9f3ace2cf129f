"""The map of a draft that may say U of the target's V tokens, as EAGLE-3 heads are published with it.

    d2t [U]    what is to be added to an id of the draft to make it the target's
    t2d [V]    which tokens of the target there are
"""

import numpy as np

from models.errors import InputError
from models.loading.name_maps import TensorFile

TO_TARGET, IN_DRAFT = 'd2t', 't2d'


def map_tensors(ids_U: np.ndarray, num_tokens: int) -> dict[str, np.ndarray]:
  """Both tensors, of ascending ids."""
  ids_U = ids_U.astype(np.int64)
  return {TO_TARGET: ids_U - np.arange(len(ids_U)), IN_DRAFT: np.isin(np.arange(num_tokens), ids_U)}


def mapped_vocab(source: TensorFile) -> int | None:
  """U, where the file has a map."""
  return source.shapes.get(TO_TARGET, (None,))[0]


def read_draft_ids(source: TensorFile, num_draft: int | None, num_tokens: int) -> np.ndarray | None:
  """[U] int32: the target's ids of the tokens that can be drafted, ascending; None for all.

  Args:
    source: the file.
    num_draft: U; None for all.
    num_tokens: V.

  Raises:
    InputError: no map, or one that is none.
  """
  if num_draft is None:
    return None
  if TO_TARGET not in source.shapes:
    raise InputError(f'{source.path} drafts {num_draft} of {num_tokens} tokens, and has no tensor {TO_TARGET!r} that '
                     'says which')
  if source.shapes[TO_TARGET] != (num_draft,) or source.is_float(TO_TARGET):
    raise InputError(f'{source.path}: {TO_TARGET!r} of shape {source.shapes[TO_TARGET]} is no map of {num_draft} '
                     'tokens to integers')
  ids = np.arange(num_draft) + source.read(TO_TARGET).astype(np.int64)
  if ids[0] < 0 or ids[-1] >= num_tokens or (np.diff(ids) <= 0).any():
    raise InputError(f'{source.path}: {TO_TARGET!r} does not map the tokens of the draft, in order, to {num_draft} of '
                     f'{num_tokens} tokens of the target')
  if IN_DRAFT in source.shapes:
    known = np.isin(np.arange(num_tokens), ids)
    if source.shapes[IN_DRAFT] != known.shape or (source.read(IN_DRAFT).astype(bool) != known).any():
      raise InputError(f'{source.path}: {IN_DRAFT!r} names other tokens than {TO_TARGET!r}')
  return ids.astype(np.int32)
