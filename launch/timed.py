"""Ways of decoding the same prompts, timed side by side: the whole loops, and the parts of their steps alone.

Everything runs in one process, in turns, compiled and warm, each time from the same state after the prompts.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax

from launch import cli
from launch.errors import RunError
from launch.parts import PASSES, Parts, copy_of
from launch.progress import track
from launch.prompts import Prompt
from launch.session import Session
from launch.timing import Timing, measure
from launch.work_units import WorkUnits, seeds_for
from models.kv_cache import KVCache
from specdec.commit import Reason
from specdec.engine import Request, run, to_result
from specdec.metrics import Metrics
from specdec.state import DecodeState

PLAIN = 'plain'
PASS, DRAFT = 'pass of {}', 'draft of {}'


@dataclasses.dataclass(frozen=True)
class Batch:
  """One batch of prompts, decoded in one way. Times are medians over the repeats.

  Attributes:
    seconds: of the decode loop.
    pass_seconds: by width, of a target pass alone.
    draft_seconds: of a whole draft alone; 0 where nothing drafts.
    live_bytes: of the cache, halfway: those of live tokens, and of the sources.
    tokens, texts, reasons, metrics: of each prompt.
  """

  seconds: float
  pass_seconds: dict[int, float]
  draft_seconds: float
  live_bytes: float
  tokens: list[list[int]]
  texts: list[str]
  reasons: list[Reason]
  metrics: list[Metrics]

  @classmethod
  def from_row(cls, row: dict[str, Any]) -> 'Batch':
    """Back from JSON."""
    metrics = [Metrics(**{name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()})
               for entry in row['metrics']]
    seconds = {int(width): value for width, value in row['pass_seconds'].items()}
    return cls(**row | {'pass_seconds': seconds, 'reasons': [Reason(number) for number in row['reasons']],
                        'metrics': metrics})

  @property
  def rounds(self) -> Metrics:
    """Of the row with most passes: its passes are the loop's rounds."""
    return max(self.metrics, key=lambda metrics: metrics.passes)


@dataclasses.dataclass(frozen=True)
class Timed:
  """All prompts decoded in one way.

  Attributes:
    name: of the way.
    session: what decoded them.
    batches: in order.
  """

  name: str
  session: Session
  batches: list[Batch]

  @property
  def tokens(self) -> list[list[int]]:
    return [tokens for batch in self.batches for tokens in batch.tokens]

  @property
  def texts(self) -> list[str]:
    return [text for batch in self.batches for text in batch.texts]

  @property
  def metrics(self) -> Metrics:
    return Metrics.total([metrics for batch in self.batches for metrics in batch.metrics])

  def check(self) -> None:
    """Raises RunError where numbers broke down: times of texts that are none mean nothing."""
    reasons = [reason for batch in self.batches for reason in batch.reasons]
    failed = reasons.count(Reason.ERROR)
    if failed:
      raise RunError(f'{failed} of {len(reasons)} texts ({self.name}) ended in numbers that are not finite: '
                     'they mean nothing')


def ms_per_token(batches: Sequence[Batch]) -> float:
  """Decode time per emitted token of a row; prompts and compilation are not in it."""
  emitted = sum(metrics.emitted for batch in batches for metrics in batch.metrics)
  return 1e3 * sum(batch.seconds * len(batch.metrics) for batch in batches) / emitted


