"""Says whether speculation pays for a target, some drafts, real prompts, a batch and a machine; and which γ, how far.

    python -m experiments.advise --config=configs/smollm2.py:lookup --drafts=configs/smollm2.py:self
    python -m experiments.advise --config=configs/smollm2.py:lookup --config.target.source=PATH \\
        --config.data.kind=file --config.data.path=traffic.jsonl --config.data.limit=40 --check
    python -m experiments.advise --config=configs/smollm2.py:lookup --topology=v5e-4 --config.mesh.model=4

The config has the target, the prompts, the sampling, the batch (`engine.batch`) and the first draft; of each of
--drafts the sections drafter and accept are taken, engine.gamma and engine.widths. Every γ up to a draft's engine.gamma
is weighed, so let it be generous. Three things are measured: what the drafts get accepted, by decoding the prompts once
with each; passes over 1, 2, ... tokens of each row; and a draft, alone. Passes and drafts are timed at `engine.batch`,
and for what is said of other batches with 1, 2, 4, ... --most_batch rows. The rest follows (`experiments/advice.py`),
and --check times the best γ of each draft against plain decoding.

With --topology the costs are those that `launch.plan` predicts for the slice, batch by batch (compiled one by one). The
prompts are decoded on this machine; or, of a target that is too large for it, --counts names what an earlier run wrote
by --json_out, on some slice or with a smaller target whose drafts are accepted alike, and nothing is decoded:

    python -m experiments.advise --config=configs/chinchilla.py --topology=v4-32 --counts=advice.json

Fields of a row, one for each draft:

    draft, rule, batch, prompts                 as asked for
    most_batch                                  as asked for, or the largest power of two that fits on the slice
    temperature, top_k, top_p                   as asked for
    gamma                                       the best, by prediction
    measured_overlap, _overlap_interval         alpha: mean of sum min(target, draft), 95 % bootstrap over prompts;
                                                null, as all intervals, of fewer than five prompts
    measured_accepted, _accepted_intervals      by position: kept, where tested
    measured_gamma, _tokens_per_pass            of the decoding that was counted
    measured_counts                             by prompt (`advice.Acceptance`), for --counts
    measured_plain_ms                           a pass over one token of each row
    measured_draft_cost, _verify_cost, _v       c of a draft of `gamma` tokens; v(1), v(2), ... (of widths above 9 some
                                                are interpolated); v(gamma + 1); all at `batch`
    measured_speedup                            with --check, at `gamma`
    predicted_speedup, _interval, _by_gamma     over plain decoding at `batch`; 95 % over prompts, costs as they are
    predicted_stops_paying_at                   the smallest batch at which `gamma` gains nothing
    predicted_arithmetic_bound_at               the smallest batch at which a pass over `gamma` + 1 tokens takes two
                                                plain passes of one row: below it reading the weights decides
    predicted_tree_speedup, tree                the best static tree of a draft with heads, and what it promises

Costs of a slice have the names predicted_plain_ms and so on. A batch is null where none up to --most_batch is one.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict
import numpy as np

from experiments import advice
from experiments.advice import Costs, MeasuredCosts
from experiments.advice_costs import HEADS, MAX_NODES, measured_costs, planned_costs
from experiments.advice_drafts import Candidate, candidates_of, counted, draft_configs, judged_by
from experiments.advice_verdict import speedup_of, verdict
from experiments.plan_tree import ROW_TOKENS, by_level, held_out_ranks, takes_likeliest
from launch import bench, cli, results
from launch.compile_ahead import need_compiler
from launch.corpus import Text, rows
from launch.errors import RunError
from launch.prompts import load_prompts
from launch.session import Session
from launch.table import Column, print_table
from models.errors import InputError
from specdec.training.acceptance import acceptance_table
from specdec.tree import TreeSpec
from specdec.tree_planner import plan

LEVELS, RANKS = 5, 8  # of planned trees
_interval = lambda pair: '-' if np.isnan(pair[0]) else f'{pair[0]:.2f}-{pair[1]:.2f}'
_percents = lambda shares: ' '.join('-' if np.isnan(share) else f'{100 * share:.0f}' for share in shares)
COLUMNS = (
    Column('draft'), Column('measured_overlap', 'α', '.2f'), Column('measured_overlap_interval', '95 %', _interval),
    Column('measured_accepted', 'accepted by position, %', _percents),
    *[Column(f'{kind}_{name}', title if kind == 'measured' else f'predicted {title}', form)
      for kind in ('measured', 'predicted') for name, title, form in (
          ('draft_cost', 'c', '.3f'), ('v', 'v(γ+1)', '.2f'))],
    Column('predicted_arithmetic_bound_at', 'arithmetic from batch'), Column('gamma', 'best γ'),
    Column('predicted_speedup', 'predicted speed-up', '.2f'), Column('predicted_interval', '95 %', _interval),
    Column('predicted_stops_paying_at', 'gains nothing at batch'),
    Column('measured_speedup', 'measured speed-up', '.2f'))


def row_of(one: Candidate, costs: Costs) -> dict[str, Any]:
  """The fields that the module names, but for what --check measures."""
  batch, acceptance = one.config.engine.batch, one.acceptance
  gamma = advice.best_gamma(acceptance, costs, batch)
  by_gamma = {each: advice.speedup(acceptance, costs, batch, each) for each in acceptance.gammas}
  plain = costs.passes(batch, 1)
  costs_are = 'measured' if isinstance(costs, MeasuredCosts) else 'predicted'
  return {
      'draft': one.name, **judged_by(one.config), 'batch': batch, 'most_batch': max(costs.batches),
      'prompts': len(acceptance), 'gamma': gamma, 'measured_overlap': acceptance.overlap,
      'measured_overlap_interval': advice.interval(acceptance, lambda some: some.overlap),
      'measured_accepted': acceptance.conditional_M,
      'measured_accepted_intervals': advice.position_intervals(acceptance), 'measured_gamma': acceptance.gamma,
      'measured_tokens_per_pass': float(acceptance.emitted_P.sum() / acceptance.passes_P.sum()),
      'measured_counts': acceptance, f'{costs_are}_plain_ms': 1e3 * plain,
      f'{costs_are}_draft_cost': costs.draft(batch, gamma) / gamma / plain,
      f'{costs_are}_verify_cost': [costs.passes(batch, width) / plain for width in range(1, acceptance.gamma + 2)],
      f'{costs_are}_v': costs.passes(batch, gamma + 1) / plain,
      'predicted_arithmetic_bound_at': advice.arithmetic_bound_at(costs, gamma), 'measured_speedup': None,
      'predicted_speedup': by_gamma[gamma], 'predicted_by_gamma': by_gamma,
      'predicted_interval': advice.interval(acceptance, lambda some: advice.speedup(some, costs, batch, gamma)),
      'predicted_stops_paying_at': advice.stops_paying_at(acceptance, costs, gamma),
      **_planned_tree(one, costs, batch)}


def _planned_tree(one: Candidate, costs: Costs, batch: int) -> dict[str, Any]:
  """The best static tree for heads by what they get right on the texts that were decoded.

  Nothing for other drafts, and for children that are drawn, which are not kept as often as the likeliest are right.
  """
  if one.config.drafter.name not in HEADS or not isinstance(costs, MeasuredCosts):
    return {}  # a plan knows passes of the config's own tree only
  drafter = one.session.engine.drafter
  if not isinstance(drafter.tree, TreeSpec) or not takes_likeliest(one.session):
    return {}
  levels = min(LEVELS, one.config.drafter.num_heads) if one.config.drafter.name == 'medusa' else LEVELS
  texts = []
  for prompt, said in zip(one.prompts, one.completions, strict=True):
    ids = one.session.encode(prompt)
    texts.append(Text(prompt.id, 'traffic', one.config.sampling.temperature, len(ids), (*ids, *said.token_ids)))
  ranks_NTM = held_out_ranks(one.session.params, one.session.tokenizer.num_tokens, rows(texts, ROW_TOKENS), levels)
  plain = costs.passes(batch, 1)
  verify_cost = [costs.passes(batch, width) / plain for width in range(1, MAX_NODES + 2)]
  draft_cost = costs.draft(batch, costs.gamma) / plain
  best = plan(acceptance_table(ranks_NTM, RANKS), verify_cost, *by_level(one.session, draft_cost))
  return {'tree': best.tree, 'predicted_tree_speedup': best.speedup}


def check(one: Candidate, gamma: int, repeats: int) -> float:
  """The speed-up that this γ really has, at the config's batch."""
  config = one.config.copy_and_resolve_references()
  config.engine.gamma = gamma
  config.engine.widths = tuple(width for width in config.engine.widths if width <= gamma + 1)
  if config.drafter.name in HEADS and not one.acceptance.whole:
    config.drafter.tree = tuple((0,) * depth for depth in range(1, gamma + 1))
  target = None if config.drafter.get('taps') else (one.session.params.target, one.session.tokenizer)
  return bench.compare({one.name: Session.from_config(config, target)}, one.prompts, repeats)[-1]['speedup']


