"""What a draft would get accepted on texts of the target, without decoding: tables for trees, and simulated steps.

Everything comes from one pass: which choice of the draft, at every level, each text's next tokens are, given the text's
own tokens on the way (`Guesser.ranks`). The texts were drawn by the target, so an entry of the table is the probability
that a point mass of that rank is kept (`specdec.tree_planner`), whatever the temperature of the texts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
from jax import Array
import numpy as np

from specdec.training.guesses import UNASKED
from specdec.tree import TreeSpec


class Guesser(Protocol):
  """What can be measured: the objectives of drafts."""

  def ranks(self, trainable: Any, frozen: Any, batch: dict[str, Array], levels: int) -> Array:
    """[B, T, M]: of a draft of M levels whose newest token is the row's i-th, which choice of level m token i + 1 + m
    is; `guesses.UNKNOWN` for one that cannot be drafted, `UNASKED` where there is none or it is no answer."""
    ...


def measured_ranks(guesser: Guesser, frozen: Any, rows: Sequence[dict[str, np.ndarray]], batch: int,
                   levels: int) -> Callable[[Any], np.ndarray]:
  """From what is trained to ranks [N, T, M] of N rows; compiled once. A last batch that is short is filled up."""
  ranks = jax.jit(lambda trainable, frozen, batch: guesser.ranks(trainable, frozen, batch, levels))

  def measure(trainable: Any) -> np.ndarray:
    found = [np.asarray(ranks(trainable, frozen, stacked)) for stacked in _batches(rows, batch)]
    return np.concatenate(found)[:len(rows)]

  return measure


def _batches(rows: Sequence[dict[str, np.ndarray]], batch: int) -> Iterator[dict[str, np.ndarray]]:
  for start in range(0, len(rows), batch):
    some = [rows[min(index, len(rows) - 1)] for index in range(start, start + batch)]
    yield {name: np.stack([row[name] for row in some]) for name in some[0]}


def acceptance_table(ranks_NTM: np.ndarray, num_ranks: int) -> np.ndarray:
  """[K, I] for `tree_planner`: of rows of depth k that are kept, how many have their child of rank i kept.

  A row is kept where the text's tokens up to it are among the `num_ranks` first choices.
  """
  ranks_PM = ranks_NTM.reshape(-1, ranks_NTM.shape[-1])
  kept_P, table = np.ones(len(ranks_PM), bool), []
  for rank_P in ranks_PM.T:
    asked = rank_P[kept_P & (rank_P != UNASKED)]
    table.append([float(np.mean(asked == i)) if len(asked) else 0.0 for i in range(num_ranks)])
    kept_P &= (rank_P >= 0) & (rank_P < num_ranks)
  return np.array(table)


def kept_lengths(tree: TreeSpec, ranks_NTM: np.ndarray) -> np.ndarray:
  """[N, T]: how many nodes of the tree a step would keep whose newest token is the i-th."""
  child_RI = np.full((tree.num_nodes + 1, tree.branching + 1), -1)  # the last column: no such child
  for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
    child_RI[parent, rank] = node + 1
  row_NT, length_NT = np.zeros(ranks_NTM.shape[:2], int), np.zeros(ranks_NTM.shape[:2], int)
  for level in range(min(tree.levels, ranks_NTM.shape[-1])):
    rank_NT = ranks_NTM[..., level]
    known_NT = (rank_NT >= 0) & (rank_NT < tree.branching)
    row_NT = np.where(row_NT >= 0, child_RI[row_NT, np.where(known_NT, rank_NT, tree.branching)], -1)
    length_NT += row_NT >= 0
  return length_NT


def simulated_tokens_per_pass(tree: TreeSpec, ranks_NTM: np.ndarray) -> float:
  """Tokens over steps, if the texts were decoded again with this draft: what `metrics` measures in the loop.

  Each step goes on behind what the one before kept and its correction or bonus token. Greedy texts come out as they
  are decoded, but for ties; for others it is one draw of what may happen.
  """
  lengths_NT, asked_NT = kept_lengths(tree, ranks_NTM), ranks_NTM[..., 0] != UNASKED
  tokens = steps = 0
  for lengths_T, asked_T in zip(lengths_NT, asked_NT, strict=True):
    for start, end in _answers(asked_T):
      place, tokens = start, tokens + end - start
      while place < end:
        place, steps = place + lengths_T[place] + 1, steps + 1
  return tokens / steps if steps else 0.0


def _answers(asked_T: np.ndarray) -> Iterable[tuple[int, int]]:
  """Where each answer of a row begins and ends."""
  edges = np.flatnonzero(np.diff(np.concatenate([[0], asked_T.astype(int), [0]])))
  return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
