"""Times plain and speculative decoding side by side, and says what the parts of a step predict.

    python -m launch.bench --config=configs/smollm2.py:lookup --config.engine.gamma=7 --json_out=row.json

Everything runs in one process, in turns, compiled and warm: per batch of prompts each way of decoding, then the parts
of its step alone (plain pass, verify pass, draft). Times are sums over batches of medians over repeats.

Fields of a row, all measured unless they say predicted:

    ms_per_token         decode time per emitted token of a row; prompts and compilation are not in it
    tokens_per_second    of the whole batch
    speedup              plain ms_per_token over this one's
    tokens_per_pass, accepted_per_position, conditional_per_position, alpha, overlap    see specdec/metrics.py
    draft_cost           c: one drafted token over a plain target pass
    verify_cost          v: a pass over γ + 1 tokens over a plain target pass
    step_cost            decode time over the time of its parts (1.05: a step costs 5 % more than its parts)
    predicted_speedup    from the parts: emitted tokens over passes of each width and drafts
    predicted_theorem_3_8   Leviathan et al. (2023): from alpha, γ and c alone, verify passes assumed free
    bandwidth_utilisation   bytes of weights and live cache read per second over the measured bandwidth
    compile_seconds      apart from everything above
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

from absl import flags
import jax
from ml_collections import ConfigDict

from launch import cli, parts, results
from launch.progress import track
from launch.prompts import Prompt, load_prompts
from launch.session import Session
from launch.table import Column, print_table
from launch.timing import Timing, measure, memory_bandwidth
from models.errors import InputError
from models.kv_cache import KVCache
from specdec import theory
from specdec.engine import Engine, Params, run, to_result
from specdec.metrics import Metrics
from specdec.state import DecodeState

PLAIN = 'plain'
PASS = 'pass of {}'
DRAFT = 'draft of {}'

COLUMNS = [
    Column('task'), Column('drafter'), Column('rule'), Column('gamma', 'γ'), Column('temperature', 'T', '.1f'),
    Column('top_p', 'top-p', '.2f'), Column('batch'), Column('new_tokens', 'tokens'),
    Column('ms_per_token', 'ms/token', '.2f'), Column('tokens_per_second', 'tokens/s', '.1f'),
    Column('tokens_per_pass', 'tokens/pass', '.2f'), Column('alpha', 'α', '.2f'), Column('draft_cost', 'c', '.3f'),
    Column('verify_cost', 'v', '.2f'), Column('step_cost', 'step/parts', '.2f'),
    Column('predicted_speedup', 'predicted', '.2f'), Column('speedup', 'speed-up', '.2f'),
    Column('bandwidth_utilisation', 'bandwidth', '.0%'), Column('compile_seconds', 'compile s', '.0f')]


@dataclasses.dataclass
class Tally:
  """What one way of decoding took, summed over batches.

  Attributes:
    seconds: of the decode loops.
    plain_pass_seconds: mean time of a plain target pass.
    pass_seconds: by verify width, mean time of a pass alone.
    draft_seconds: mean time of a whole draft alone.
    metrics: of all rows.
    slowest: per batch, the row with most passes: its passes are the loop's rounds.
    live_bytes: per batch, cache bytes of the live tokens halfway.
  """

  seconds: float = 0.0
  plain_pass_seconds: list[float] = dataclasses.field(default_factory=list)
  pass_seconds: dict[int, list[float]] = dataclasses.field(default_factory=dict)
  draft_seconds: list[float] = dataclasses.field(default_factory=list)
  metrics: list[Metrics] = dataclasses.field(default_factory=list)
  slowest: list[Metrics] = dataclasses.field(default_factory=list)
  live_bytes: list[float] = dataclasses.field(default_factory=list)


def compare(sessions: Mapping[str, Session], prompts: Sequence[Prompt], repeats: int) -> list[dict[str, Any]]:
  """One row per session, each against plain decoding of the same target; the plain row comes first."""
  first = next(iter(sessions.values()))
  ways = {PLAIN: first.plain()} | {name: s for name, s in sessions.items() if s.engine.drafter.name != 'none'}
  tallies = {name: Tally() for name in ways}
  size = first.config.engine.batch
  starts = range(0, len(prompts) - len(prompts) % size, size)
  if not starts:
    raise InputError(f'{len(prompts)} prompts do not fill one batch of engine.batch={size}')
  for start in track(starts, len(starts), 'timing'):
    _time_batch(ways, tallies, prompts[start:start + size], start, repeats)
  baseline = _ms_per_token(tallies[PLAIN], size)
  return [_row('none' if name == PLAIN else name, ways[name], tallies[name], baseline, len(starts) * size)
          for name in ways]


def _time_batch(ways: Mapping[str, Session], tallies: Mapping[str, Tally], prompts: Sequence[Prompt], start: int,
                repeats: int) -> None:
  functions, prepare, states = {}, {}, {}
  for name, session in ways.items():
    seed = session.config.sampling.seed + start
    request = session.request(prompts, range(seed, seed + len(prompts)))
    session.warm_up(request)
    params = session.params_for(request)
    functions[name] = functools.partial(run, session.engine, params)
    prepare[name] = functools.partial(session.engine.start, params, request)
    states[name] = session.engine.start(params, request)
    functions |= _part_functions(name, session, params, states[name], states[PLAIN])
  if start == 0:
    _warm_parts(functions, prepare)
  timings = measure(functions, repeats, warmups=0, prepare=prepare)
  plain_pass = timings[PASS.format(1)].median / parts.REPEATS
  for name, session in ways.items():
    _add(tallies[name], name, session, timings, plain_pass, states[name].length_B)


def _part_functions(name: str, session: Session, params: Params, state: DecodeState,
                    plain_state: DecodeState) -> dict[str, Any]:
  """Target passes are the same for all ways of decoding, and are timed once."""
  engine, of_pass = session.engine, parts.pass_engine(session.engine)
  functions = {
      PASS.format(width): functools.partial(parts.target_passes, of_pass, width, params.target, plain_state)
      for width in engine.verify_widths}
  if engine.gamma:
    functions[f'{name} {DRAFT.format(engine.gamma)}'] = functools.partial(parts.drafts, engine, params.draft, state)
  return functions


def _warm_parts(functions: Mapping[str, Any], prepare: Mapping[str, Any]) -> None:
  """Compiles the parts; the loops were compiled by `Session.warm_up`."""
  jax.block_until_ready([function() for name, function in functions.items() if name not in prepare])


def _add(tally: Tally, name: str, session: Session, timings: Mapping[str, Timing], plain_pass: float,
         start_B: jax.Array) -> None:
  engine = session.engine
  alone = lambda part: timings[part].median / parts.REPEATS
  result = to_result(timings[name].result)
  tally.seconds += timings[name].median
  tally.plain_pass_seconds.append(plain_pass)
  for width in engine.verify_widths:
    tally.pass_seconds.setdefault(width, []).append(alone(PASS.format(width)))
  if engine.gamma:
    tally.draft_seconds.append(alone(f'{name} {DRAFT.format(engine.gamma)}'))
  tally.metrics += result.metrics
  tally.slowest.append(max(result.metrics, key=lambda metrics: metrics.passes))
  halfway = int(start_B.sum()) + result.total.emitted / 2
  tally.live_bytes.append(halfway * _bytes_per_slot(timings[name].result.cache))


def _bytes_per_slot(cache: KVCache) -> float:
  arrays = jax.tree.leaves((cache.k, cache.v))
  return sum(x.nbytes / (x.shape[0] * x.shape[2]) for x in arrays)


def _weight_bytes(model: Any) -> int:
  return sum(x.nbytes for x in jax.tree.leaves(model))


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values) if values else 0.0


def _ms_per_token(tally: Tally, batch: int) -> float:
  return 1e3 * tally.seconds * batch / Metrics.total(tally.metrics).emitted


def _parts_seconds(tally: Tally, engine: Engine) -> float:
  """What the loops' passes and drafts take alone. A model's draft costs by the token, a lookup by the round."""
  total = 0.0
  for batch, rounds in enumerate(tally.slowest):
    passes = zip(engine.verify_widths, rounds.passes_by_width, strict=True)
    total += sum(count * tally.pass_seconds[width][batch] for width, count in passes)
    if engine.gamma:
      num_drafts = rounds.drafted / engine.gamma if engine.drafter.name == 'model' else rounds.passes
      total += num_drafts * tally.draft_seconds[batch]
  return total


def _row(drafter: str, session: Session, tally: Tally, baseline_ms: float, num_prompts: int) -> dict[str, Any]:
  engine, config = session.engine, session.config
  metrics, batch = Metrics.total(tally.metrics), config.engine.batch
  ms, plain_pass = _ms_per_token(tally, batch), _mean(tally.plain_pass_seconds)
  draft_cost = _mean(tally.draft_seconds) / engine.gamma / plain_pass if engine.gamma else 0.0
  parts_seconds = _parts_seconds(tally, engine)
  predicted_ms = 1e3 * parts_seconds * batch / metrics.emitted
  return {
      'target': config.target.source, 'dtype': config.target.dtype, 'drafter': drafter,
      'rule': engine.rule.name, 'gamma': engine.gamma, 'temperature': config.sampling.temperature,
      'top_k': config.sampling.top_k, 'top_p': config.sampling.top_p, 'batch': batch, 'prompts': num_prompts,
      'new_tokens': metrics.emitted, 'ms_per_token': ms, 'tokens_per_second': 1e3 * batch / ms,
      'speedup': baseline_ms / ms, 'ms_per_round': 1e3 * tally.seconds / sum(r.passes for r in tally.slowest),
      'tokens_per_pass': metrics.tokens_per_pass, 'accepted_per_position': metrics.accepted_per_position,
      'conditional_per_position': metrics.conditional_per_position, 'alpha': metrics.alpha,
      'overlap': metrics.overlap, 'drafted': metrics.drafted, 'accepted': metrics.accepted,
      'passes_by_width': dict(zip(engine.verify_widths, metrics.passes_by_width, strict=True)),
      'plain_pass_ms': 1e3 * plain_pass, 'draft_cost': draft_cost,
      'verify_cost': _mean(tally.pass_seconds[engine.gamma + 1]) / plain_pass,
      'step_cost': tally.seconds / parts_seconds, 'predicted_speedup': 1e3 * plain_pass / predicted_ms,
      'predicted_theorem_3_8': _theorem_3_8(metrics.alpha, engine.gamma, draft_cost),
      'bandwidth_utilisation': _utilisation(session, tally), 'compile_seconds': session.compile_seconds,
      **results.environment()}


def _theorem_3_8(alpha: float, gamma: int, draft_cost: float) -> float | None:
  if not gamma or alpha != alpha:
    return None
  return float(theory.speedup_leviathan(alpha, gamma, draft_cost))


def _utilisation(session: Session, tally: Tally) -> float:
  target, draft = _weight_bytes(session.params.target), 0
  if session.engine.drafter.name == 'model':
    draft = _weight_bytes(session.params.draft)
  read = 0.0
  for rounds, live in zip(tally.slowest, tally.live_bytes, strict=True):
    read += rounds.passes * (target + live) + rounds.drafted * draft
  return read / tally.seconds / memory_bandwidth()


def benchmark(config: ConfigDict, repeats: int = 3) -> dict[str, Any]:
  """The row of one config, timed against plain decoding of the same target."""
  session = Session.from_config(config)
  return compare({config.drafter.name: session}, load_prompts(config.data), repeats)[-1]


def main() -> int:
  config = cli.config_of(CONFIG)
  session = Session.from_config(config)
  rows = compare({config.drafter.name: session}, load_prompts(config.data), REPEATS.value)
  print_table(rows, COLUMNS, file=cli.output())
  warn(rows)
  cli.write_json(rows[-1])
  return 0


def warn(rows: Sequence[Mapping[str, Any]]) -> None:
  """Says what a reader could overlook."""
  for row in rows:
    if row['gamma'] and not row['drafted']:
      cli.say(f'warning: {row["drafter"]} was asked for but drafted nothing: this row is plain decoding')
    elif row['speedup'] < 1:
      cli.say(f'{row["drafter"]}, γ={row["gamma"]}: speculation does not pay here ({row["speedup"]:.2f}x)')


if __name__ == '__main__':
  CONFIG = cli.define_config()
  REPEATS = flags.DEFINE_integer('repeats', 3, 'Timed runs of each batch; medians are reported.', lower_bound=1)
  cli.run(main)
