"""Says before a TPU slice is paid for whether a config fits on it, what is compiled for it, and what it should cost.

    python -m launch.plan --config=configs/chinchilla.py --topology=v4-32
    python -m launch.plan --config=configs/chinchilla.py --topology=v5e-16 --assume=hop_us=2.7,hbm_share=0.8
    python -m launch.plan --config=configs/chinchilla.py --topology=8xH100

A config that trains (configs/pretrain.py:1b) is planned by its step: see launch/plan_training.py.

No TPU is needed: the compiler of `pip install -e '.[tpu]'` compiles for a described slice, with shapes instead of
weights. 80 layers take about four minutes on two cores, half of them for the prefill (`--only=speculative,plain` leaves
it out). GPUs (COUNTxA100, H100 or H200) are planned by roofline only. Structure and memory are facts about the
compiled programs; times are predictions, and stand in columns of their own beside published figures. Of --json_out:

    topology, chips, hosts            the slice
    fits                              whether weights, caches, temporaries and code fit into a chip's memory
    usable_gib, weights_gib, cache_gib          of one chip
    temp_mib, prefill_temp_mib, code_mib        temporaries of the loops, of the prefill; the largest program
    loop_copies, vector_dots          of decode loops: copies of caches or weights; products off the matrix unit
    all_reduces_per_pass              by part of a step: of layers, others (embedding), all-gathers (logits)
    aliased, aliased_mib              whether all of the state that a loop is given is written in place
    same_shardings                    whether a loop hands the state back laid out as it came
    floor_ms                          bytes of a plain pass over the peak bandwidth
    predicted_ms_plain, _draft, _verify         see launch/estimate.py; plain and verify include accept and commit,
                                      and of heads _draft is a whole draft
    workloads                         ms per token at the acceptance of each
    published_ms_plain                of the paper that the config sets up
    assumptions, derivation           what the predictions rest on, and each as a sum
    left_out                          fields that a run heeds and the plan does not
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from absl import flags
import jax
from ml_collections import ConfigDict

from launch import cli, estimate
from launch.build import check_fields, source_capacity
from launch.chips import CHIPS, GIB, gpus_of
from launch.compile_ahead import (
  Compiled,
  DoesNotFitError,
  Programs,
  described_mesh,
  kept_arrays,
  need_compiler,
  programs_of,
)
from launch.estimate import FIRST, HEADS, NEXT, REST, VERIFY, Assumptions, Pass, Step, Work, Workload
from launch.plan_training import TRAINING, plan_command
from launch.progress import track
from launch.roofline import roofline
from launch.shapes import device_bytes
from launch.slices.table import Slice, slice_or_chip
from launch.table import Column, print_table
from models.decoder import Decoder
from models.eagle import EagleWeights
from models.encdec import READ_ONCE, EncDec
from models.errors import InputError
from models.kv_cache import KVCache
from specdec.drafters import Drafter, Hybrid, MedusaParams, ReducedModel
from specdec.engine import SMALLEST_BUCKET
from specdec.state import DecodeState

MIB = 1 << 20
LOOPS = ('speculative', 'plain')
PROGRAMS = (*LOOPS, 'prefill')
SHOWN = 5  # instructions of each kind that are wrong; --json_out has all
UNREAD = ('relative', *READ_ONCE)  # what only makes keys and values of distances and sources, once
MEMORY = (('weights', 'weights_gib', 2, 'GiB'), ('caches', 'cache_gib', 2, 'GiB'),
          ('temporaries of the loops', 'temp_mib', 1, 'MiB'), ('of the prefill', 'prefill_temp_mib', 1, 'MiB'),
          ('code', 'code_mib', 0, 'MiB'), ('usable', 'usable_gib', 2, 'GiB'))
WORKLOAD_COLUMNS = (
    Column('name', 'workload'), Column('alpha', format='.3f'), Column('gamma', 'γ'),
    Column('tokens_per_pass', 'tokens/pass', '.2f'), Column('measured_ms_per_token', 'measured ms/token', '.2f'),
    Column('predicted_ms_per_token', 'predicted ms/token', '.2f'),
    Column('published_ms_per_token', 'published ms/token', '.2f'),
    Column('predicted_speedup', 'predicted speed-up', '.2f'),
    Column('published_speedup', 'published speed-up', '.2f'))


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Bytes on one chip.

  Attributes:
    weights: of all models.
    state: caches, and whatever else the loop carries.
    target_pass, draft_pass: what one pass reads; of heads, what a whole draft does.
  """

  weights: int
  state: int
  target_pass: int
  draft_pass: int

  @classmethod
  def of(cls, programs: Programs, state: DecodeState) -> 'Sizes':
    params = programs.params
    return cls(weights=device_bytes(params), state=device_bytes(state), target_pass=_read(params.target, state.cache),
               draft_pass=_draft_bytes(programs.engine.drafter, params.draft, caches_of(state.draft_state)))


