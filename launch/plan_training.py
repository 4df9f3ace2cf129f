"""Plans a training step for a slice that is not there: whether it fits, what the links carry, how long it takes.

    python -m launch.plan --config=configs/pretrain.py:1b --topology=v4-32

The step is compiled, from shapes alone, as `launch.train` runs it. Memory and collectives are facts about the compiled
program; the time is the roofline of 6 N D operations, and an assumption says which share of it is reached. Of
--json_out, besides topology, chips, hosts, fits and usable_gib:

    weights_gib, optimizer_gib      of one chip: float32 masters, and both moments of AdamW
    kept_activations_gib            inputs of the layers that the backward pass computes again, by arithmetic
    temp_gib                        all temporaries of the compiled step: gradients, activations, copies in bfloat16
    all_reduces, reduce_scatters, all_gathers, other_collectives    per step, all micro-batches and layers together
    reduced_gib                     bytes that a chip puts into all-reduces and reduce-scatters in a step
    flops                           6 N D, of one step: D tokens, N parameters
    roofline_seconds                flops over the peak of all chips
    predicted_seconds               at the assumed model flops utilisation (MFU); links not added
    predicted_days                  of the whole training
    mfu                             the assumption: --assume=mfu=0.5 changes it
"""

from collections import Counter
from collections.abc import Mapping, Sequence
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from launch import cli
from launch.chips import CHIPS, GIB, gpus_of
from launch.compile_ahead import DoesNotFitError, compile_on, described_mesh, need_compiler
from launch.hlo import COLLECTIVES, Program
from launch.pretraining import model_config, schedule_of
from launch.roofline import num_parameters
from launch.shapes import device_bytes
from launch.slices.table import Slice, slice_of
from models.config import DecoderConfig
from models.decoder import Decoder
from models.errors import InputError
from models.sequence import stack
from models.sharding import PARAMETERS, spec
from specdec.training.config import TrainConfig
from specdec.training.next_token import NextToken
from specdec.training.optimizer import adamw
from specdec.training.step import TrainState, first_state, train_step

MFU = 0.4  # assumed: PaLM 540B reached .46 on v4 (Chowdhery et al., 2022)
NAMES = {'all-reduce': 'all_reduces', 'reduce-scatter': 'reduce_scatters', 'all-gather': 'all_gathers'}
OTHERS = 'other_collectives'
TRAINING = ('model', 'train', 'mesh')  # sections of a config that pretrains
REDUCING = ('all_reduces', 'reduce_scatters')
MEMORY = (('weights', 'weights_gib'), ('optimizer', 'optimizer_gib'), ('temporaries', 'temp_gib'),
          ('of these kept for the backward pass', 'kept_activations_gib'), ('usable', 'usable_gib'))


def plan_training(config: ConfigDict, made: Slice, mfu: float = MFU) -> dict[str, Any]:
  """All facts about a training step; without a program if it does not fit, with the reason under `problem`.

  Raises:
    InputError: for a mesh that is not that of the slice, or dimensions that it does not divide.
  """
  model, schedule, mesh = model_config(config), schedule_of(config), described_mesh(made, config.mesh)
  state = abstract_state(config, model, schedule, mesh)
  chip = CHIPS[made.generation]
  facts = {
      'topology': made.name, 'chips': made.chips, 'hosts': made.hosts, 'usable_gib': chip.usable_gib,
      'parameters': num_parameters(model), 'steps': schedule.steps,
      'weights_gib': device_bytes(state.trainable) / GIB, 'optimizer_gib': device_bytes(state.optimizer) / GIB,
      'kept_activations_gib': kept_activations(config, model, schedule)} | times(config, model, schedule, made, mfu)
  try:
    compiled = compile_step(config, schedule, state, mesh)
  except DoesNotFitError as error:
    return facts | {'fits': False, 'problem': _problem(made, str(error))}
  memory = compiled.memory_analysis()
  facts |= {'temp_gib': memory.temp_size_in_bytes / GIB, 'code_mib': memory.generated_code_size_in_bytes / (1 << 20)}
  facts |= collectives(Program.parse(compiled.as_text()), model.num_layers, schedule.accumulate)
  resident = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
  facts['fits'] = resident <= chip.usable_gib * GIB
  if not facts['fits']:
    facts['problem'] = _problem(made, f'{resident / GIB - chip.usable_gib:.2f} GiB a chip too much')
  return facts


def abstract_state(config: ConfigDict, model: DecoderConfig, schedule: TrainConfig, mesh: Mesh) -> TrainState:
  """The state of the run as shapes that say how each array lies on the mesh: moments as their parameters."""
  def make() -> TrainState:
    objective, stacked = NextToken(config.train.remat), stack(Decoder(model, nnx.Rngs(0)))
    return first_state(objective, adamw(schedule), schedule, stacked, None, _batch(config, schedule))

  def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    names = [name for name in jax.tree_util.keystr(path, simple=True, separator='.').split('.') if name in PARAMETERS]
    dims = PARAMETERS[names[-1]] if names else ''
    sharding = NamedSharding(mesh, spec(dims, leaf.shape, mesh))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  return jax.tree_util.tree_map_with_path(place, jax.eval_shape(make))


