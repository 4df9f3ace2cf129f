"""Times plain and speculative decoding side by side, and says what the parts of a step predict.

    python -m launch.bench --config=configs/smollm2.py:lookup --config.engine.gamma=7 --json_out=rows.json

Everything runs in one process, in turns, compiled and warm: per batch of prompts each way of decoding, then the parts
of its step alone (plain pass, verify passes, draft). Times are sums over batches of medians over repeats. Host
transfers are forbidden while the clock runs. --json_out gets both rows, the plain one first.

Fields of a row, all measured unless they say predicted:

    target, dtype, drafter, rule, gamma, temperature, top_k, top_p, batch    as the config has them
    prompts                 that were decoded
    new_tokens              emitted for all prompts together
    ms_per_token            decode time per emitted token of a row; prompts and compilation are not in it
    ms_per_token_p10, ms_per_token_p90    of the batches' own: how much prompts and moments differ
    tokens_per_second       of the whole batch
    speedup                 plain ms_per_token over this one's
    ms_per_round            decode time per step of the loop
    tokens_per_pass, accepted_per_position, conditional_per_position, alpha, overlap    see specdec/metrics.py
    drafted, accepted       tokens, of all prompts together
    passes_by_width         target passes of each verify width, of all prompts together
    plain_pass_ms           a target pass over one token, alone
    draft_cost              c: one drafted token over a plain target pass
    verify_cost             v: a pass over γ + 1 tokens over a plain target pass
    step_cost               decode time over the time of its parts (1.05: a step costs 5 % more than its parts)
    predicted_speedup       from the parts alone: what the plain loop's passes take over this one's passes and drafts
    predicted_theorem_3_8   Leviathan et al. (2023): from alpha, γ and c alone, verify passes assumed free
    bandwidth_utilisation   bytes of weights and live cache read per second over the measured bandwidth
    compile_seconds         apart from everything above
    jax_version, backend, device_kind, num_devices, cpu_model, cpu_cores, commit    where it ran
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any, TextIO

from absl import flags
import jax
from ml_collections import ConfigDict
import numpy as np

from launch import cli, results
from launch.prompts import Prompt, load_prompts
from launch.session import Session
from launch.table import Column, print_table
from launch.timed import PLAIN, Batch, Timed, ms_per_token, time_all
from launch.timing import memory_bandwidth
from models.encdec import READ_ONCE
from specdec import theory


def _percents(shares: Sequence[float]) -> str:
  return ' '.join('-' if share is None or share != share else f'{100 * share:.0f}' for share in shares) or '-'


def _small(cost: float) -> str:
  """Three decimals, or the magnitude of what would round to nothing."""
  return f'{cost:.3f}' if cost >= 5e-4 or not cost else f'{cost:.0e}'


COLUMNS = {column.key: column for column in (
    Column('task'), Column('drafter'), Column('rule'), Column('gamma', 'γ'), Column('temperature', 'T', '.1f'),
    Column('top_p', 'top-p', '.2f'), Column('batch'), Column('prompts'), Column('new_tokens', 'tokens'),
    Column('tokens_per_pass', 'tokens/pass', '.2f'), Column('alpha', 'α', '.2f'), Column('overlap', format='.2f'),
    Column('accepted_per_position', 'accepted per position, %', _percents),
    Column('ms_per_token', 'ms/token', '.2f'), Column('tokens_per_second', 'tokens/s', '.1f'),
    Column('ms_per_round', 'ms/round', '.2f'), Column('draft_cost', 'c', _small), Column('verify_cost', 'v', '.2f'),
    Column('step_cost', 'step/parts', '.2f'), Column('predicted_speedup', 'predicted', '.2f'),
    Column('speedup', 'speed-up', '.2f'), Column('bandwidth_utilisation', 'bandwidth', '.0%'),
    Column('compile_seconds', 'compile s', '.0f'))}
TABLES = {
    'Setting and acceptance': (
        'task', 'drafter', 'rule', 'gamma', 'temperature', 'top_p', 'batch', 'prompts', 'new_tokens',
        'tokens_per_pass', 'alpha', 'overlap', 'accepted_per_position'),
    'Time': (
        'task', 'drafter', 'gamma', 'ms_per_token', 'tokens_per_second', 'ms_per_round', 'draft_cost', 'verify_cost',
        'step_cost', 'predicted_speedup', 'speedup', 'bandwidth_utilisation', 'compile_seconds')}


def columns(*keys: str) -> list[Column]:
  return [COLUMNS[key] for key in keys]


def compare(sessions: Mapping[str, Session], prompts: Sequence[Prompt], repeats: int) -> list[dict[str, Any]]:
  """One row per session, each against plain decoding of the same target; the plain row comes first.

  Raises:
    RunError: a text ended in numbers that are not finite.
  """
  first = next(iter(sessions.values()))
  size = first.config.engine.batch
  if len(prompts) % size:
    cli.say(f'{len(prompts)} prompts do not fill batches of {size}: copies of the last one fill up and do not count')
  ways = {PLAIN: first.plain()} | {name: s for name, s in sessions.items() if s.engine.drafter.name != 'none'}
  plain, *others = time_all(ways, prompts, repeats)
  return [row_of(timed, plain) for timed in (plain, *others)]


def row_of(timed: Timed, plain: Timed) -> dict[str, Any]:
  """The fields that the module names.

  Raises:
    RunError: a text ended in numbers that are not finite.
  """
  plain.check()
  timed.check()
  engine, config, metrics = timed.session.engine, timed.session.config, timed.metrics
  milliseconds, draft_cost = ms_per_token(timed.batches), _draft_cost(timed)
  seconds = sum(batch.seconds for batch in timed.batches)
  p10, p90 = np.percentile([ms_per_token([batch]) for batch in timed.batches], (10, 90))
  return {
      'target': config.target.source, 'dtype': config.target.dtype,
      'drafter': 'none' if engine.drafter.name == 'none' else config.drafter.name, 'rule': engine.rule.name,
      'gamma': engine.gamma, 'temperature': config.sampling.temperature, 'top_k': config.sampling.top_k,
      'top_p': config.sampling.top_p, 'batch': config.engine.batch, 'prompts': len(timed.tokens),
      'new_tokens': metrics.emitted, 'ms_per_token': milliseconds, 'ms_per_token_p10': p10, 'ms_per_token_p90': p90,
      'tokens_per_second': 1e3 * config.engine.batch / milliseconds,
      'speedup': ms_per_token(plain.batches) / milliseconds,
      'ms_per_round': 1e3 * seconds / sum(batch.rounds.passes for batch in timed.batches),
      'tokens_per_pass': metrics.tokens_per_pass, 'accepted_per_position': metrics.accepted_per_position,
      'conditional_per_position': metrics.conditional_per_position, 'alpha': metrics.alpha,
      'overlap': metrics.overlap, 'drafted': metrics.drafted, 'accepted': metrics.accepted,
      'passes_by_width': dict(zip(engine.verify_widths, metrics.passes_by_width, strict=True)),
      'plain_pass_ms': 1e3 * _pass_seconds(timed, 1), 'draft_cost': draft_cost,
      'verify_cost': _pass_seconds(timed, engine.gamma + 1) / _pass_seconds(timed, 1),
      'step_cost': seconds / sum(_parts_seconds(timed, batch) for batch in timed.batches),
      'predicted_speedup': _predicted_ms(plain) / _predicted_ms(timed),
      'predicted_theorem_3_8': _theorem_3_8(metrics.alpha, engine.gamma, draft_cost),
      'bandwidth_utilisation': _bytes_read(timed) / seconds / _bandwidth(config),
      'compile_seconds': timed.session.compile_seconds, **results.environment()}


def _pass_seconds(timed: Timed, width: int) -> float:
  return float(np.mean([batch.pass_seconds[width] for batch in timed.batches]))


def _draft_cost(timed: Timed) -> float:
  """c of `theory`."""
  seconds = float(np.mean([batch.draft_seconds for batch in timed.batches]))
  return seconds / max(timed.session.engine.gamma, 1) / _pass_seconds(timed, 1)


def _parts_seconds(timed: Timed, batch: Batch) -> float:
  """What the loop's passes and drafts take alone. A model's draft costs by the token, any other by the round."""
  engine, rounds = timed.session.engine, batch.rounds
  passes = zip(engine.verify_widths, rounds.passes_by_width, strict=True)
  by_token = engine.gamma and engine.drafter.name == 'model'
  num_drafts = rounds.drafted / engine.gamma if by_token else rounds.passes
  return sum(count * batch.pass_seconds[width] for width, count in passes) + num_drafts * batch.draft_seconds


def _predicted_ms(timed: Timed) -> float:
  """What `ms_per_token` would be if the loops took what their parts take alone."""
  seconds = sum(_parts_seconds(timed, batch) * len(batch.metrics) for batch in timed.batches)
  return 1e3 * seconds / timed.metrics.emitted


def _theorem_3_8(alpha: float, gamma: int, draft_cost: float) -> float | None:
  if not gamma or alpha != alpha:
    return None
  return float(theory.speedup_leviathan(alpha, gamma, draft_cost))


def _bytes_read(timed: Timed) -> float:
  """Weights and live cache of all target passes, and the weights of all draft passes."""
  params = timed.session.params
  target = _weight_bytes(params.target)
  draft = _weight_bytes(params.draft) if timed.session.engine.drafter.name == 'model' else 0
  return sum(batch.rounds.passes * (target + batch.live_bytes) + batch.rounds.drafted * draft
             for batch in timed.batches)


def _bandwidth(config: ConfigDict) -> float:
  """Of all devices of the mesh together; fake devices of a CPU share its memory."""
  devices = 1 if jax.default_backend() == 'cpu' else config.mesh.data * config.mesh.model
  return devices * memory_bandwidth()


def _weight_bytes(model: Any) -> int:
  """On all devices: of what several hold, each reads its own copy. Without what an encoder-decoder reads once."""
  return sum(x.sharding.num_devices * math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
             for path, x in jax.tree_util.tree_leaves_with_path(model)
             if not any(name in jax.tree_util.keystr(path) for name in READ_ONCE))


def benchmark(config: ConfigDict, repeats: int = 3) -> dict[str, Any]:
  """The row of one config, timed against plain decoding of the same target."""
  session = Session.from_config(config)
  return compare({config.drafter.name: session}, load_prompts(config.data), repeats)[-1]


def show(rows: Sequence[Mapping[str, Any]], file: TextIO | None = None) -> None:
  """Prints the rows as two tables, so that lines fit a terminal; then says what a reader could overlook."""
  for title, keys in TABLES.items():
    print_table(rows, columns(*keys), f'\n{title}', file=file)
  warn(rows)


def warn(rows: Sequence[Mapping[str, Any]]) -> None:
  """Says what a reader could overlook."""
  for row in rows:
    if row['gamma'] and not row['drafted']:
      cli.say(f'warning: {row["drafter"]} was asked for but drafted nothing: this row is plain decoding')
    elif row['speedup'] < 1:
      cli.say(f'{row["drafter"]}, γ={row["gamma"]}: speculation does not pay here ({row["speedup"]:.2f}x)')


def main() -> int:
  config = cli.config_of(CONFIG)
  session = Session.from_config(config)
  rows = compare({config.drafter.name: session}, load_prompts(config.data), REPEATS.value)
  show(rows, cli.output())
  cli.write_json(rows)
  return 0


if __name__ == '__main__':
  CONFIG = cli.define_config()
  REPEATS = flags.DEFINE_integer('repeats', 3, 'Timed runs of each batch; medians are reported.', lower_bound=1)
  cli.run(main)