def advise(config: ConfigDict, others: Sequence[str], most_batch: int, repeats: int, topology: str = '',
           assume: Sequence[str] = (), counts: str = '') -> tuple[list[Candidate], list[dict[str, Any]]]:
  """The drafts, and a row for each, without what --check measures; see the flags.

  Raises:
    InputError: whatever is wrong with configs, prompts or slice.
    RunError: texts ended in numbers that are not finite.
  """
  if config.engine.batch > most_batch:
    raise InputError(f'engine.batch={config.engine.batch} is beyond --most_batch={most_batch}: raise it')
  configs = draft_configs(config, others)
  prompts = () if counts else load_prompts(config.data)
  candidates = counted(configs, counts) if counts else candidates_of(configs, prompts, here=not topology)
  costs = ([planned_costs(one.config, topology, assume, most_batch) for one in candidates] if topology else
           measured_costs(candidates, prompts, most_batch, repeats))
  return candidates, [row_of(one, cost) for one, cost in zip(candidates, costs, strict=True)]


def check_all(candidates: Sequence[Candidate], found: Sequence[dict[str, Any]], repeats: int) -> None:
  """Adds to each row what its γ really gains; what was counted outlives a check that fails.

  Raises:
    RunError: texts ended in numbers that are not finite.
  """
  try:
    for one, row in zip(candidates, found, strict=True):
      row['measured_speedup'] = check(one, row['gamma'], repeats)
  except RunError:
    write(found)
    raise


