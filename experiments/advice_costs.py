"""What passes and drafts cost at each batch, for `experiments.advise`: timed here, or planned for a slice."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from ml_collections import ConfigDict

from experiments.advice import MeasuredCosts, PlannedCosts
from experiments.advice_drafts import Candidate
from launch import cli
from launch.parts import PASSES, Parts
from launch.plan import plan as plan_slice
from launch.progress import track
from launch.prompts import Prompt
from launch.slices.table import slice_or_chip
from launch.timing import measure
from models.errors import InputError

TIMED_WIDTHS = (*range(1, 10), 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # at the config's batch
FEW_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # at others
HEADS = ('medusa', 'eagle')
MAX_NODES = 24  # of trees that could be planned


def measured_costs(candidates: Sequence[Candidate], prompts: Sequence[Prompt], most_batch: int,
                   repeats: int) -> list[MeasuredCosts]:
  """Of each candidate, at the config's batch and at others up to `most_batch`, on the prompt of median length."""
  session, batch = candidates[0].session, candidates[0].config.engine.batch
  prompt = sorted(prompts, key=lambda prompt: len(session.encode(prompt)))[len(prompts) // 2]
  batches = sorted({batch, most_batch} | {1 << power for power in range(most_batch.bit_length())})
  passes, drafts = {}, {}
  for each in track(batches, len(batches), 'timing'):
    passes[each], drafts[each] = _timed(candidates, prompt, each, _widths(candidates, each == batch), repeats)
  return [MeasuredCosts(passes, {each: drafts[each][one.name] for each in batches}, one.session.engine.gamma,
                        one.by_token) for one in candidates]


def _widths(candidates: Sequence[Candidate], all_of_them: bool) -> list[int]:
  """Of passes that are timed: of all drafts, and for heads of all trees that could be planned; else a few of them."""
  exact = {1} | {one.session.engine.gamma + 1 for one in candidates}
  if all_of_them and any(one.config.drafter.name in HEADS for one in candidates):
    exact.add(MAX_NODES + 1)
  return sorted(exact | {width for width in (TIMED_WIDTHS if all_of_them else FEW_WIDTHS) if width < max(exact)})


def _timed(candidates: Sequence[Candidate], prompt: Prompt, batch: int, widths: Sequence[int],
           repeats: int) -> tuple[dict[int, float], dict[str, float]]:
  """Seconds of a pass of each width and of a draft of each candidate, for so many rows; all timed in turns."""
  session = candidates[0].session
  plain, request = session.plain(), session.request([prompt] * batch)
  longest = max(session.engine.capacity, len(request.prompts[0]) + max(widths))
  engine = dataclasses.replace(plain.engine, capacity=longest)
  passes = Parts(engine, plain.params, engine.start(plain.params, request))
  functions = {f'pass {width}': functools.partial(passes.target_passes, width) for width in widths}
  drafts = {}
  for one in candidates:
    params = one.session.params_for(request)
    drafts[one.name] = Parts(one.session.engine, params, one.session.engine.start(params, request))
    functions[f'draft {one.name}'] = drafts[one.name].drafts
  times = measure(functions, repeats)
  return ({width: times[f'pass {width}'].median / PASSES for width in widths},
          {name: times[f'draft {name}'].median / parts.drafts_per_call for name, parts in drafts.items()})


def planned_costs(config: ConfigDict, topology: str, assume: Sequence[str], most_batch: int) -> PlannedCosts:
  """Predicted for a slice: of the config's batch and of 1, 2, 4, ... `most_batch` rows, as far as they fit.

  Raises:
    InputError: a config that does not fit, or other wrong input.
  """
  made, given = slice_or_chip(topology), config.engine.batch
  others = [1 << power for power in range(most_batch.bit_length()) if 1 << power != given]
  seconds: dict[int, list[float]] = {}
  for batch in track([given, *others], len(others) + 1, 'planning'):
    point = config.copy_and_resolve_references()
    point.engine.batch = batch
    facts = plan_slice(point, made, assume, wanted=('speculative', 'plain'))
    if facts['fits']:
      seconds[batch] = _planned_seconds(facts)
    elif batch == given:
      raise InputError(f'engine.batch={batch}: {facts["problem"]}')
    elif batch > given:
      cli.say(f'no more than {max(seconds)} rows are planned: {batch} do not fit on {topology}')
      break
  return PlannedCosts(*({batch: of_batch[part] for batch, of_batch in seconds.items()} for part in range(4)))


def _planned_seconds(facts: dict[str, Any]) -> list[float]:
  """Plain pass, verify pass, first drafted token and each further one; of heads the whole draft at once is first."""
  first, draft = (facts[f'predicted_ms_{name}'] for name in ('draft_first', 'draft'))
  drafts = (first, draft or 0.0) if first is not None else (draft or 0.0, 0.0)
  return [milliseconds / 1e3 for milliseconds in (facts['predicted_ms_plain'], facts['predicted_ms_verify'], *drafts)]
