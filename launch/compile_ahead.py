"""Compiles the programs of a config for a TPU slice that is not there: the real compiler, from shapes alone.

`libtpu` compiles for a described slice. No weight is ever made: a model is its graph over `jax.ShapeDtypeStruct`s that
say how each array lies on the mesh.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from launch import hlo
from launch.build import build_engine, build_sampling, check_capacity, check_source
from launch.build_drafter import drafter_of
from launch.libtpu_flags import LIBTPU_FLAGS
from launch.mesh import make_mesh
from launch.shapes import abstract_draft, abstract_target, device_shape
from launch.slices.table import Slice, check_mesh
from models.decoder import Decoder
from models.encdec import EncDec
from models.errors import InputError
from models.kv_cache import CrossCache, KVCache
from models.sharding import spec
from models.source import Source
from specdec.commit import Limits
from specdec.drafters import Empty, ReducedModel
from specdec.engine import Engine, Params, prefill, run
from specdec.state import DecodeState

SMALLEST_KEPT = 1 << 16  # bytes; biases and norms are nothing beside


class DoesNotFitError(Exception):
  """The compiler found that the program needs more memory than a chip has; its own words."""


@dataclasses.dataclass(frozen=True)
class Programs:
  """What a config runs on a mesh: the plain loop and the speculative one, as shapes.

  Attributes:
    mesh: of described devices.
    engine, params: of the speculative loop; parameters are `ShapeDtypeStruct`s.
    sampling: shapes of its scalars.
  """

  mesh: Mesh
  engine: Engine
  params: Params
  sampling: Any

  @property
  def plain(self) -> 'Programs':
    """The same target with an empty draft."""
    engine = dataclasses.replace(self.engine, drafter=Empty(), gamma=0, widths=(), adaptive=None)
    return dataclasses.replace(self, engine=engine, params=Params(self.params.target))

  def state(self, batch: int, bucket: int) -> DecodeState:
    """The state after the prompts: caches split over the mesh, everything else whole."""
    with jax.set_mesh(self.mesh):
      shapes = jax.eval_shape(functools.partial(prefill, self.engine, bucket=bucket), *self._arguments(batch),
                              source=self._source(batch))
    return jax.tree.map(self._place, shapes, is_leaf=lambda x: isinstance(x, KVCache))

  def compile_prefill(self, batch: int, bucket: int) -> 'Compiled':
    return self._compile(lambda: prefill.lower(self.engine, *self._arguments(batch), bucket=bucket,
                                               source=self._source(batch)), donated=None)

  def compile_loop(self, batch: int, bucket: int) -> 'Compiled':
    state = self.state(batch, bucket)
    return self._compile(lambda: run.lower(self.engine, self.params, state), donated=state)

  def _compile(self, lower: Callable[[], jax.stages.Lowered], donated: DecodeState | None) -> 'Compiled':
    return Compiled.of(compile_on(self.mesh, lower), donated)

  def _arguments(self, batch: int) -> tuple:
    """Of `prefill`, up to the bucket."""
    whole = lambda shape, dtype: self._whole(jax.ShapeDtypeStruct(shape, dtype))
    limits = Limits(whole((4,), jnp.int32), whole((1, 1), jnp.int32), whole((batch,), jnp.int32),
                    whole((batch,), jnp.bool_))
    return (self.params, whole((batch, self.engine.slots), jnp.int32), whole((batch,), jnp.int32),
            whole((batch,), jnp.uint32), limits, jax.tree.map(self._whole, self.sampling))

  def _source(self, batch: int) -> Source | None:
    """The longest that an encoder may be given."""
    if not self.params.target.has_encoder:
      return None
    shapes = (batch, self.engine.source_capacity), (batch,)
    return Source(*(self._whole(jax.ShapeDtypeStruct(shape, jnp.int32)) for shape in shapes))

  def _whole(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return self._split(leaf, '')

  def _split(self, leaf: jax.ShapeDtypeStruct, dims: str, split: bool = True) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec(dims, leaf.shape, self.mesh, split)))

  def _place(self, leaf: Any) -> Any:
    if not isinstance(leaf, KVCache):
      return self._whole(leaf)
    split = lambda arrays, dims: tuple(self._split(x, dims, leaf.split) for x in arrays)
    cross = leaf.cross
    if cross is not None:
      cross = CrossCache(split(cross.k, 'BKSH'), split(cross.v, 'BKSH'), self._whole(cross.length_B))
    return leaf.replace(
        k=split(leaf.k, 'BKSH'), v=split(leaf.v, 'BKSH'), relative=split(leaf.relative, 'NSH'),
        position_BS=self._whole(leaf.position_BS), length_B=self._whole(leaf.length_B), cross=cross)


def compile_on(mesh: Mesh, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
  """What `lower` gives, compiled for a described mesh.

  Raises:
    DoesNotFitError: the compiler says so.
  """
  with jax.set_mesh(mesh), _uncached():
    try:
      return lower().compile(compiler_options=LIBTPU_FLAGS)
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      raise DoesNotFitError(str(error).partition('HLO module')[0].partition('HbmOom: ')[2]) from error


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
  """Without JAX's cache of programs on disk: without a device of their kind they are written but cannot be read."""
  enabled = jax.config.jax_enable_compilation_cache
  jax.config.update('jax_enable_compilation_cache', False)
  compilation_cache.reset_cache()  # it asks once per process
  try:
    yield
  finally:
    jax.config.update('jax_enable_compilation_cache', enabled)
    compilation_cache.reset_cache()


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A compiled program, read.

  Attributes:
    program: its text.
    temp_bytes, code_bytes, argument_bytes: on one chip.
    aliased_bytes: of the results, written over the arguments.
    aliased: whether every array that was given away is written over.
    same_shardings: whether the loop hands each array back as it came.
  """

  program: hlo.Program
  temp_bytes: int
  code_bytes: int
  argument_bytes: int
  aliased_bytes: int
  aliased: bool
  same_shardings: bool

  @classmethod
  def of(cls, compiled: jax.stages.Compiled, donated: DecodeState | None) -> 'Compiled':
    text, memory = compiled.as_text(), compiled.memory_analysis()
    leaves = jax.tree.leaves(donated)
    given, back = [leaf.sharding for leaf in leaves], jax.tree.leaves(compiled.output_shardings)
    return cls(
        program=hlo.Program.parse(text), temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes, argument_bytes=memory.argument_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        aliased=text.partition('\n')[0].count('-alias)') == len(leaves),
        same_shardings=donated is None or all(
            ours.is_equivalent_to(theirs, leaf.ndim)
            for ours, theirs, leaf in zip(given, back, leaves, strict=True)))


def need_compiler() -> None:
  """Makes ready for `libtpu`; it looks for a TPU machine around it unless it is told not to.

  To be called before JAX loads it. The variables stay in this process: a run on a TPU must not have the first.

  Raises:
    InputError: if it is not installed.
  """
  if importlib.util.find_spec('libtpu') is None:
    raise InputError("planning for a TPU needs its compiler: pip install -e '.[tpu]' (no TPU is needed)")
  os.environ |= {
      'TPU_SKIP_MDS_QUERY': '1',
      'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # beside another process that has it open
      'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_ACCELERATOR_TYPE': 'v4-8', 'TPU_WORKER_ID': '0',  # else it complains
      'TPU_STDERR_LOG_LEVEL': '3', 'TPU_MIN_LOG_LEVEL': '3'}
  jax.config.update('jax_platforms', 'cpu')


def described_mesh(made: Slice, mesh: ConfigDict) -> Mesh:
  """The mesh of a config over the chips of a slice.

  Raises:
    InputError: if it has more or fewer devices than the slice.
  """
  check_mesh(mesh, made)
  described = topologies.get_topology_desc(
      platform='tpu', topology_name=made.aot_name, chip_config_name=made.aot_chip_config,
      chips_per_host_bounds=list(made.aot_host_bounds))
  return make_mesh(mesh.data, mesh.model, described.devices)


def programs_of(config: ConfigDict, mesh: Mesh) -> Programs:
  """What the config runs on the mesh.

  Raises:
    InputError: a drafter that cannot be planned, or dimensions that the mesh does not divide.
  """
  target = abstract_target(config, mesh)
  check_capacity(config, target.max_positions)
  check_source(config, target.has_encoder)
  draft = abstract_draft(config, config.drafter, target, mesh)
  drafting = draft.model if isinstance(draft, ReducedModel) else draft
  num_tokens = min(model.vocab_size for model in (target, drafting) if isinstance(model, Decoder | EncDec))
  engine = dataclasses.replace(
      build_engine(config, drafter_of(config, num_tokens), num_tokens), widths=(), adaptive=None)
  return Programs(mesh, engine, Params(target, draft), jax.eval_shape(lambda: build_sampling(config)))


def kept_arrays(tree: Any) -> list[hlo.Shape]:
  """The large arrays of a tree as one device holds them: what no loop should copy."""
  names = {'bfloat16': 'bf16', 'float32': 'f32', 'float16': 'f16'}
  shapes = [hlo.Shape(names[str(leaf.dtype)], device_shape(leaf), hlo.HBM) for leaf in jax.tree.leaves(tree)
            if str(leaf.dtype) in names]
  return [shape for shape in shapes if shape.num_bytes >= SMALLEST_KEPT]
