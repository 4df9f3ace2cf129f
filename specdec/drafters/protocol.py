"""The shape of a drafter."""

from typing import Any, Protocol

from flax import struct
from jax import Array

from specdec.draft import Draft
from specdec.rng import Purpose
from specdec.warp import Sampling


@struct.dataclass
class Context:
  """What a drafter may look at when it proposes.

  Attributes:
    tokens_BL: prompt and output; anything past `length_B`.
    length_B: committed tokens.
    gamma_B: drafted tokens wanted from each row, at most the engine's γ; chosen before this step's draft is
      known, so a drafter may draft fewer but must not choose by looking at what it drew.
    live_B: rows that are still decoding.
    row_key_B: keys; the noise of a drafted token must use `purpose`.
    purpose: static.
    sampling: the filters that the draft law goes through, the same as the target's.
  """

  tokens_BL: Array
  length_B: Array
  gamma_B: Array
  live_B: Array
  row_key_B: Array
  sampling: Sampling
  purpose: Purpose = struct.field(pytree_node=False)


class Drafter(Protocol):
  """Static and hashable; whatever lives on the device is in `params` (weights) and `state`.

  Attributes:
    name: as configs name it.
  """

  name: str

  def init(self, params: Any, tokens_BL: Array, length_B: Array, bucket: int) -> Any:
    """State after the prompts; only the first `bucket` slots of `tokens_BL` (static) can hold a prompt."""
    ...

  def propose(self, params: Any, state: Any, context: Context, gamma: int) -> tuple[Draft, Any]:
    """Drafts up to `gamma` (static: the width of the draft) tokens per row."""
    ...

  def observe(self, state: Any, length_B: Array) -> Any:
    """Takes in the committed lengths after the step."""
    ...
