"""What drafting and verifying cost on this machine: what an adaptive γ goes by."""

from collections.abc import Sequence
import functools

from jax.experimental import multihost_utils
import numpy as np

from launch import distributed
from launch.parts import PASSES, Parts
from launch.timing import measure
from specdec.engine import Engine, Params
from specdec.state import DecodeState

REPEATS = 3


def measured_costs(engine: Engine, params: Params, state: DecodeState) -> tuple[float, tuple[float, ...]]:
  """c, and v(1), ... v(γ + 1), in plain passes at the state's batch and length (see `AdaptiveGamma`).

  Only widths that are compiled are timed: any other costs what the narrowest of them that holds it does.
  """
  parts = Parts(engine, params, state)
  functions = {width: functools.partial(parts.target_passes, width) for width in {1, *engine.verify_widths}}
  if engine.gamma:
    functions['draft'] = parts.drafts
  seconds = {part: timing.median for part, timing in measure(functions, REPEATS).items()}
  plain = seconds[1] / PASSES
  draft_cost = seconds['draft'] / parts.drafts_per_call / engine.gamma / plain if engine.gamma else 0.0
  widths = [min(width for width in engine.verify_widths if width >= least) for least in range(1, engine.gamma + 2)]
  return agreed(draft_cost, [seconds[width] / seconds[1] for width in widths])


def agreed(draft_cost: float, verify_cost: Sequence[float]) -> tuple[float, tuple[float, ...]]:
  """The costs, rounded; on several processes those of process 0, since all must compile one program."""
  costs = [draft_cost, *verify_cost]
  if distributed.joined():
    costs = multihost_utils.broadcast_one_to_all(np.asarray(costs, np.float32)).tolist()
  draft_cost, *verify_cost = (round(cost, 3) for cost in costs)
  return draft_cost, tuple(verify_cost)
