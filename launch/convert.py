"""Turns a Hugging Face directory or a GGUF file into a checkpoint that every mesh reads in parallel.

  python -m launch.convert --source=models/Llama-2-70b-hf --out=checkpoints/llama2_70b --dtype=bfloat16 --mesh=1,16
  python -m launch.generate --config=configs/smollm2.py:lookup --config.target.source=checkpoints/llama2_70b ...

One parameter after the other is read, cast and written: the host holds a few of them at most, and needs no accelerator.
Any mesh can read what is written; `--mesh` only cuts the files so that each device of such a mesh reads pieces of its
own.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from pathlib import Path
import shutil
import time

from absl import flags
import jax
from jax.sharding import Mesh

from launch import cli
from launch.mesh import make_mesh
from models.abstract import abstract_decoder
from models.errors import InputError
from models.kv_heads import with_repeats
from models.loading import embedded_model, orbax
from models.loading.export import export_gguf_tokenizer
from models.loading.gguf import GgufFile
from models.loading.load import float_dtype, open_checkpoint, place, read_parameters

# What a tokenizer is read from; config.json and generation_config.json name the tokens that end a text.
TOKENIZER_FILES = (
    'tokenizer.json', 'tokenizer.model', 'spiece.model', 'tokenizer_config.json', 'special_tokens_map.json',
    'added_tokens.json', 'chat_template.jinja', 'config.json', 'generation_config.json')


def convert(source: Path, out: Path, dtype: str, mesh: Mesh | None = None) -> int:
  """Returns how many bytes of parameters were written.

  Raises:
    InputError: if the source is at fault, or `out` holds something already.
  """
  if orbax.is_checkpoint(source):
    raise InputError(f'{source} is such a checkpoint already: every mesh can read it')
  written = 0
  with open_checkpoint(source) as (file, style, config):
    config = dataclasses.replace(config, dtype=float_dtype(dtype))
    _, times = with_repeats(config, mesh)

    checked = read_parameters(file, style, config)
    layouts = {path: orbax.layout_in_file(path, leaf.shape, mesh, times)
               for path, leaf in abstract_decoder(config)[1].items()}

    def parameters() -> Iterator[tuple[tuple, jax.Array]]:
      nonlocal written
      for path, parameter in checked:
        written += parameter.nbytes
        yield path, place(parameter, layouts[path])

    orbax.prepare(out)
    copy_tokenizer(source, out / orbax.TOKENIZER)
    orbax.save(out, config, parameters())
  return written


def copy_tokenizer(source: Path, directory: Path) -> None:
  """Of a GGUF file the metadata, of a directory its files; a model without a tokenizer has none to copy."""
  shutil.rmtree(directory, ignore_errors=True)  # of a conversion that was killed, perhaps of another model
  if (source / orbax.MARK).is_file():
    shutil.copytree(source / orbax.TOKENIZER, directory)
    return
  directory.mkdir()
  if source.is_file():
    with GgufFile(source) as file:
      export_gguf_tokenizer(directory / orbax.GGUF_TOKENIZER, file)
    return
  for name in TOKENIZER_FILES:
    if (source / name).is_file():
      shutil.copyfile(source / name, directory / name)


def cpu_mesh(shape: Sequence[str]) -> Mesh | None:
  """A mesh of pretended CPU devices; 1 x 1 is none.

  Raises:
    InputError: if `shape` is not two positive numbers.
  """
  if len(shape) != 2 or not all(size.isascii() and size.isdigit() and int(size) for size in shape):
    raise InputError(f'--mesh={",".join(shape)} should be two numbers: data,model')
  data, model = map(int, shape)
  if data == model == 1:
    return None
  jax.config.update('jax_num_cpu_devices', data * model)
  return make_mesh(data, model)


def main() -> None:
  if SOURCE.value is None or OUT.value is None:
    raise InputError('pass --source=PATH and --out=DIR')
  jax.config.update('jax_platforms', 'cpu')
  mesh = cpu_mesh(MESH.value)
  source = embedded_model() if SOURCE.value == 'embedded' else Path(SOURCE.value)
  start = time.perf_counter()
  written = convert(source, Path(OUT.value), DTYPE.value, mesh)
  seconds = time.perf_counter() - start
  cli.say(f'{OUT.value}: {written / 1e9:.3f} GB of {DTYPE.value} in {seconds:.1f} s')
  cli.write_json({'out': OUT.value, 'bytes': written, 'seconds': seconds})


if __name__ == '__main__':
  SOURCE = flags.DEFINE_string('source', None, "A Hugging Face directory, a .gguf file, or 'embedded'.")
  OUT = flags.DEFINE_string('out', None, 'The directory to write.')
  DTYPE = flags.DEFINE_string('dtype', 'float32', 'Of the parameters that are written.')
  MESH = flags.DEFINE_list('mesh', ['1', '1'], 'data,model: the mesh that the files are cut for.')
  cli.run(main, alone=True)
