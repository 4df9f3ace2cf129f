"""Stop strings on the device: an automaton over tokens, so that a string may end anywhere, in any tokenisation."""

from collections import deque
from collections.abc import Sequence

import numpy as np


def _byte_automaton(patterns: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
  """Aho and Corasick (1975): next state [state, 256], and which states complete a pattern."""
  children: list[dict[int, int]] = [{}]
  final = [False]
  for pattern in patterns:
    state = 0
    for byte in pattern:
      if byte not in children[state]:
        children.append({})
        final.append(False)
        children[state][byte] = len(children) - 1
      state = children[state][byte]
    final[state] = True
  step = np.zeros((len(children), 256), np.int32)
  fallback = [0] * len(children)
  queue = deque()
  for byte, child in children[0].items():
    step[0, byte] = child
    queue.append(child)
  while queue:
    state = queue.popleft()
    final[state] |= final[fallback[state]]
    step[state] = step[fallback[state]]
    for byte, child in children[state].items():
      fallback[child] = int(step[fallback[state], byte])
      step[state, byte] = child
      queue.append(child)
  return step, np.asarray(final)


def stop_table(stops: Sequence[str], token_bytes: Sequence[bytes]) -> np.ndarray:
  """Next state [Z, V] int32 for each state and token; the last state means that a stop string was completed.

  State 0 is the start. Z is rounded up to a power of two, so that few shapes occur. Without stops, [1, 1].

  Raises:
    ValueError: an empty stop string.
  """
  patterns = [stop.encode() for stop in stops]
  if any(not pattern for pattern in patterns):
    raise ValueError('a stop string must not be empty')
  if not patterns:
    return np.zeros((1, 1), np.int32)
  step, final = _byte_automaton(patterns)
  num_states = 1 << int(np.ceil(np.log2(len(step) + 1)))
  hit = num_states - 1
  step = np.vstack([step, np.full((num_states - len(step), 256), hit, np.int32)])
  step[np.isin(step, np.flatnonzero(final))] = hit
  width = max(len(piece) for piece in token_bytes)
  padded = np.zeros((len(token_bytes), width), np.uint8)
  lengths = np.array([len(piece) for piece in token_bytes])
  for token, piece in enumerate(token_bytes):
    padded[token, :len(piece)] = np.frombuffer(piece, np.uint8)
  table = np.repeat(np.arange(num_states, dtype=np.int32)[:, None], len(token_bytes), axis=1)
  for i in range(width):
    active = lengths > i
    table[:, active] = step[table[:, active], padded[active, i]]
  return table
