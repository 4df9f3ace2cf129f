"""Says whether speculation pays for a target, some drafts, real prompts, a batch and a machine; and which γ, how far.

    python -m experiments.advise --config=configs/smollm2.py:lookup --drafts=configs/smollm2.py:self
    python -m experiments.advise --config=configs/smollm2.py:eagle \\
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
import dataclasses
import functools
import json
import pathlib
from typing import Any

from absl import flags
from ml_collections import ConfigDict
import numpy as np

from experiments import advice
from experiments.advice import Acceptance, Costs, MeasuredCosts, PlannedCosts
from experiments.plan_tree import ROW_TOKENS, held_out_ranks, takes_likeliest
from experiments.sweep import load_config
from launch import bench, cli, results
from launch.compile_ahead import need_compiler
from launch.corpus import Text, rows
from launch.errors import RunError
from launch.parts import PASSES, Parts
from launch.plan import plan as plan_slice
from launch.progress import track
from launch.prompts import Prompt, load_prompts
from launch.session import Completion, Session, check_finite
from launch.slices.table import chip_alone, slice_of
from launch.table import Column, print_table
from launch.timing import measure
from models.errors import InputError
from specdec.drafters import Lookup
from specdec.drafters.protocol import Drafter
from specdec.training.acceptance import acceptance_table
from specdec.tree import TreeSpec
from specdec.tree_planner import plan as plan_tree

ACCEPTED_BY = ('rule', 'temperature', 'top_k', 'top_p')  # the fields of a row that acceptance depends on
TIMED_WIDTHS = (*range(1, 10), 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # at the config's batch
FEW_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # at others
HEADS = ('medusa', 'eagle')
LEVELS, RANKS, MAX_NODES = 5, 8, 24  # of planned trees
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


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A draft and what is known of it.

  Attributes:
    name: of the draft.
    config: to decode with it.
    acceptance: by prompt.
    session: at batch 1; None where nothing was decoded here.
    prompts, completions: what it was asked, and said.
  """

  name: str
  config: ConfigDict
  acceptance: Acceptance
  session: Session | None = None
  prompts: Sequence[Prompt] = ()
  completions: Sequence[Completion] = ()

  @property
  def by_token(self) -> bool:
    """Whether a shorter draft takes less time, in proportion."""
    return not self.acceptance.whole and self.session.engine.drafter.name in ('model', 'eagle')


def draft_configs(config: ConfigDict, others: Sequence[str]) -> dict[str, ConfigDict]:
  """A config for each draft, by its name; one without a draft adds none.

  Raises:
    InputError: no draft at all, or an adaptive γ.
  """
  configs: dict[str, ConfigDict] = {}
  for given in [config, *map(load_config, others)]:
    if not given.engine.gamma:
      continue
    point = config.copy_and_resolve_references()
    with point.unlocked():
      point.drafter, point.accept = given.drafter, given.accept
      point.engine.gamma, point.engine.widths = given.engine.gamma, given.engine.widths
    if point.engine.adaptive.enabled:
      raise InputError('advice is about one γ for all steps: set engine.adaptive.enabled to False')
    same = sum(name.split()[0] == given.drafter.name for name in configs)
    configs[f'{given.drafter.name} {same + 1}' if same else given.drafter.name] = point
  if not configs:
    raise InputError('no draft to judge: pass a --config with one (engine.gamma above 0), or --drafts')
  return configs


def candidates_of(configs: dict[str, ConfigDict], prompts: Sequence[Prompt], here: bool) -> list[Candidate]:
  """Decodes the prompts with every draft, one at a time; with `here` False on one device, whatever the mesh.

  Raises:
    InputError: whatever is wrong with a config.
    RunError: a text ended in numbers that are not finite.
  """
  if here and any(config.mesh.data > 1 for config in configs.values()):
    raise InputError('advice is for the rows of one part of the mesh: set mesh.data=1, and engine.batch to its rows')
  found: list[Candidate] = []
  for name, config in track(configs.items(), len(configs), 'decoding'):
    alone = config.copy_and_resolve_references()
    alone.engine.batch = 1
    if not here:
      alone.mesh.data = alone.mesh.model = 1
    shared = (found[0].session.params.target, found[0].session.tokenizer) if found else None
    session = Session.from_config(alone, shared if not config.drafter.get('taps') else None)
    texts, engine = session.generate(prompts), session.engine
    check_finite(name, texts)
    acceptance = Acceptance.of([text.metrics for text in texts], engine.verify_widths, drafts_whole(engine.drafter))
    found.append(Candidate(name, config, acceptance, session, prompts, texts))
  return found


def drafts_whole(drafter: Drafter) -> bool:
  """Whether a shorter draft is no part of a longer one: a tree, or a copy that must have its full length."""
  return drafter.is_tree or (isinstance(drafter, Lookup) and not drafter.partial)


