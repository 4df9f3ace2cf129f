"""Our own checkpoints: the parameters of a model in Orbax's format, to be read on any mesh.

    DIR/tokenizer/    files of a tokenizer, if there is one
    DIR/weights/      Orbax, one flat dictionary: 'layers.11.attn.qkv' -> array
    DIR/model.json    the config, written last: a directory with model.json.part instead was never finished

The state of a training run lies in the same format, with training.json in the place of model.json. Parameters go by
their names, never by their order, which tree utilities sort as strings (layer 10 before layer 2). They are written and
read in batches of `IN_FLIGHT` bytes, so that the host holds little beside what lies on its devices.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
import dataclasses
import functools
import json
import math
import os
from pathlib import Path
import shutil
from typing import Any

from absl import logging
from flax import nnx
import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from models.abstract import AnyConfig, AnyModel, abstract_decoder
from models.config import DecoderConfig, EncDecConfig, RopeScaling
from models.errors import InputError
from models.kv_heads import FUSED, repeat_kv_heads, with_repeats
from models.loading.freed_memory import give_back
from models.loading.safetensors import read_json
from models.sharding import MODEL, sharding_of

MARK, WEIGHTS, TOKENIZER = 'model.json', 'weights', 'tokenizer'
TRAINING_MARK = 'training.json'
MARKS = (MARK, TRAINING_MARK)
UNFINISHED = f'{MARK}.part'
GGUF_TOKENIZER = 'tokenizer.gguf'  # in TOKENIZER, unless there are the files of a Hugging Face directory
IN_FLIGHT = 32 << 20


def is_checkpoint(directory: str | os.PathLike) -> bool:
  """Whether it holds a checkpoint of this format.

  Raises:
    InputError: if it holds half of one.
  """
  directory = Path(directory)
  if (directory / MARK).is_file():
    return True
  if is_unfinished(directory):
    raise InputError(f'{directory} is a checkpoint that was never finished ({MARK} is missing): write it again')
  return False


def is_finished(directory: Path) -> bool:
  """Whether a save into it ended."""
  return any((directory / mark).is_file() for mark in MARKS)


def is_unfinished(directory: Path) -> bool:
  """Whether a save into it began and did not end, as far as what it left tells: an empty directory may be anybody's."""
  return not is_finished(directory) and any((directory / name).exists() for name in (UNFINISHED, WEIGHTS))


def save(directory: str | os.PathLike, config: AnyConfig, parameters: Iterable[tuple[tuple, jax.Array]]) -> None:
  """Writes parameters as they come, each in the chunks in which it lies on its devices.

  Of several processes each must call this, with its part of the same arrays. What a save that was killed left behind
  is removed first.

  Args:
    directory: made if need be.
    config: of the model.
    parameters: path and array of every parameter; taken one after the other.

  Raises:
    InputError: see `prepare`.
  """
  named = ((name_of(path), parameter) for path, parameter in parameters)
  save_arrays(directory, MARK, dataclasses.asdict(config), named)


def save_arrays(directory: str | os.PathLike, mark: str, facts: dict[str, Any],
                arrays: Iterable[tuple[str, jax.Array]]) -> None:
  """`save` for arrays by name, with `facts` as the JSON file `mark`, which is written last.

  Raises:
    InputError: see `prepare`.
  """
  from orbax.checkpoint.experimental import v1 as ocp  # half a second, which only those who need it should wait
  directory = Path(directory).absolute()
  prepare(directory)
  multihost_utils.sync_global_devices(f'{directory} is ready')
  for batch in _batches(arrays):
    ocp.partial.save(directory / WEIGHTS, batch)
    give_back()
  ocp.partial.finalize(directory / WEIGHTS)
  if jax.process_index() == 0:
    _commit(directory, mark, facts)
  multihost_utils.sync_global_devices(f'{directory} is finished')


def prepare(directory: str | os.PathLike) -> None:
  """Makes the directory, or takes away what a save that was killed left in it.

  Raises:
    InputError: if it holds anything else, or cannot be written.
  """
  directory = Path(directory)
  if jax.process_index() != 0:
    return
  try:
    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in directory.iterdir())
    if set(MARKS) & set(names):
      raise InputError(f'{directory} holds a checkpoint already: choose another directory, or remove it')
    if names and UNFINISHED not in names:
      raise InputError(f'{directory} holds other files, such as {names[0]}: choose an empty directory')
    (directory / UNFINISHED).touch()
    for leftover in directory.glob(f'{WEIGHTS}*'):
      shutil.rmtree(leftover)
  except OSError as error:
    raise InputError(f'{directory} cannot be written: {error.strerror}') from None


def _batches(arrays: Iterable[tuple[Hashable, Any]]) -> Iterator[dict[Hashable, Any]]:
  batch, size = {}, 0
  for name, array in arrays:
    batch[name] = array
    size += math.prod(array.shape) * array.dtype.itemsize
    if size >= IN_FLIGHT:
      yield batch
      batch, size = {}, 0
  if batch:
    yield batch


def _commit(directory: Path, mark: str, facts: dict[str, Any]) -> None:
  """The mark appears whole or not at all."""
  (directory / UNFINISHED).write_text(json.dumps(facts, indent=2) + '\n')
  os.replace(directory / UNFINISHED, directory / mark)


def name_of(path: tuple) -> str:
  return '.'.join(map(str, path))


def save_decoder(directory: str | os.PathLike, decoder: AnyModel) -> None:
  """See `save`."""
  flat = nnx.to_flat_state(nnx.state(decoder, nnx.Param))
  save(directory, decoder.config, ((path, leaf.get_value()) for path, leaf in flat))


