"""The shape of a drafter."""

from typing import Any, Protocol

from flax import struct
from jax import Array

from models.source import Source
from specdec.draft import AnyDraft
from specdec.features import Reads
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
    source: what the target's encoder has read; None without one.
  """

  tokens_BL: Array
  length_B: Array
  gamma_B: Array
  live_B: Array
  row_key_B: Array
  sampling: Sampling
  purpose: Purpose = struct.field(pytree_node=False)
  source: Source | None = None


class Drafter(Protocol):
  """Static and hashable; whatever lives on the device is in `params` (weights) and `state`.

  Attributes:
    name: as configs name it.
    reads: which vectors of the target it wants to see.
    is_tree: whether it drafts trees; else chains.
    draws: whether it draws tokens from a law; else all are point masses.
  """

  name: str
  is_tree: bool
  draws: bool
  reads: Reads

  def levels(self, gamma: int) -> int:
    """Drafted tokens on one path, at most: `gamma` for a chain, the depth of a tree."""
    ...

  def init(self, params: Any, tokens_BL: Array, length_B: Array, bucket: int, features_BTF: Array | None,
           source: Source | None) -> Any:
    """State after the prompts.

    Args:
      params: weights.
      tokens_BL: the prompts, which the first `bucket` slots (static) hold.
      length_B: of the prompts.
      features_BTF: what it reads of the target at the bucket's slots; those from the newest token on mean nothing.
      source: what the target's encoder has read, for an encoder of its own.
    """
    ...

  def propose(self, params: Any, state: Any, context: Context, gamma: int) -> tuple[AnyDraft, Any]:
    """Drafts up to `gamma` (static: the width of the draft) tokens per row."""
    ...

  def observe(self, state: Any, length_B: Array, features_BEF: Array | None) -> Any:
    """Takes in what a step committed.

    Args:
      state: that `propose` returned.
      length_B: committed tokens after the step.
      features_BEF: what it reads of the target, at the token that was the newest before the step and at the `levels`
        tokens after it; those from the newest token on mean nothing.
    """
    ...


class Stateless:
  """What drafters share that copy, keep nothing between steps and read nothing of the target."""

  reads = Reads.NOTHING
  is_tree, draws = False, False

  def levels(self, gamma: int) -> int:
    return gamma

  def init(self, params: Any, tokens_BL: Array, length_B: Array, bucket: int, features_BTF: Array | None,
           source: Source | None) -> tuple[()]:
    return ()

  def observe(self, state: tuple[()], length_B: Array, features_BEF: Array | None) -> tuple[()]:
    return state