def caches_of(tree: Any) -> list[KVCache]:
  is_cache = lambda leaf: isinstance(leaf, KVCache)
  return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_cache) if is_cache(leaf)]


def _read(model: Decoder | EncDec, *caches: KVCache) -> int:
  """Bytes that one pass reads; of an embedding that is not the head as well, a few rows only."""
  unread = UNREAD if model.head is None else (*UNREAD, 'embed')
  return device_bytes(model, unread) + device_bytes(
      [(cache.k, cache.v, cache.relative, cache.cross) for cache in caches])


def _draft_bytes(drafter: Drafter, draft: Any, caches: list[KVCache]) -> int:
  match draft:
    case Decoder() | EncDec():
      return _read(draft, *caches)
    case ReducedModel():
      return _read(draft.model, *caches)
    case MedusaParams():
      return device_bytes(draft)
    case EagleWeights():  # a pass for each level of its tree
      drafter = drafter.drafter if isinstance(drafter, Hybrid) else drafter
      one = device_bytes((draft.head, draft.lm_head_UD), ('embed',)) + device_bytes([(c.k, c.v) for c in caches])
      return drafter.tree.levels * one
  return 0


def plan(config: ConfigDict, made: Slice, assume: Sequence[str] = (), wanted: Sequence[str] = PROGRAMS,
         prompt_tokens: int = 256) -> dict[str, Any]:
  """All facts about a config on a slice; without times if it does not fit, with the reason under `problem`.

  Args:
    config: of a decode command.
    made: the slice.
    assume: see `Assumptions.of`.
    wanted: which of `PROGRAMS` to compile.
    prompt_tokens: width of the prefill pass.

  Raises:
    InputError: see `described_mesh` and `programs_of`.
  """
  check_fields(config)
  if source_capacity(config):
    prompt_tokens = SMALLEST_BUCKET  # the prompt is the encoder's, of so many tokens
  if prompt_tokens >= config.engine.capacity:
    raise InputError(f'--prompt_tokens={prompt_tokens} leaves no room in engine.capacity={config.engine.capacity}: '
                     'lower one or raise the other')
  chip = CHIPS[made.generation]
  assumptions = Assumptions.of(made, chip, assume)
  workloads = estimate.workloads_of(config)
  programs = programs_of(config, described_mesh(made, config.mesh))
  state = programs.state(config.engine.batch, prompt_tokens)
  left_out = _left_out(config)
  sizes = Sizes.of(programs, state)
  facts = {
      'topology': made.name, 'chips': made.chips, 'hosts': made.hosts, 'usable_gib': chip.usable_gib,
      'weights_gib': sizes.weights / GIB, 'cache_gib': sizes.state / GIB, 'gamma': programs.engine.gamma,
      'rows': programs.engine.rows, 'floor_ms': sizes.target_pass / (chip.hbm_gbs * 1e6),
      'assumptions': dataclasses.asdict(assumptions), 'left_out': left_out}
  excess = (sizes.weights + sizes.state) / GIB - chip.usable_gib
  if excess > 0:
    return facts | {'fits': False, 'problem': _too_big(made, sizes, f'{excess:.2f} GiB a chip too much')}
  try:
    with jax.default_matmul_precision(config.engine.precision):
      compiled = _compile(programs, config.engine.batch, prompt_tokens, wanted)
  except DoesNotFitError as error:
    return facts | {'fits': False, 'problem': _too_big(made, sizes, str(error))}
  facts |= _structure(programs, state, compiled)
  resident = sizes.weights + sizes.state + max(one.temp_bytes + one.code_bytes for one in compiled.values())
  facts['fits'] = resident <= chip.usable_gib * GIB
  if not facts['fits']:
    return facts | {'problem': _too_big(made, sizes, f'{resident / GIB - chip.usable_gib:.2f} GiB a chip too much')}
  return facts | _times(config, programs, sizes, compiled, assumptions, workloads)


