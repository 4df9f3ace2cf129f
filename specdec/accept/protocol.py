"""The shape of an accept rule."""

from typing import Protocol

from jax import Array

from specdec.draft import AnyDraft, Verdict
from specdec.rng import Purpose


class AcceptRule(Protocol):
  """A pure function of keys, draft and target laws; sees no model, cache or mesh.

  Attributes:
    name: as configs name it.
    lossless: whether the emitted tokens follow the target's law exactly.
    draft_purpose: which noise a drafter must draw its tokens with.
    trees, laws: whether it judges trees, and tokens that were drawn from a law; all judge chains of point masses.
    by_step: whether it looks past the first rejected token, so that no noise may be drawn twice.
  """

  name: str
  lossless: bool
  draft_purpose: Purpose
  trees: bool
  laws: bool
  by_step: bool

  def __call__(self, row_key_B: Array, position_B: Array, draft: AnyDraft, target_probs_BTV: Array) -> Verdict:
    """Decides one step.

    Args:
      row_key_B: the rows' keys.
      position_B: position in the text of the first drafted token.
      draft: M drafted tokens per row.
      target_probs_BTV: T = M + 1 laws; law i follows the first i drafted tokens, in a tree node i - 1 and all above.
    """
    ...
