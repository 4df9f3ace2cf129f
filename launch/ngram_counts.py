"""Counts of tokens and of pairs, from a file, as the laws of the unigram and bigram drafts."""

import pathlib

import numpy as np

from launch.build import AnyTokenizer
from models.errors import InputError
from models.sharding import put_whole
from specdec.drafters import NgramLaws

DISCOUNT = 0.75  # taken off each count, for the pairs that were not seen (Ney et al., 1994)


def read_tokens(path: str, tokenizer: AnyTokenizer) -> np.ndarray:
  """[L] ids: of a text file (.txt) as the tokenizer splits it, or of a one-dimensional array (.npy).

  Raises:
    InputError: a file of another kind, or one without tokens of the model.
  """
  file = pathlib.Path(path).expanduser()
  if file.suffix not in ('.txt', '.npy'):
    raise InputError(f'drafter.counts={path!r}: give a .txt file of text, or a .npy file of token ids')
  try:
    tokens_L = np.load(file, allow_pickle=False) if file.suffix == '.npy' else np.asarray(
        tokenizer.encode(file.read_text('utf-8')), np.int64)
  except (OSError, ValueError) as error:
    raise InputError(f'drafter.counts={path!r} cannot be read: {getattr(error, "strerror", None) or error}') from error
  if tokens_L.ndim != 1 or not np.issubdtype(tokens_L.dtype, np.integer) or not len(tokens_L):
    raise InputError(f'drafter.counts={path!r} holds no row of token ids')
  if tokens_L.min() < 0 or tokens_L.max() >= tokenizer.num_tokens:
    raise InputError(f'drafter.counts={path!r} holds ids outside of 0..{tokenizer.num_tokens - 1}, the tokens of the '
                     'model')
  return tokens_L


def laws_of(tokens_L: np.ndarray, num_tokens: int, followers: int) -> NgramLaws:
  """The laws of the counts.

  Args:
    tokens_L: ids, one after the other.
    num_tokens: V.
    followers: ids that are kept of what follows each token, at most; 0 makes it unigrams. The others, and
      `DISCOUNT` of each kept count, go to the unigram law.
  """
  unigram_V = np.bincount(tokens_L, minlength=num_tokens) / len(tokens_L)
  followers_VK, follow_VK = (np.zeros((num_tokens, followers), dtype) for dtype in (np.int32, np.float32))
  pairs, times = np.unique(tokens_L[:-1].astype(np.int64) * num_tokens + tokens_L[1:], return_counts=True)
  first, second = pairs // num_tokens, pairs % num_tokens
  order = np.lexsort((second, -times, first))
  first, second, times = first[order], second[order], times[order]
  rank = np.arange(len(first)) - np.searchsorted(first, first)
  kept = rank < followers
  places = first[kept], rank[kept]
  followers_VK[places] = second[kept]
  follow_VK[places] = (times[kept] - DISCOUNT) / np.bincount(first, times, num_tokens)[first[kept]]
  laws = NgramLaws(unigram_V.astype(np.float32), followers_VK, follow_VK, 1 - follow_VK.sum(axis=1))
  return put_whole(laws)