def _batch(config: ConfigDict, schedule: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
  shape = schedule.batch, config.train.row_tokens + 1
  return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ('tokens', 'segments', 'positions')}


def compile_step(config: ConfigDict, schedule: TrainConfig, state: TrainState, mesh: Mesh) -> jax.stages.Compiled:
  """The program of one step.

  Raises:
    DoesNotFitError: the compiler says so.
  """
  batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(
      mesh, spec('BT', leaf.shape, mesh))), _batch(config, schedule))
  step = functools.partial(train_step, NextToken(config.train.remat), adamw(schedule), schedule)
  places = jax.tree.map(lambda leaf: leaf.sharding, state)
  jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
  return compile_on(mesh, lambda: jitted.lower(state, None, batch))


def kept_activations(config: ConfigDict, model: DecoderConfig, schedule: TrainConfig) -> float | None:
  """GiB on one chip of what remat keeps of a micro-batch: the input of every layer."""
  if not config.train.remat:
    return None
  rows = -(-schedule.batch // schedule.accumulate // config.mesh.data)
  values = rows * config.train.row_tokens * model.width * model.num_layers
  return values * jnp.dtype(schedule.dtype).itemsize / GIB


def times(config: ConfigDict, model: DecoderConfig, schedule: TrainConfig, made: Slice, mfu: float) -> dict[str, Any]:
  """By 6 N D (Kaplan et al., 2020): two operations per parameter and token forward, four backward."""
  tokens = schedule.batch * config.train.row_tokens
  flops = 6.0 * num_parameters(model) * tokens
  roofline = flops / (made.chips * CHIPS[made.generation].bf16_tflops * 1e12)
  return {'tokens_per_step': tokens, 'flops': flops, 'mfu': mfu, 'roofline_seconds': roofline,
          'predicted_seconds': roofline / mfu, 'predicted_days': schedule.steps * roofline / mfu / 86_400}


def collectives(program: Program, num_layers: int, accumulate: int) -> dict[str, Any]:
  """How often a step uses the links, and what it reduces over them.

  The scans over layers, forward and backward, lie in the scan over micro-batches; the text does not say how often a
  loop runs.
  """
  counts, reduced = Counter(dict.fromkeys((*NAMES.values(), OTHERS), 0)), 0
  for run in program.runs(lambda scope: num_layers if 'jvp' in scope else accumulate):
    if run.instruction.op in COLLECTIVES:
      name = NAMES.get(run.instruction.op.removesuffix('-start'), OTHERS)
      counts[name] += run.times
      if name in REDUCING:
        reduced += run.times * sum(shape.num_bytes for shape in run.instruction.shapes)
  return dict(counts) | {'reduced_gib': reduced / GIB}


def _problem(made: Slice, excess: str) -> str:
  return (f'does not fit on {made.name}: {excess}: raise train.accumulate or mesh.model, set train.remat, or take a '
          'larger slice')


def assumed_mfu(given: Sequence[str]) -> float:
  """Of --assume.

  Raises:
    InputError: for another assumption, or a share that cannot be.
  """
  mfu = MFU
  for text in given:
    name, _, number = text.partition('=')
    try:
      mfu = float(number)
    except ValueError:
      mfu = 0.0
    if name != 'mfu' or not 0 < mfu <= 1:
      raise InputError(f'--assume={text}: a training step assumes mfu=SHARE alone, in (0, 1]')
  return mfu


def show(facts: Mapping[str, Any]) -> None:
  """Prints the facts."""
  cli.say(f'{facts["topology"]}: {facts["chips"]} chips on {facts["hosts"]} hosts; {facts["parameters"]:,} parameters, '
          f'{facts["steps"]:,} steps of {facts["tokens_per_step"]:,} tokens')
  memory = [f'{name} {facts[key]:.2f} GiB' for name, key in MEMORY if facts.get(key) is not None]
  cli.say(f'memory of a chip: {", ".join(memory)}; fits: {"yes" if facts["fits"] else "NO"}')
  if OTHERS in facts:
    kinds = ', '.join(f'{facts[name]} {name.replace("_", "-")}' for name in NAMES.values())
    cli.say(f'over the links in a step: {kinds}, {facts[OTHERS]} others; {facts["reduced_gib"]:.2f} GiB a chip reduced')
  cli.say(f'predicted: {facts["predicted_seconds"]:.2f} s a step = {facts["flops"]:.3g} operations (6 N D) at '
          f'{facts["mfu"]:.0%} of the peak (--assume=mfu=NUMBER), {facts["roofline_seconds"]:.2f} s at the peak; '
          f'{facts["predicted_days"]:.1f} days in all')


def plan_command(config: ConfigDict, topology: str, assume: Sequence[str]) -> None:
  """What `launch.plan` does for a config with a `train` section.

  Raises:
    InputError: also if it does not fit.
  """
  if gpus_of(topology):
    raise InputError(f'--topology={topology}: a training step is planned for a slice, such as v4-32, not for GPUs')
  mfu, made = assumed_mfu(assume), slice_of(topology)
  need_compiler()
  facts = plan_training(config, made, mfu)
  show(facts)
  cli.write_json(facts)
  if not facts['fits']:
    raise InputError(facts['problem'])
