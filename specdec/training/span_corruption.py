"""Span corruption: what an encoder-decoder learns from text alone (Raffel et al., 2020, section 3.1.4).

Of a piece of text some spans are taken out. The source has a gap in the place of each; the target names each gap and
then says what stood there, and ends. All pieces are of one length and lose equally many tokens in equally many spans,
so that no slot of a row is empty.
"""

from collections.abc import Sequence
import dataclasses
from typing import SupportsIndex

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from models.encdec import EncDec
from models.errors import InputError
from models.source import Source
from specdec.training.packing import places


@dataclasses.dataclass(frozen=True)
class Spans:
  """What is taken out of a piece.

  Attributes:
    piece: tokens of a piece.
    density: the share that is taken out.
    mean_span: tokens of a span, on average.
  """

  piece: int
  density: float
  mean_span: float

  def __post_init__(self):
    if not 0 < self.density < 1 or not self.mean_span >= 1:
      raise InputError(f'spans of {self.mean_span} tokens with a density of {self.density}: a span has 1 token or '
                       'more, and a share in (0, 1) is taken out')
    if not self.count <= self.taken <= self.piece - self.count:
      raise InputError(f'{self.taken} of {self.piece} tokens cannot be taken out in {self.count} spans: lower the '
                       'density, or lengthen pieces or spans')

  @property
  def taken(self) -> int:
    """Tokens that are taken out."""
    return round(self.piece * self.density)

  @property
  def count(self) -> int:
    """Spans, and gaps."""
    return max(1, round(self.taken / self.mean_span))

  @property
  def source_tokens(self) -> int:
    """What is left, a gap for each span, and the mark before it all."""
    return self.piece - self.taken + self.count + 1

  @property
  def target_tokens(self) -> int:
    """What was taken out, the gaps, and the end."""
    return self.taken + self.count + 1

  def cut(self, ids: Sequence[int], gaps: Sequence[int], rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """The source and the target, without the mark before and the end; they begin with text and end with a span."""
    kept_sizes = random_parts(self.piece - self.taken, self.count, rng)
    span_sizes = random_parts(self.taken, self.count, rng)
    source, target, start = [], [], 0
    for gap, kept, span in zip(gaps, kept_sizes, span_sizes, strict=False):
      source += [*ids[start:start + kept], gap]
      target += [gap, *ids[start + kept:start + kept + span]]
      start += kept + span
    return source, target


def random_parts(total: int, count: int, rng: np.random.Generator) -> np.ndarray:
  """[count] positive numbers with this sum, all ways equally likely."""
  cuts = np.sort(rng.choice(total - 1, count - 1, replace=False)) + 1
  return np.diff(np.concatenate([[0], cuts, [total]]))


class CorruptedRows(Sequence):
  """Pieces of text as rows: `source` [S] and `tokens` [T + 1], int32; the same row each time it is asked for."""

  def __init__(self, pieces_RL: np.ndarray, spans: Spans, gaps: Sequence[int], end: int, seed: int):
    """`end` marks the beginning of a source, begins what is decoded, and ends it."""
    self._pieces_RL, self._spans, self._gaps, self._end, self._seed = pieces_RL, spans, gaps, end, seed

  def __len__(self) -> int:
    return len(self._pieces_RL)

  def __getitem__(self, index: SupportsIndex) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((self._seed, int(index)))
    source, target = self._spans.cut(self._pieces_RL[index].tolist(), self._gaps, rng)
    end = self._end
    return {'source': np.array([end, *source], np.int32), 'tokens': np.array([end, *target, end], np.int32)}

  def spread(self, count: int) -> list[dict[str, np.ndarray]]:
    """So many rows from all over, or all where there are no more."""
    return [self[index] for index in places(count, len(self))]


@dataclasses.dataclass(frozen=True)
class SpanCorruption:
  """An `Objective` over `CorruptedRows`; the trainable tree is an `EncDec`, nothing is frozen."""

  def loss(self, trainable: EncDec, frozen: None, batch: dict[str, Array],
           key: Array) -> tuple[Array, dict[str, Array]]:
    """Nats, and how many tokens were the likeliest ('accuracy')."""
    source_BS, tokens_BT = batch['source'], batch['tokens']
    source = Source(source_BS, jnp.full(len(source_BS), source_BS.shape[1]))
    hidden_BTD = trainable.over_rows(source, tokens_BT[:, :-1])
    logits_BTV = jnp.einsum('BTD,VD->BTV', hidden_BTD, trainable.lm_head, preferred_element_type=jnp.float32)
    next_BT1 = tokens_BT[:, 1:, None]
    right_BT = jnp.take_along_axis(logits_BTV, next_BT1, axis=-1)[..., 0]
    nats_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - right_BT
    best_BT = right_BT >= jnp.max(logits_BTV, axis=-1)
    return jnp.sum(nats_BT), {'count': jnp.float32(nats_BT.size), 'accuracy': jnp.sum(best_BT).astype(jnp.float32)}