def write(found: Sequence[dict[str, Any]]) -> None:
  cli.write_json({'verdict': verdict(found), 'rows': found, **results.environment()})


def show(found: Sequence[dict[str, Any]]) -> None:
  print_table(found, COLUMNS, file=cli.output(), marked=lambda row: not speedup_of(row) > 1)
  for row in found:
    if row.get('tree'):
      cli.say(f'{row["draft"]}: the best static tree has {len(row["tree"])} nodes and promises '
              f'{row["predicted_tree_speedup"]:.2f} times the speed of plain decoding (drafter.tree and engine.gamma)')
  cli.say(verdict(found))


def main() -> None:
  cli.refuse_job()
  config = cli.config_of(CONFIG)
  if TOPOLOGY.value:
    if CHECK.value:
      raise InputError('--check measures here, --topology predicts a slice: leave one out')
    need_compiler()
  elif ASSUME.value or COUNTS.value:
    raise InputError(f'--{"assume" if ASSUME.value else "counts"} is for a slice: name one by --topology, or leave it '
                     'out')
  candidates, found = advise(config, DRAFTS.value, MOST_BATCH.value, REPEATS.value, TOPOLOGY.value, ASSUME.value,
                             COUNTS.value)
  if CHECK.value:
    check_all(candidates, found, REPEATS.value)
  write(found)
  show(found)


if __name__ == '__main__':
  CONFIG = cli.define_config()
  DRAFTS = flags.DEFINE_list('drafts', [], 'FILE:variant of further configs, whose drafts are judged too.')
  MOST_BATCH = flags.DEFINE_integer('most_batch', 16, 'The largest batch to say something about.', lower_bound=1)
  REPEATS = flags.DEFINE_integer('repeats', 5, 'Timed calls of each part; medians are taken.', lower_bound=1)
  CHECK = flags.DEFINE_bool('check', False, 'Time the best γ of each draft against plain decoding too.')
  TOPOLOGY = flags.DEFINE_string('topology', '', 'A slice such as v4-32: costs are predicted for it (launch.plan).')
  COUNTS = flags.DEFINE_string('counts', '', 'With --topology: what --json_out wrote, in the place of decoding.')
  ASSUME = flags.DEFINE_list('assume', [], 'NAME=NUMBER: assumptions of the plan to change.')
  cli.run(main)