def read_config(directory: str | os.PathLike) -> AnyConfig:
  """The config of the model that was saved.

  Raises:
    InputError: if model.json is not one of ours.
  """
  path = Path(directory) / MARK
  fields = read_json(path)
  try:
    if 'num_encoder_layers' in fields:
      return EncDecConfig(**fields | {'taps': tuple(fields['taps'])})
    if fields['rope_scaling'] is not None:
      fields['rope_scaling'] = RopeScaling(**fields['rope_scaling'])
    return DecoderConfig(**fields | {name: tuple(fields[name]) for name in ('windows', 'taps') if name in fields})
  except (KeyError, TypeError) as error:
    raise InputError(f'{path} is not the config of a model: {error}') from None


def structure(directory: str | os.PathLike) -> dict[str, jax.ShapeDtypeStruct]:
  """Name -> shape and dtype of what was saved, layers in order; needs none of the devices it was saved from.

  Raises:
    InputError: if the weights cannot be read.
  """
  from orbax.checkpoint.experimental import v1 as ocp
  weights = Path(directory).absolute() / WEIGHTS
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.ERROR)  # of a damaged checkpoint Orbax warns, at length, and returns nothing
  try:
    entries = ocp.metadata(weights).metadata
  except (OSError, ValueError):  # what Orbax raises is derived from these
    entries = None
  finally:
    logging.set_verbosity(verbosity)
  if entries is None:
    raise InputError(f'{weights} is damaged: it does not say what it holds; write the checkpoint again')
  return {name: jax.ShapeDtypeStruct(entries[name].shape, entries[name].dtype) for name in sorted(entries, key=_order)}


def _order(name: str) -> list[tuple[int, str]]:
  """Layers by their numbers."""
  return [(int(part), '') if part.isdigit() else (-1, part) for part in name.split('.')]


def load_decoder(directory: str | os.PathLike, config: AnyConfig, mesh: Mesh | None = None) -> AnyModel:
  """Reads the parameters into the places that they have on the mesh, cast to the dtype of `config`.

  Args:
    directory: for which `is_checkpoint` holds.
    config: the model to fill; all that decides shapes must be what was saved.
    mesh: None is the default device.

  Raises:
    InputError: one line about what does not match.
  """
  placed, times = with_repeats(config, mesh)
  graph, leaves = abstract_decoder(placed)
  saved = {path: leaf.shape for path, leaf in abstract_decoder(config)[1].items()}
  _check(directory, {name_of(path): shape for path, shape in saved.items()}, MARK)
  for batch in _batches(leaves.items()):
    targets = {
        path: jax.ShapeDtypeStruct(
            saved[path], leaf.dtype, sharding=layout_in_file(path, saved[path], mesh, times, config.split))
        for path, leaf in batch.items()}
    loaded = _read(directory, {name_of(path): target for path, target in targets.items()})
    for path in batch:
      leaves[path] = leaves[path].replace(_repeated(path, loaded.pop(name_of(path)), mesh, times))
    give_back()
  return nnx.merge(graph, nnx.from_flat_state(leaves.items()))


def load_arrays(directory: str | os.PathLike, mark: str, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
  """What `save_arrays` wrote, each array into the place that its target says.

  Raises:
    InputError: one line about what does not match.
  """
  _check(directory, {name: target.shape for name, target in targets.items()}, mark)
  loaded = {}
  for batch in _batches(targets.items()):
    loaded |= _read(directory, batch)
    give_back()
  return loaded


def _check(directory: str | os.PathLike, wanted: Mapping[str, tuple[int, ...]], mark: str) -> None:
  """That the file holds these arrays in these shapes, and no other."""
  found = structure(directory)
  problems = [f'{name!r} is missing' for name in wanted if name not in found]
  problems += [f'{name!r} has shape {found[name].shape}, not {shape}'
               for name, shape in wanted.items() if name in found and found[name].shape != shape]
  problems += [f'{name!r} is not part of the model' for name in found if name not in wanted]
  if problems:
    more = f'; and {len(problems) - 3} more' if len(problems) > 3 else ''
    against = mark if mark == MARK else 'this training'
    raise InputError(f'{Path(directory) / WEIGHTS} does not match {against} ({len(problems)} parameters): '
                     f'{"; ".join(problems[:3])}{more}')


def layout_in_file(path: tuple, shape: tuple[int, ...], mesh: Mesh | None, times: int,
                   split: bool = True) -> Sharding:
  """How a parameter lies when it comes from the file: where it belongs.

  Before its heads are repeated they cannot be split; its inputs can, so that no device holds it whole even then.
  """
  if mesh is None:
    return SingleDeviceSharding(jax.local_devices()[0])
  if times > 1 and path[-1] == 'qkv' and shape[-1] % mesh.shape[MODEL] == 0:
    return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 1), MODEL))
  return sharding_of(mesh, split)(path, shape)


def _read(directory: str | os.PathLike, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
  from orbax.checkpoint.experimental import v1 as ocp
  context = ocp.Context()
  context.pytree.loading.partial_load = True  # one batch of all arrays
  weights = Path(directory).absolute() / WEIGHTS
  try:
    with context:
      return dict(ocp.load(weights, dict(targets)))
  except jax.errors.JaxRuntimeError:  # no memory, for example
    raise
  except Exception:  # Orbax raises nothing narrower; names and shapes have been checked
    raise InputError(f'{weights} is damaged: not all of it can be read; write the checkpoint again') from None


def _repeated(path: tuple, parameter: jax.Array, mesh: Mesh | None, times: int) -> jax.Array:
  if times == 1 or path[-1] not in FUSED:
    return parameter
  repeat = functools.partial(repeat_kv_heads, path, times=times)
  place = sharding_of(mesh)(path, jax.eval_shape(repeat, parameter).shape)
  return jax.jit(repeat, out_shardings=place)(parameter)