def time_all(ways: Mapping[str, Session], prompts: Sequence[Prompt], repeats: int,
             units_dir: str | None = None) -> list[Timed]:
  """Decodes all prompts in each of the ways, one of which is plain decoding, batch by batch and in turns.

  Where prompts are too few for the last batch, copies of the last one fill it, which count in no figure. With
  `units_dir` each batch is a unit of work there (`launch/work_units.py`): batches that are done are not done again,
  seeds are by prompt, and of several processes the first alone gets batches.
  """
  config = ways[PLAIN].config
  requests = ways[PLAIN].requests(prompts, seeds_for(config.sampling.seed, prompts) if units_dir else None)
  done = []

  def work(number: int) -> dict[str, Batch]:
    chunk, request = requests[number]
    done.append(number)
    return _time_batch(ways, request, len(chunk), repeats, compiled=len(done) > 1)

  if units_dir is None:
    rows = [work(number) for number in track(range(len(requests)), len(requests), 'decoding')]
  else:
    units = WorkUnits(units_dir, _about(ways, prompts, repeats), len(requests))
    if units.num_done:
      cli.say(f'{units.num_done} of {units.count} units are in {units_dir} already')
    rows = [{name: Batch.from_row(batch) for name, batch in unit.items()} for unit in units.run(work)]
  return [Timed(name, session, [row[name] for row in rows]) for name, session in ways.items()]


def _about(ways: Mapping[str, Session], prompts: Sequence[Prompt], repeats: int) -> dict[str, Any]:
  """What the units depend on; the mesh is no part of it, so that a slice of another size may go on."""
  configs = {way: {name: section for name, section in session.config.to_dict().items() if name != 'mesh'}
             for way, session in ways.items()}
  return {'prompts': [prompt.id for prompt in prompts], 'ways': configs, 'repeats': repeats}


def _time_batch(ways: Mapping[str, Session], request: Request, num_prompts: int, repeats: int,
                compiled: bool) -> dict[str, Batch]:
  loops, states, alone = {}, {}, {}
  for name, session in ways.items():
    session.warm_up(request)
    params = session.params_for(request)
    states[name] = session.engine.start(params, request)
    loops[name] = functools.partial(run, session.engine, params)
    alone[name] = Parts(session.engine, params, states[name])
  functions = _part_functions(ways, alone)
  if not compiled:
    for function in functions.values():
      jax.block_until_ready(function())
  prepare = {name: functools.partial(copy_of, state) for name, state in states.items()}
  timings = measure(loops | functions, repeats, warmups=0, prepare=prepare)
  return {name: _batch(name, session, states[name], num_prompts, timings, alone[name].drafts_per_call)
          for name, session in ways.items()}


def _part_functions(ways: Mapping[str, Session], alone: Mapping[str, Parts]) -> dict[str, Callable[[], Any]]:
  """Target passes are the same for all ways, and are timed once."""
  widths = sorted({width for session in ways.values() for width in session.engine.verify_widths})
  passes = {PASS.format(width): functools.partial(alone[PLAIN].target_passes, width) for width in widths}
  return passes | {DRAFT.format(name): alone[name].drafts for name, session in ways.items() if session.engine.gamma}


def _batch(name: str, session: Session, state: DecodeState, num_prompts: int, timings: Mapping[str, Timing],
           drafts_per_call: int) -> Batch:
  engine, result = session.engine, to_result(timings[name].result)
  halfway = int(state.length_B.sum()) + result.total.emitted / 2
  tokens = result.tokens[:num_prompts]
  return Batch(
      seconds=timings[name].median,
      pass_seconds={width: timings[PASS.format(width)].median / PASSES for width in (1, *engine.verify_widths)},
      draft_seconds=timings[DRAFT.format(name)].median / drafts_per_call if engine.gamma else 0.0,
      live_bytes=halfway * _bytes_per_slot(state.cache) + _bytes_of_sources(state.cache), tokens=tokens,
      texts=[session.text(ids) for ids in tokens],
      reasons=result.reasons[:num_prompts], metrics=result.metrics[:num_prompts])


def _bytes_per_slot(cache: KVCache) -> float:
  arrays = jax.tree.leaves((cache.k, cache.v))
  return sum(x.nbytes / (x.shape[0] * x.shape[2]) for x in arrays)


def _bytes_of_sources(cache: KVCache) -> float:
  """Of live tokens; a target without an encoder has none."""
  if cache.cross is None:
    return 0.0
  arrays = (*cache.cross.k, *cache.cross.v)
  return float(cache.cross.length_B.sum()) * sum(x.nbytes / (x.shape[0] * x.shape[2]) for x in arrays)
