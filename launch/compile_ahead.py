"""Compiles the programs of a config for a TPU slice that is not there: the real compiler, from shapes alone.

`libtpu` compiles for a described slice. No weight is ever made: a model is its graph over `jax.ShapeDtypeStruct`s that
say how each array lies on the mesh.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import types
from typing import Any

from flax import nnx
import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from launch import hlo
from launch.build import (
  build_engine,
  build_sampling,
  check_capacity,
  check_layers,
  random_config,
  splits_draft,
)
from launch.build_drafter import build_drafter
from launch.libtpu_flags import LIBTPU_FLAGS
from launch.mesh import make_mesh
from launch.slices.table import Slice, check_mesh
from models.abstract import abstract_decoder
from models.config import DecoderConfig
from models.decoder import Decoder
from models.errors import InputError
from models.kv_cache import KVCache
from models.kv_heads import with_repeats
from models.loading import embedded_model, orbax
from models.loading.load import float_dtype, open_checkpoint
from models.sharding import sharding_of, spec
from specdec import drafters
from specdec.commit import Limits
from specdec.drafters import Empty
from specdec.engine import Engine, Params, prefill, run
from specdec.state import DecodeState

PLANNED = ('none', 'lookup', 'self', 'model')
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
      shapes = jax.eval_shape(functools.partial(prefill, self.engine, bucket=bucket), *self._arguments(batch))
    return jax.tree.map(self._place, shapes, is_leaf=lambda x: isinstance(x, KVCache))

  def compile_prefill(self, batch: int, bucket: int) -> 'Compiled':
    return self._compile(lambda: prefill.lower(self.engine, *self._arguments(batch), bucket=bucket), donated=None)

  def compile_loop(self, batch: int, bucket: int) -> 'Compiled':
    state = self.state(batch, bucket)
    return self._compile(lambda: run.lower(self.engine, self.params, state), donated=state)

  def _compile(self, lower, donated: DecodeState | None) -> 'Compiled':
    with jax.set_mesh(self.mesh):
      try:
        compiled = lower().compile(compiler_options=LIBTPU_FLAGS)
      except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
          raise
        raise DoesNotFitError(str(error).partition('HLO module')[0].partition('HbmOom: ')[2]) from error
    return Compiled.of(compiled, donated)

  def _arguments(self, batch: int) -> tuple:
    """Of `prefill`, up to the bucket."""
    whole = lambda shape, dtype: self._whole(jax.ShapeDtypeStruct(shape, dtype))
    limits = Limits(whole((4,), jnp.int32), whole((1, 1), jnp.int32), whole((batch,), jnp.int32),
                    whole((batch,), jnp.bool_))
    return (self.params, whole((batch, self.engine.slots), jnp.int32), whole((batch,), jnp.int32),
            whole((batch,), jnp.uint32), limits, jax.tree.map(self._whole, self.sampling))

  def _whole(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return self._split(leaf, '')

  def _split(self, leaf: jax.ShapeDtypeStruct, dims: str, split: bool = True) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec(dims, leaf.shape, self.mesh, split)))

  def _place(self, leaf: Any) -> Any:
    if not isinstance(leaf, KVCache):
      return self._whole(leaf)
    split = lambda arrays, dims: tuple(self._split(x, dims, leaf.split) for x in arrays)
    return leaf.replace(
        k=split(leaf.k, 'BKSH'), v=split(leaf.v, 'BKSH'), relative=split(leaf.relative, 'NSH'),
        position_BS=self._whole(leaf.position_BS), length_B=self._whole(leaf.length_B))


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
      platform='tpu', topology_name=made.aot_name, chip_config_name=made.aot_chip_config)
  return make_mesh(mesh.data, mesh.model, described.devices)


def model_config(section: ConfigDict, attention_block: int) -> DecoderConfig:
  """The shapes of the model of a `target` or `drafter` section; no weight is read."""
  if section.source.startswith('random:'):
    return random_config(section, attention_block)[0]
  path = embedded_model() if section.source == 'embedded' else pathlib.Path(section.source)
  with contextlib.ExitStack() as stack:
    config = (orbax.read_config(path) if orbax.is_checkpoint(path)
              else stack.enter_context(open_checkpoint(path))[2])
  return dataclasses.replace(config, dtype=float_dtype(section.dtype), attention_block=attention_block or None)


def abstract_model(config: DecoderConfig, mesh: Mesh) -> Decoder:
  """The model as shapes that say how they lie on the mesh."""
  graph, leaves = abstract_decoder(with_repeats(config, mesh)[0])
  place = sharding_of(mesh, config.split)
  return nnx.merge(graph, nnx.from_flat_state([
      (path, leaf.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place(path, leaf.shape))))
      for path, leaf in leaves.items()]))


def programs_of(config: ConfigDict, mesh: Mesh) -> Programs:
  """What the config runs on the mesh.

  Raises:
    InputError: a drafter that cannot be planned, or dimensions that the mesh does not divide.
  """
  if config.drafter.name not in PLANNED:
    raise InputError(f"drafter.name={config.drafter.name!r} cannot be planned: use one of {', '.join(PLANNED)}")
  target = model_config(config.target, config.engine.attention_block)
  num_tokens = target.vocab_size
  check_capacity(config, target.max_positions)
  target_model, draft = abstract_model(target, mesh), None
  if config.drafter.name == 'model':
    draft_config = dataclasses.replace(
        model_config(config.drafter, config.engine.attention_block), split=splits_draft(config))
    num_tokens, draft = min(num_tokens, draft_config.vocab_size), abstract_model(draft_config, mesh)
  elif config.drafter.name == 'self':
    check_layers(config.drafter.num_layers, target.num_layers)
    draft = target_model.first_layers(config.drafter.num_layers)
  drafter = (build_drafter(config, target_model, types.SimpleNamespace(num_tokens=num_tokens))[0] if draft is None
             else drafters.Model(num_tokens, config.engine.rows))
  engine = dataclasses.replace(build_engine(config, drafter, num_tokens), widths=(), adaptive=None)
  return Programs(mesh, engine, Params(target_model, draft), jax.eval_shape(lambda: build_sampling(config)))


def device_bytes(tree: Any, without: tuple[str, ...] = ()) -> int:
  """Bytes on one device of the arrays of a tree, but for those named; what is in it twice counts once."""
  leaves = {id(leaf): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if not any(name in jax.tree_util.keystr(path) for name in without)}
  return sum(math.prod(device_shape(leaf)) * leaf.dtype.itemsize for leaf in leaves.values())


def device_shape(leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
  return leaf.sharding.shard_shape(leaf.shape)


def kept_arrays(tree: Any) -> list[hlo.Shape]:
  """The large arrays of a tree as one device holds them: what no loop should copy."""
  names = {'bfloat16': 'bf16', 'float32': 'f32', 'float16': 'f16'}
  shapes = [hlo.Shape(names[str(leaf.dtype)], device_shape(leaf), hlo.HBM) for leaf in jax.tree.leaves(tree)
            if str(leaf.dtype) in names]
  return [shape for shape in shapes if shape.num_bytes >= SMALLEST_KEPT]
