"""The rows of a training run in the order in which it sees them: another one each epoch, the same for the same seed."""

from collections.abc import Sequence
import hashlib
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding
import numpy as np

from models.errors import InputError
from models.sharding import spec

if TYPE_CHECKING:
  import grain

Row = dict[str, np.ndarray]
PREFETCH = 4  # batches that are made while the device works
LOOKED_AT = 256  # rows that stand for all
EPOCHS = 1 << 32  # more than any run has; without a number grain cannot count batches of one row


def batches(rows: 'grain.MapDataset | Sequence[Row]', batch: int, seed: int) -> 'grain.DatasetIterator':
  """Batches without end, [B, ...] for each field; `get_state` and `set_state` of the iterator tell its place.

  Raises:
    InputError: if there are fewer rows than one batch takes.
  """
  import grain  # more than a second, which only a run should wait
  if len(rows) < batch:
    raise InputError(f'{len(rows)} rows of data do not fill a batch of train.batch={batch}: lower it, or add data')
  dataset = rows if isinstance(rows, grain.MapDataset) else grain.MapDataset.source(rows)
  dataset = dataset.seed(seed).shuffle().repeat(EPOCHS).batch(batch)
  return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH)))


def digest(rows: 'grain.MapDataset | Sequence[Row]') -> str:
  """Tells rows from others: their number and, of some from all over, the ids. What is no integer may be computed anew,
  and then differ by rounding."""
  it = hashlib.sha256(str(len(rows)).encode())
  for index in np.unique(np.linspace(0, len(rows) - 1, LOOKED_AT).astype(int)).tolist():
    for name, field in sorted(rows[index].items()):
      if not np.issubdtype(field.dtype, np.floating):
        it.update(f'{name} {field.dtype} {field.shape}'.encode() + field.tobytes())
  return it.hexdigest()[:16]


def place(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
  """Puts the rows over the axis `data` of the mesh; of several processes each holds all rows and gives its part."""
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return jax.device_put(batch)

  def put(x: Any) -> jax.Array:
    sharding = NamedSharding(mesh, spec('B' + 'T' * (x.ndim - 1), x.shape, mesh))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

  return jax.tree.map(put, batch)
