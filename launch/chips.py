"""What a chip can do: memory, bandwidth, arithmetic. Peaks from the makers' pages, not measurements.

TPUs: the pages of the generations under cloud.google.com/tpu/docs, and the tables of the scaling book
(jax-ml.github.io/scaling-book, "How to Think About TPUs"). GPUs: NVIDIA's data sheets; they are planned by roofline
only.
"""

import dataclasses
import re

from launch.slices.table import Slice
from models.errors import InputError

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
  """One chip.

  Attributes:
    name: of the generation, as in `Slice.generation`.
    usable_gib: of its memory, what the compiler lets a program have.
    hbm_gbs: memory bandwidth, 1e9 bytes a second.
    bf16_tflops: matrix products in bfloat16, 1e12 operations a second.
    clock_ghz: of the TensorCore: turns the compiler's cycles into time. None for GPUs.
  """

  name: str
  usable_gib: float
  hbm_gbs: float
  bf16_tflops: float
  clock_ghz: float | None = None


# Usable memory is what the compiler says when a program does not fit. Clocks follow from the peak operations: v4 and
# v5p 2 cores x 4, v5e 4 multipliers of 128 x 128; v6e 4 of 256 x 256; two operations each per cycle.
CHIPS = {chip.name: chip for chip in (
    Chip('v4', 30.75, 1228.8, 275, 1.05),
    Chip('v5e', 15.75, 819, 197, 1.5),
    Chip('v5p', 95.73, 2765, 459, 1.75),
    Chip('v6e', 31.24, 1638, 918, 1.75),
    Chip('A100', 80, 2000, 312),
    Chip('H100', 80, 3350, 990),
    Chip('H200', 141, 4800, 990),
)}
GPUS = tuple(name for name, chip in CHIPS.items() if chip.clock_ghz is None)


def gpus_of(name: str) -> tuple[int, Chip] | None:
  """How many of which GPU a name such as 8xH100 means; None for a name of another form.

  Raises:
    InputError: for a GPU that is not in the table.
  """
  found = re.fullmatch(r'([1-9]\d*)x([A-Za-z]\w*)', name)
  if not found:
    return None
  if found[2] not in GPUS:
    raise InputError(f'{name}: the GPU {found[2]!r} is unknown: use one of {", ".join(GPUS)}')
  return int(found[1]), CHIPS[found[2]]


def all_reduce_hops(made: Slice) -> int:
  """Steps from chip to chip in one all-reduce over a slice: a reduce-scatter and an all-gather along each axis.

  An axis of n chips takes n - 1 steps each way as a line; as a ring, both ways round at once, n / 2.
  """
  sizes = [int(size) for size in made.topology.split('x')]
  return 2 * sum(size // 2 if is_ring(made, size) else size - 1 for size in sizes)


def is_ring(made: Slice, size: int) -> bool:
  """Whether an axis of this size closes: on v4 and v5p in slices of multiples of 4 only, on v5e and v6e at 16."""
  if made.topology.count('x') == 2:
    return all(int(other) % 4 == 0 for other in made.topology.split('x'))
  return size == 16
