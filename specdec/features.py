"""Which vectors of the target a drafter reads."""

import enum

from jax import Array

from models.protocol import Output


class Reads(enum.Enum):
  NOTHING = 'nothing'
  HIDDEN = 'hidden'  # before the LM head (Medusa, EAGLE-1 and -2)
  TAPS = 'taps'  # outputs of some layers, side by side (EAGLE-3)


def features_of(output: Output, reads: Reads) -> Array:
  """[B, T, F].

  Raises:
    ValueError: taps of a model that taps no layer.
  """
  if reads is Reads.HIDDEN:
    return output.hidden_BTD
  if output.taps_BTF is None:
    raise ValueError('the drafter reads layers of the target, which taps none: set its `taps`')
  return output.taps_BTF