def counted(configs: dict[str, ConfigDict], path: str) -> list[Candidate]:
  """The same from the file of an earlier run, by the names of the drafts.

  Raises:
    InputError: a file that is none, that lacks one of the drafts, or counted it at another γ, rule or sampling.
  """
  try:
    found = json.loads(pathlib.Path(path).read_text())['rows']
    rows = {row['draft']: Acceptance.from_counts(row['measured_counts']) for row in found}
    judged = {row['draft']: {name: row[name] for name in ACCEPTED_BY} for row in found}
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise InputError(f'--counts={path} holds no counts ({error}): name what --json_out wrote') from error
  for name, config in configs.items():
    if name not in rows or rows[name].gamma != config.engine.gamma:
      known = ', '.join(f'{draft} with engine.gamma={one.gamma}' for draft, one in rows.items())
      raise InputError(f'--counts={path} is not about {name} with engine.gamma={config.engine.gamma}: it counted '
                       f'{known}')
    for field, value in _judged_by(config).items():
      if judged[name][field] != value:
        raise InputError(f'--counts={path} counted {name} at {field}={judged[name][field]}, not {value}: ask for that, '
                         'or count again')
  return [Candidate(name, config, rows[name]) for name, config in configs.items()]


def _judged_by(config: ConfigDict) -> dict[str, Any]:
  sampling = config.sampling
  return dict(zip(ACCEPTED_BY, (config.accept.rule, sampling.temperature, sampling.top_k, sampling.top_p), strict=True))


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
  made, given = chip_alone(topology) or slice_of(topology), config.engine.batch
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


def row_of(one: Candidate, costs: Costs) -> dict[str, Any]:
  """The fields that the module names, but for what --check measures."""
  batch, acceptance = one.config.engine.batch, one.acceptance
  gamma = advice.best_gamma(acceptance, costs, batch)
  by_gamma = {each: advice.speedup(acceptance, costs, batch, each) for each in acceptance.gammas}
  plain = costs.passes(batch, 1)
  costs_are = 'measured' if isinstance(costs, MeasuredCosts) else 'predicted'
  return {
      'draft': one.name, **_judged_by(one.config), 'batch': batch, 'most_batch': max(costs.batches),
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
  at_once = one.config.drafter.name == 'medusa'  # all levels of a draft cost what one does
  level_cost = 0.0 if at_once else draft_cost / drafter.tree.levels
  best = plan_tree(acceptance_table(ranks_NTM, RANKS), verify_cost, level_cost, draft_cost if at_once else 0.0)
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


def _speedup(row: dict[str, Any]) -> float:
  """As measured, where it was; else as predicted."""
  return row['predicted_speedup'] if row['measured_speedup'] is None else row['measured_speedup']


def verdict(rows_found: Sequence[dict[str, Any]]) -> str:
  """One sentence, which recommends no draft that is not faster than plain decoding, or expected to be."""
  best = max(rows_found, key=_speedup)
  batch, ends, low = best['batch'], best['predicted_stops_paying_at'], best['predicted_interval'][0]
  what, few = f'{best["draft"]} with γ={best["gamma"]}', best['prompts'] < advice.FEWEST_PROMPTS
  gain = f'{_gain(best)} times the speed of plain decoding'
  if not _speedup(best) > 1:
    return f'Speculation does not pay at batch {batch}: decode plainly; the best of these drafts, {what}: {gain}.'
  if few:
    return (f'Speculation may pay at batch {batch}: {what}: {gain}, on {best["prompts"]} of your prompts, too few to '
            f'speak for others: measure more prompts ({advice.FEWEST_PROMPTS} or more).')
  if not low > 1:
    check = ', and --check' if best['measured_speedup'] is None and 'measured_plain_ms' in best else ''
    return (f'Speculation may pay at batch {batch}: {what}: {gain}, but the interval reaches down to no gain: measure '
            f'more prompts{check}.')
  until = (f'it gains nothing from batch {ends} on' if ends is not None and ends > batch else
           f'it still pays at batch {best["most_batch"]}' if ends is None else
           f'though it gains nothing at batch {ends}')
  return f'Speculation pays at batch {batch}: {what}: {gain}, and by prediction {until}.'


def _gain(row: dict[str, Any]) -> str:
  """Predicted, with its interval if it has one, and measured."""
  low, high = row['predicted_interval']
  said = f'predicted {row["predicted_speedup"]:.2f}' + ('' if np.isnan(low) else f' ({low:.2f} to {high:.2f})')
  return said if row['measured_speedup'] is None else f'{said}, measured {row["measured_speedup"]:.2f}'


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
  print_table(found, COLUMNS, file=cli.output(), marked=lambda row: not _speedup(row) > 1)
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
