"""Documents into rows of one length, several to a row (sequence packing)."""

from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsIndex

import numpy as np

from models.errors import InputError

PADDING = 0  # the segment of slots that hold nothing


class PackedRows(Sequence):
  """Rows of documents.

  Every token of a document is predicted once, from the tokens of its document before it in the row: none is lost at
  the end of a row, where the rest of a document goes into the next row behind a copy of the last token. Fields of a
  row, each [T + 1] int32:

      tokens      ids; 0 where there is nothing
      segments    which document of the row, from 1; `PADDING` where there is nothing
      positions   of the token in its segment, from 0
  """

  def __init__(self, tokens_RT: np.ndarray, segments_RT: np.ndarray):
    self.tokens_RT, self.segments_RT = tokens_RT, segments_RT

  def __len__(self) -> int:
    return len(self.tokens_RT)

  def __getitem__(self, index: SupportsIndex) -> dict[str, np.ndarray]:
    segments_T = self.segments_RT[index]
    starts_T = np.flatnonzero(np.diff(segments_T, prepend=-1))
    positions_T = np.arange(len(segments_T)) - np.repeat(starts_T, np.diff(starts_T, append=len(segments_T)))
    return {'tokens': self.tokens_RT[index], 'segments': segments_T, 'positions': positions_T.astype(np.int32)}

  def spread(self, count: int) -> 'PackedRows':
    """So many rows from all over, or all where there are no more."""
    index_R = places(count, len(self))
    return PackedRows(self.tokens_RT[index_R], self.segments_RT[index_R])

  @property
  def predicted(self) -> int:
    """Tokens that are predicted, in all rows together."""
    return int(np.sum(predicted_slots(self.segments_RT)))


def places(count: int, there: int) -> np.ndarray:
  """[R]: of `count` rows from all over, or of all where there are no more.

  Raises:
    InputError: for a number that is not positive.
  """
  if count < 1:
    raise InputError(f'train.held_out_rows={count} must be 1 or more')
  return np.linspace(0, there - 1, min(count, there)).round().astype(int)


def predicted_slots(segments_BT):
  """[B, T - 1]: whether the token after each belongs to the same document, so that it is to be predicted."""
  return (segments_BT[:, 1:] == segments_BT[:, :-1]) & (segments_BT[:, 1:] != PADDING)


def pack(documents: Iterable[Sequence[int]], length: int) -> PackedRows:
  """Fills rows of `length` slots with the documents in their order.

  Args:
    documents: ids; one of a single token predicts nothing and is left out.
    length: slots of a row, T + 1; at least 2.
  """
  if length < 2:
    raise ValueError(f'rows of {length} slots predict nothing')
  tokens, segments = [], []
  for row in _rows(documents, length):
    slots = np.zeros((2, length), np.int32)
    end = 0
    for number, piece in enumerate(row, start=1):
      slots[0, end:end + len(piece)], slots[1, end:end + len(piece)] = piece, number
      end += len(piece)
    tokens.append(slots[0])
    segments.append(slots[1])
  shape = -1, length
  return PackedRows(np.asarray(tokens, np.int32).reshape(shape), np.asarray(segments, np.int32).reshape(shape))


def _rows(documents: Iterable[Sequence[int]], length: int) -> Iterator[list[Sequence[int]]]:
  """The pieces of documents that share a row."""
  row, room = [], length
  for document in documents:
    start = 0
    while len(document) - start > 1:
      if room < 2:  # a token alone predicts nothing
        yield row
        row, room = [], length
      piece = document[start:start + room]
      row.append(piece)
      room -= len(piece)
      start += len(piece) - 1  # the last token is what the next piece's first is predicted from
  if row:
    yield row
