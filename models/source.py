"""What an encoder reads."""

from flax import struct
from jax import Array


@struct.dataclass
class Source:
  """One text per row, beside the text that is decoded.

  Attributes:
    tokens_BS: ids; anything past `length_B`.
    length_B: tokens of each, at least 1.
  """

  tokens_BS: Array
  length_B: Array