def _compile(programs: Programs, batch: int, bucket: int, wanted: Sequence[str]) -> dict[str, Compiled]:
  """A config without drafts has no speculative program."""
  compilers = {
      'speculative': lambda: programs.compile_loop(batch, bucket),
      'plain': lambda: programs.plain.compile_loop(batch, bucket),
      'prefill': lambda: programs.compile_prefill(batch, bucket)}
  names = [name for name in PROGRAMS if name in wanted and (name != 'speculative' or programs.engine.gamma)]
  if not names:
    raise InputError('nothing to compile: with engine.gamma=0 there is no speculative program, name others in --only')
  return {name: compilers[name]() for name in track(names, len(names), 'compiling')}


def _left_out(config: ConfigDict) -> list[str]:
  """Fields that a run heeds and a plan does not: a pass has one width, and γ is the same in every step."""
  fields = {'engine.widths': [width for width in config.engine.widths if width <= config.engine.gamma],
            'engine.adaptive': config.engine.adaptive.enabled}
  return [name for name, given in fields.items() if given]


def _too_big(made: Slice, sizes: Sizes, excess: str) -> str:
  """By how much, and which knob helps."""
  knob = 'lower engine.capacity or engine.batch' if sizes.state > sizes.weights else (
      'take a larger slice and raise mesh.model, or a smaller target.dtype')
  return (f'does not fit on {made.name}: {excess} (weights {sizes.weights / GIB:.2f}, caches {sizes.state / GIB:.2f} '
          f'GiB a chip): {knob}')


def _structure(programs: Programs, state: DecodeState, compiled: Mapping[str, Compiled]) -> dict[str, Any]:
  """What the compiled programs are like."""
  kept = kept_arrays((programs.params, caches_of(state)))
  loops = {name: compiled[name] for name in LOOPS if name in compiled}
  return {
      'temp_mib': max((loop.temp_bytes for loop in loops.values()), default=0) / MIB,
      'prefill_temp_mib': compiled['prefill'].temp_bytes / MIB if 'prefill' in compiled else None,
      'code_mib': max(program.code_bytes for program in compiled.values()) / MIB,
      'loop_copies': [f'{name}: {copy}' for name, loop in loops.items() for copy in loop.program.loop_copies(kept)],
      'vector_dots': [f'{name}: {dot}' for name, loop in loops.items() for dot in loop.program.vector_dots()],
      'aliased': all(loop.aliased for loop in loops.values()),
      'aliased_mib': max((loop.aliased_bytes for loop in loops.values()), default=0) / MIB,
      'same_shardings': all(loop.same_shardings for loop in loops.values())}


def _works(compiled: Mapping[str, Compiled], assumptions: Assumptions) -> dict[str, Work]:
  """What each pass does; plain and verify passes with accept and commit behind them."""
  parts = {name: estimate.work_of(compiled[name].program, assumptions) for name in LOOPS if name in compiled}
  works = {'plain': parts['plain'][VERIFY] + parts['plain'][REST]} if 'plain' in parts else {}
  if 'speculative' in parts:
    of_step = parts['speculative']
    works |= {'verify': of_step[VERIFY] + of_step[REST], 'draft': of_step[HEADS], 'draft first': of_step[FIRST],
              'draft next': of_step[NEXT]}
  return works


def _times(config: ConfigDict, programs: Programs, sizes: Sizes, compiled: Mapping[str, Compiled],
           assumptions: Assumptions, workloads: Sequence[Workload]) -> dict[str, Any]:
  """Predictions; of what was not compiled, None."""
  works = _works(compiled, assumptions)
  read = {name: sizes.draft_pass if name.startswith('draft') else sizes.target_pass for name in works}
  passes = {name: Pass.of(work, read[name], assumptions) for name, work in works.items() if work.cycles and read[name]}
  ms = {name: one.ms for name, one in passes.items()}
  rows = []
  if 'plain' in ms and 'verify' in ms:
    first = ms.get('draft', 0.0) + ms.get('draft first', 0.0)
    step = Step(ms['plain'], first, ms.get('draft next', 0.0), ms['verify'])
    rows = [workload.row(step, programs.engine.gamma) for workload in workloads]
  return {
      'all_reduces_per_pass': {name: {
          'layers': works[name].layer_reduces, 'other': works[name].other_reduces, 'all_gathers': works[name].gathers}
          for name in passes},
      'predicted_ms_plain': ms.get('plain'), 'predicted_ms_draft': ms.get('draft', ms.get('draft next')),
      'predicted_ms_draft_first': ms.get('draft first'), 'predicted_ms_verify': ms.get('verify'),
      'published_ms_plain': estimate.published_plain_ms(config), 'workloads': rows,
      'derivation': {name: str(one) for name, one in passes.items()}}


