"""The frozen target's vectors of all rows, computed once and kept on disk: half the time of training a small head.

    DIR/hidden.npy       [N, T, D] float16, before the LM head
    DIR/log_total.npy    [N, T] float32
    DIR/done.json        of which rows and target they are, and how many rows are done
"""

from collections.abc import Iterator, Sequence
import hashlib
import json
import os
from pathlib import Path

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from models.decoder import Decoder
from specdec.training.frozen import observe
from specdec.training.rows import Row

DONE = 'done.json'
VALUES = 64  # of a parameter


class RowsWithVectors(Sequence[Row]):
  """Rows that hold `hidden` and `log_total` besides (`specdec.training.frozen`), read when they are asked for."""

  def __init__(self, rows: Sequence[Row], hidden_NTD: np.ndarray, log_total_NT: np.ndarray):
    self._rows, self._hidden_NTD, self._log_total_NT = rows, hidden_NTD, log_total_NT

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> Row:
    kept = {'hidden': np.array(self._hidden_NTD[index]), 'log_total': np.array(self._log_total_NT[index])}
    return self._rows[index] | kept


def with_vectors(target: Decoder, num_tokens: int, rows: Sequence[Row], directory: str | os.PathLike,
                 batch: int) -> RowsWithVectors:
  """Computes what is missing in the directory, a batch at a time, and goes on there after an interruption."""
  folder, shape = Path(directory), (len(rows), len(rows[0]['tokens']))
  folder.mkdir(parents=True, exist_ok=True)
  about = _digest(target, num_tokens, rows)
  done = rows_done(folder, about, len(rows))
  mode = 'r+' if done else 'w+'
  hidden_NTD = _open(folder / 'hidden.npy', mode, np.float16, (*shape, target.config.width))
  log_total_NT = _open(folder / 'log_total.npy', mode, np.float32, shape)
  see = jax.jit(lambda target, batch: observe(target, batch, num_tokens))
  while done < len(rows):
    some = [rows[min(index, len(rows) - 1)] for index in range(done, done + batch)]
    seen = see(target, {name: np.stack([row[name] for row in some]) for name in some[0]})
    end = min(done + batch, len(rows))
    hidden_NTD[done:end] = np.asarray(seen.hidden_BTD)[:end - done]
    log_total_NT[done:end] = np.asarray(seen.log_total_BT)[:end - done]
    hidden_NTD.flush()
    log_total_NT.flush()
    done = end
    _write(folder, {'about': about, 'done': done})
  return RowsWithVectors(rows, hidden_NTD, log_total_NT)


def _open(path: Path, mode: str, dtype: type, shape: tuple[int, ...]) -> np.memmap:
  return np.lib.format.open_memmap(path, mode=mode, dtype=dtype, shape=None if mode == 'r+' else shape)


def _digest(target: Decoder, num_tokens: int, rows: Sequence[Row]) -> str:
  """Of the rows, and of what tells one target from another: of every parameter the sum of its bits, and some values."""
  digest = hashlib.sha256(repr((target.config, num_tokens)).encode())
  flat = nnx.to_flat_state(nnx.state(target, nnx.Param))
  for (path, _), mark in zip(flat, _marks([leaf.get_value() for _, leaf in flat]), strict=True):
    digest.update(repr(path).encode() + np.asarray(mark).tobytes())
  for field in _fields(rows):
    digest.update(field.tobytes())
  return digest.hexdigest()


@jax.jit
def _marks(parameters: list[Array]) -> list[Array]:
  """[VALUES + 1] of each, or fewer of a small one; the sum of whole numbers is one in any order."""
  bits = lambda x: jax.lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}').astype(jnp.uint32).reshape(-1)
  return [jnp.append(bits(x)[::max(1, x.size // VALUES)][:VALUES], jnp.sum(bits(x))) for x in parameters]


def _fields(rows: Sequence[Row]) -> Iterator[np.ndarray]:
  """All but what is learnt of a row, which the vectors do not depend on."""
  for row in rows:
    for name in sorted(row.keys() - {'trains'}):
      yield row[name]


def rows_done(folder: Path, about: str, count: int) -> int:
  """Rows that need not be computed again; none where what is written is not what was written here."""
  try:
    kept = json.loads((folder / DONE).read_text())
    return kept['done'] if kept['about'] == about and type(kept['done']) is int and 0 <= kept['done'] <= count else 0
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    return 0


def _write(folder: Path, facts: dict) -> None:
  part = folder / f'{DONE}.part'
  part.write_text(json.dumps(facts))
  part.replace(folder / DONE)
