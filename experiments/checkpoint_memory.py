"""How much memory the host needs to convert, restore and save a model that is sharded over eight pretended devices.

    python -m experiments.checkpoint_memory --json_out=experiments/results/checkpoint_memory.json

Writes 1.1 billion random weights (TinyLlama's shapes, bfloat16) as a Hugging Face directory, converts it to a
checkpoint, restores that on a 1 x 8 mesh of CPU devices, whose memory is the host's, saves it again, and compares every
weight. A few minutes and 7 GB of disk. Expected: every peak, interpreter included, at most 1.3 times the weights;
converting alone needs a fraction of them.
"""

from concurrent.futures import ProcessPoolExecutor
import dataclasses
import multiprocessing
from pathlib import Path
import re
import tempfile
import time
from typing import Any

from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from launch import cli
from launch.convert import convert
from launch.mesh import make_mesh
from launch.table import Column, print_table
from models.abstract import abstract_decoder
from models.config import DecoderConfig
from models.decoder import Decoder
from models.errors import InputError
from models.kv_heads import repeat_kv_heads, with_repeats
from models.loading import export_hf, load_decoder, orbax
from models.loading.load import open_checkpoint, read_parameters

DIRECTORY = flags.DEFINE_string('directory', None, 'Where to write the models; a temporary directory by default.')

DEVICES = 8
TINYLLAMA = DecoderConfig(
    vocab_size=32_000, width=2048, num_layers=22, num_heads=32, num_kv_heads=4, head_dim=64, ff_width=5632,
    dtype='bfloat16')
LIMIT = 1.3  # of the bytes of all weights
COLUMNS = (Column('phase'), Column('peak_gb', 'peak GB', '.2f'), Column('peak_of_weights', 'peak / weights', '.2f'),
           Column('seconds', format='.1f'))


@dataclasses.dataclass(frozen=True)
class Phase:
  """`peak_bytes`: the most that the process has held so far (VmHWM), interpreter and earlier phases included."""

  name: str
  peak_bytes: int
  seconds: float


def peak_bytes() -> int:
  """Not ru_maxrss: that begins with the size of the process that started this one."""
  return int(re.search(r'VmHWM:\s+(\d+)', Path('/proc/self/status').read_text())[1]) * 1024


def write_random_model(config: DecoderConfig, directory: Path) -> int:
  """A Hugging Face directory; returns the bytes of its weights."""
  rng = np.random.default_rng(0)
  graph, leaves = abstract_decoder(config)
  for path, leaf in leaves.items():
    values = rng.standard_normal(leaf.shape, np.float32) * config.width ** -0.5
    leaves[path] = leaf.replace(jnp.asarray(values.astype(leaf.dtype)))
  export_hf(nnx.merge(graph, nnx.from_flat_state(leaves.items())), directory)
  return sum(leaf.get_value().nbytes for leaf in leaves.values())


def round_trip(source: Path, directory: Path, dtype: str) -> list[Phase]:
  """Converts, restores and saves again; must run in a process that has not started JAX yet.

  Raises:
    ValueError: if a weight came back changed.
  """
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', DEVICES)
  mesh, phases = make_mesh(1, DEVICES), []

  def timed(name: str, run, *arguments, **named) -> Any:
    start = time.perf_counter()
    result = jax.block_until_ready(run(*arguments, **named))
    phases.append(Phase(name, peak_bytes(), time.perf_counter() - start))
    return result

  phases.append(Phase('start', peak_bytes(), 0.0))
  timed('convert', convert, source, directory / 'converted', dtype, mesh)
  decoder, _ = timed('restore', load_decoder, directory / 'converted', dtype, mesh=mesh)
  timed('save', orbax.save_decoder, directory / 'saved', decoder)
  check_weights(source, decoder, dtype, mesh)
  return phases


def check_weights(source: Path, decoder: Decoder, dtype: str, mesh: Mesh) -> None:
  """That the decoder on the mesh holds the weights of the source, bit for bit."""
  found = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(decoder))}
  with open_checkpoint(source) as (file, style, config):
    config = dataclasses.replace(config, dtype=dtype)
    _, times = with_repeats(config, mesh)
    for path, parameter in read_parameters(file, style, config):
      expected = repeat_kv_heads(path, parameter, times)
      if not all(np.array_equal(shard.data, expected[shard.index]) for shard in found[path].addressable_shards):
        raise ValueError(f'{orbax.name_of(path)} came back changed')


def in_a_fresh_process(function, *arguments) -> Any:
  with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
    return pool.submit(function, *arguments).result()


def measure(config: DecoderConfig, directory: Path) -> tuple[int, list[Phase]]:
  """Bytes of the weights, and the phases."""
  weights = in_a_fresh_process(write_random_model, config, directory / 'source')
  return weights, in_a_fresh_process(round_trip, directory / 'source', directory, config.dtype)


def main() -> int:
  if not Path('/proc/self/status').exists():
    raise InputError('peak memory is read from /proc/self/status: run this on Linux')
  with tempfile.TemporaryDirectory(dir=DIRECTORY.value) as directory:
    weights, phases = measure(TINYLLAMA, Path(directory))
  rows = [{'phase': phase.name, 'peak_gb': phase.peak_bytes / 1e9, 'peak_of_weights': phase.peak_bytes / weights,
           'seconds': phase.seconds} for phase in phases]
  cli.say(f'{weights / 1e9:.2f} GB of weights on {DEVICES} devices')
  print_table(rows, COLUMNS, file=cli.output())
  cli.write_json({'weights_gb': weights / 1e9, 'devices': DEVICES, 'limit': LIMIT, 'phases': rows})
  return int(any(row['peak_of_weights'] > LIMIT for row in rows))


if __name__ == '__main__':
  cli.run(main, alone=True)