def show(facts: Mapping[str, Any]) -> None:
  """Prints the facts: memory, structure, times, and what the times rest on."""
  hosts = f' on {facts["hosts"]} hosts' if facts['hosts'] else ''
  cli.say(f'{facts["topology"]}: {facts["chips"]} chips{hosts}')
  if facts.get('left_out'):
    cli.say(f'left out of the plan: {", ".join(facts["left_out"])} (every verify pass is engine.gamma + 1 wide)')
  memory = [f'{name} {facts[key]:.{digits}f} {unit}' for name, key, digits, unit in MEMORY
            if facts.get(key) is not None]
  cli.say(f'memory of a chip: {", ".join(memory)}; fits: {_yes(facts["fits"])}')
  if 'loop_copies' in facts:
    _show_structure(facts)
  if 'predicted_ms_plain' in facts:
    _show_times(facts)


def _show_structure(facts: Mapping[str, Any]) -> None:
  for name, found in (('copies of caches or weights in loops', 'loop_copies'),
                      ('products off the matrix unit', 'vector_dots')):
    cli.say('\n  '.join([f'{name}: {len(facts[found]) or "none"}', *facts[found][:SHOWN]]))
  cli.say(f'state written in place: {_yes(facts["aliased"])} ({facts["aliased_mib"]:.1f} MiB a chip), '
          f'handed back as it lay: {_yes(facts["same_shardings"])}')
  for name, counts in facts.get('all_reduces_per_pass', {}).items():
    cli.say(f'{name} pass: {counts["layers"]} all-reduces of layers (attention and MLP), {counts["other"]} of the '
            f'embedding, {counts["all_gathers"]} all-gather of the logits')


def _show_times(facts: Mapping[str, Any]) -> None:
  cli.say(f'floor of a plain pass (bytes over peak bandwidth): {facts["floor_ms"]:.2f} ms')
  if 'assumptions' in facts:
    assumed = ', '.join(f'{name}={value:g}' for name, value in facts['assumptions'].items())
    cli.say(f'assumed (--assume=NAME=NUMBER,...): {assumed}')
    for name, sum_ms in facts['derivation'].items():
      cli.say(f'predicted ms, {name} pass: {sum_ms}')
  plain = {'name': 'plain decoding', 'measured_ms_per_token': None, 'predicted_speedup': 1.0,
           'predicted_ms_per_token': facts['predicted_ms_plain'], 'published_ms_per_token': facts['published_ms_plain']}
  print_table([plain, *facts['workloads']], WORKLOAD_COLUMNS, file=cli.output())


def _yes(fact: bool) -> str:
  return 'yes' if fact else 'NO'


def main() -> int | None:
  if not TOPOLOGY.value:
    raise InputError('--topology is missing: name a slice such as v4-32, or GPUs such as 8xH100')
  if 'train' in (CONFIG.value or ()):
    return plan_command(cli.config_of(CONFIG, TRAINING), TOPOLOGY.value, ASSUME.value)
  config, gpus = cli.config_of(CONFIG), gpus_of(TOPOLOGY.value)
  unknown = sorted(set(ONLY.value) - set(PROGRAMS))
  if unknown:
    raise InputError(f'--only={unknown[0]} is no program: use some of {", ".join(PROGRAMS)}')
  if gpus:
    given = [holder.name for holder in (ASSUME, ONLY, PROMPT_TOKENS) if holder.present]
    if given:
      raise InputError(f'--{given[0]} is for slices: GPUs are planned by roofline, with nothing compiled or assumed')
    facts = roofline(config, *gpus)
  else:
    made = slice_or_chip(TOPOLOGY.value)
    need_compiler()
    facts = plan(config, made, ASSUME.value, ONLY.value, PROMPT_TOKENS.value)
  show(facts)
  cli.write_json(facts)
  if not facts['fits']:
    raise InputError(facts['problem'])


if __name__ == '__main__':
  CONFIG = cli.define_config('configs/chinchilla.py')
  TOPOLOGY = flags.DEFINE_string(
      'topology', None, 'A slice such as v4-32, v5p-32, v5e-16, v6e-16; one chip: v4-2; or GPUs: 8xH100.')
  ASSUME = flags.DEFINE_list('assume', [], 'NAME=NUMBER: assumptions to change, such as hop_us=2.7.')
  ONLY = flags.DEFINE_list('only', list(PROGRAMS), f'Which programs to compile, of {", ".join(PROGRAMS)}.')
  PROMPT_TOKENS = flags.DEFINE_integer(
      'prompt_tokens', 256, 'Width of the prefill pass; an encoder reads engine.source_capacity.', lower_bound=1)
  cli.run(main, alone=True)
