"""The key/value cache: one array per layer, one committed length per row."""

from flax import struct
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from models.sharding import constrain, whole

MAX_UNROLLED_ROWS = 32


def write_rows(buffer_BKSH: Array, update_BKTH: Array, start_B: Array) -> Array:
  """Writes `update` into slots start..start+T-1 of each row.

  Unrolled over rows, since each slice update then stays in place on TPU and CPU; a large batch takes one scatter.
  The caller leaves room: start + T <= S (`dynamic_update_slice` would shift the write, silently).
  """
  batch, width = buffer_BKSH.shape[0], update_BKTH.shape[2]
  if batch <= MAX_UNROLLED_ROWS:
    for row in range(batch):
      buffer_BKSH = jax.lax.dynamic_update_slice(
          buffer_BKSH, update_BKTH[row:row + 1].astype(buffer_BKSH.dtype), (row, 0, start_B[row], 0))
    return buffer_BKSH
  slots_BT = start_B[:, None] + jnp.arange(width)
  rows_B1 = jnp.arange(batch)[:, None]
  return buffer_BKSH.at[rows_B1, :, slots_BT].set(
      update_BKTH.swapaxes(1, 2).astype(buffer_BKSH.dtype), mode='drop')


def _move_rows(buffer_BKSH: Array, rows_BP: Array, start_B: Array, width: int) -> Array:
  batch, heads, _, size = buffer_BKSH.shape
  if batch > MAX_UNROLLED_ROWS:
    index_B11P = jnp.arange(batch)[:, None]
    moved = buffer_BKSH[index_B11P, :, start_B[:, None] + rows_BP]  # [B, P, K, H]
    return write_rows(buffer_BKSH, moved.swapaxes(1, 2), start_B + 1)
  moved = []
  for row in range(batch):
    window = jax.lax.dynamic_slice(buffer_BKSH, (row, 0, start_B[row], 0), (1, heads, width, size))
    moved.append(jnp.take(window, rows_BP[row], axis=2, mode='clip'))
  return write_rows(buffer_BKSH, jnp.concatenate(moved), start_B + 1)


@struct.dataclass
class CrossCache:
  """Keys and values of what an encoder read: made once per prompt, never written again and never rolled back.

  Attributes:
    k, v: per layer of the decoder [B, K, S, H], S the slots of the source.
    length_B: tokens of each source; slots past them are never visible.
  """

  k: tuple[Array, ...]
  v: tuple[Array, ...]
  length_B: Array


@struct.dataclass
class KVCache:
  """Keys and values of every layer, with a committed length per row.

  Invariant: nothing in a slot at or past `length_B` is ever visible, so rolling back is setting the length.

  Attributes:
    k, v: per layer [B, K, S, H].
    position_BS: position in the text of the token in each slot (differs from the slot in trees).
    length_B: committed slots of each row.
    relative: per layer the projected distance embeddings [N, S, H] of Transformer-XL; empty with rope.
    cross: of an encoder-decoder, what its decoder sees of the source.
    split: see `DecoderConfig.split`.
  """

  k: tuple[Array, ...]
  v: tuple[Array, ...]
  position_BS: Array
  length_B: Array
  relative: tuple[Array, ...] = ()
  cross: CrossCache | None = None
  split: bool = struct.field(pytree_node=False, default=True)

  @classmethod
  def zeros(cls, num_layers: int, batch: int, num_kv_heads: int, capacity: int, head_dim: int, dtype,
            split: bool = True) -> 'KVCache':
    shape = (batch, num_kv_heads, capacity, head_dim)
    return cls(
        k=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        v=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        position_BS=jnp.zeros((batch, capacity), jnp.int32),
        length_B=jnp.zeros((batch,), jnp.int32), split=split).laid_out()

  def laid_out(self) -> 'KVCache':
    """On a mesh: heads and rows split, positions and lengths whole on every device."""
    put = lambda arrays, dims: tuple(constrain(x, dims, self.split) for x in arrays)
    cross = self.cross
    if cross is not None:
      cross = CrossCache(put(cross.k, 'BKSH'), put(cross.v, 'BKSH'), whole(cross.length_B))
    return self.replace(
        k=put(self.k, 'BKSH'), v=put(self.v, 'BKSH'), position_BS=whole(self.position_BS),
        length_B=whole(self.length_B), relative=put(self.relative, 'NSH'), cross=cross)

  @property
  def capacity(self) -> int:
    return self.position_BS.shape[1]

  def causal_mask(self, width: int) -> Array:
    """[B, T, S]: query i of the next `width` tokens sees slots 0..length+i."""
    slot_S = jnp.arange(self.capacity)
    last_BT = self.length_B[:, None] + jnp.arange(width)
    return slot_S <= last_BT[..., None]

  def tree_mask(self, ancestors_BTT: Array) -> Array:
    """[B, T, S]: each of the next T tokens sees what is committed and, of those T, itself and its ancestors."""
    batch, width = ancestors_BTT.shape[:2]
    committed_BS = jnp.arange(self.capacity) < self.length_B[:, None]
    mask_BST = jnp.broadcast_to(committed_BS[..., None], (batch, self.capacity, width))
    mask_BST = write_rows(mask_BST[:, None], ancestors_BTT.swapaxes(1, 2)[:, None], self.length_B)[:, 0]
    return mask_BST.swapaxes(1, 2)

  def mark_positions(self, positions_BT: Array) -> 'KVCache':
    """Records the positions of the tokens about to be written at the committed length."""
    written = write_rows(self.position_BS[:, None, :, None], positions_BT[:, None, :, None], self.length_B)
    return self.replace(position_BS=whole(written[:, 0, :, 0]))

  def write_layer(self, layer: int, k_BKTH: Array, v_BKTH: Array) -> 'KVCache':
    """Writes one layer's keys and values at the committed length; the length stays."""
    k = constrain(write_rows(self.k[layer], k_BKTH, self.length_B), 'BKSH', self.split)
    v = constrain(write_rows(self.v[layer], v_BKTH, self.length_B), 'BKSH', self.split)
    return self.replace(
        k=(*self.k[:layer], k, *self.k[layer + 1:]), v=(*self.v[:layer], v, *self.v[layer + 1:]))

  def compact(self, rows_BP: Array, width: int) -> 'KVCache':
    """Moves an accepted path of a tree together, in place; the length stays.

    Args:
      rows_BP: which of the `width` tokens at the committed length go to the slots length + 1, length + 2, ...; the
        first of them, the root of the tree, stays.
      width: of the pass that wrote the tree.
    """
    move = lambda arrays: tuple(_move_rows(x, rows_BP, self.length_B, width) for x in arrays)
    position_BS = _move_rows(self.position_BS[:, None, :, None], rows_BP, self.length_B, width)[:, 0, :, 0]
    return self.replace(k=move(self.k), v=move(self.v), position_BS=position_BS).laid_out()

  def with_length(self, length_B: Array) -> 'KVCache':
    """Commits or rolls back to `length_B` (absolute; no negative lengths).

    Raises:
      ValueError: outside of jit, if a length is negative or past the capacity.
    """
    if not isinstance(length_B, jax.core.Tracer):
      lengths = np.asarray(length_B)
      if (lengths < 0).any() or (lengths > self.capacity).any():
        raise ValueError(f'cache lengths must lie in 0..{self.capacity}, got {lengths.tolist()}')
    return self.replace(length_B=length_B)
