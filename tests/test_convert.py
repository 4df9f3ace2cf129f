"""From other software's files to checkpoints of ours, as a command and as a function."""

import json
import os
from pathlib import Path
import shutil
import subprocess
import sys

import jax
from jax.sharding import AxisType
import numpy as np
import pytest

from launch import convert
from models.config import DecoderConfig
from models.errors import InputError
from models.loading import embedded_model, export_gguf, export_hf, load_decoder, orbax
from models.tokenizer import Tokenizer
from tests.models.random_decoder import random_decoder

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / 'tests' / 'fixtures'
SMOLLM2 = f'--config={ROOT}/configs/smollm2.py:none'
TEXT = 'Zwölf Boxkämpfer <|im_end|> jagen 1234 Mal.\n\n  def f(x):'


def run(module: str, *flags: str) -> subprocess.CompletedProcess:
  return subprocess.run([sys.executable, '-m', module, *flags], capture_output=True, text=True, cwd=ROOT,
                        env=os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '8', 'PYTHONPATH': str(ROOT)})


def mesh_of(data: int, model: int):
  devices = jax.devices()[:data * model]
  return jax.make_mesh((data, model), ('data', 'model'), axis_types=(AxisType.Auto,) * 2, devices=devices)


def assert_same_weights(left: Path, right: Path, **changes):
  ours, theirs = (jax.tree.leaves(load_decoder(path, **changes)[0]) for path in (left, right))
  for mine, other in zip(ours, theirs, strict=True):
    assert mine.dtype == other.dtype
    np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


@pytest.mark.parametrize('family, shape', [
    ('llama2', None), ('llama3', (2, 4)), ('mistral', (1, 2)), ('qwen2', (4, 2)), ('qwen3', (1, 1)),
    ('llama-yarn', None)])
def test_families(tmp_path, family, shape):
  source = FIXTURES / 'models' / family
  convert.convert(source, tmp_path / 'it', 'float32', shape and mesh_of(*shape))
  assert orbax.read_config(tmp_path / 'it') == load_decoder(source)[1]
  assert_same_weights(tmp_path / 'it', source)


def generated(source: Path | str, prompt: str, *flags: str) -> dict:
  """What `launch.generate` says of a prompt, in a process with eight devices."""
  done = run('launch.generate', SMOLLM2, f'--config.target.source={source}', f'--prompt={prompt}', '--raw',
             '--json_out=-', '--config.sampling.max_new_tokens=8', '--config.engine.capacity=100', *flags)
  assert done.returncode == 0, done.stderr
  (row,) = json.loads(done.stdout)
  return {name: row[name] for name in ('text', 'token_ids', 'reason')}


@pytest.mark.slow
def test_gguf_with_its_tokenizer(tmp_path):
  """Text, chat and ends are those of the GGUF file, which nobody needs any more."""
  tokenizer = FIXTURES / 'tokenizers' / 'byte-level.gguf'
  vocab_size = -(-Tokenizer.from_gguf(tokenizer).num_tokens // 8) * 8
  source, out = tmp_path / 'it.gguf', tmp_path / 'it'
  decoder = random_decoder(DecoderConfig.tiny(vocab_size=vocab_size))
  export_gguf(decoder, source, tokenizer)
  done = run('launch.convert', f'--source={source}', f'--out={out}', '--mesh=2,4', '--json_out=-')
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout)['bytes'] == sum(leaf.nbytes for leaf in jax.tree.leaves(decoder))
  ours, theirs = Tokenizer.of_model(out), Tokenizer.of_model(source)
  assert ours.encode(TEXT, parse_special=True) == theirs.encode(TEXT, parse_special=True)
  assert (ours.eos_ids, ours.chat_template, ours.vocab) == (theirs.eos_ids, theirs.chat_template, theirs.vocab)
  assert_same_weights(out, source)
  expected = generated(source, 'zwölf')
  assert generated(out, 'zwölf') == expected
  assert generated(out, 'zwölf', '--config.mesh.data=2', '--config.mesh.model=4') == expected  # kv heads repeated


@pytest.mark.slow
def test_the_embedded_model(tmp_path):
  try:
    embedded_model()
  except InputError as error:
    pytest.skip(str(error))
  done = run('launch.convert', '--source=embedded', f'--out={tmp_path / "it"}', '--json_out=-')
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout)['bytes'] == 4 * 134_515_008
  assert generated(tmp_path / 'it', 'The capital of France is') == generated('embedded', 'The capital of France is')


def test_tokenizer_files_of_a_directory(tmp_path):
  source = tmp_path / 'source'
  export_hf(random_decoder(DecoderConfig.tiny(vocab_size=300)), source)
  kept = {'tokenizer_config.json': '{"eos_token": "</s>"}', 'tokenizer.json': '{"a": 1}', 'chat_template.jinja': 'x'}
  for name, text in (kept | {'README.md': 'not needed'}).items():
    (source / name).write_text(text)
  convert.convert(source, tmp_path / 'it', 'bfloat16')
  copied = {path.name: path.read_text() for path in (tmp_path / 'it' / 'tokenizer').iterdir()}
  assert copied == kept | {'config.json': (source / 'config.json').read_text()}
  assert_same_weights(tmp_path / 'it', source, dtype='bfloat16')
  assert orbax.read_config(tmp_path / 'it').dtype == 'bfloat16'


def test_what_is_wrong_is_said_in_one_line(tmp_path):
  source, out = tmp_path / 'source', tmp_path / 'it'
  export_hf(random_decoder(DecoderConfig.tiny(vocab_size=64)), source)

  def refusal(source: Path, out: Path, *more) -> str:
    with pytest.raises(InputError) as caught:
      convert.convert(source, out, *more)
    assert '\n' not in str(caught.value)
    return str(caught.value)

  assert 'does not exist' in refusal(tmp_path / 'nowhere', out, 'float32')
  assert not out.exists()
  assert "dtype='int8' is not a floating-point type" in refusal(source, out, 'int8')
  assert 'does not divide the 64' in refusal(source, out, 'float32', mesh_of(1, 7))
  assert not out.exists()
  assert 'holds other files' in refusal(source, source, 'float32')
  (source / 'model.safetensors').write_bytes(b'')
  assert 'model.safetensors' in refusal(source, out, 'float32')
  with pytest.raises(InputError, match='--mesh=2 should be two numbers'):
    convert.cpu_mesh(['2'])


def test_wrong_use_ends_with_status_2(tmp_path):
  done = run('launch.convert', f'--out={tmp_path / "it"}')
  assert done.returncode == 2 and done.stderr == 'error: pass --source=PATH and --out=DIR\n' and not done.stdout


def test_another_architecture_ends_a_command_with_status_2(tmp_path):
  export_hf(random_decoder(DecoderConfig.tiny(vocab_size=300)), tmp_path / 'source')
  shutil.copy(FIXTURES / 'tokenizers' / 'tokenizer.model', tmp_path / 'source')
  convert.convert(tmp_path / 'source', tmp_path / 'it', 'float32')
  mark = tmp_path / 'it' / 'model.json'
  mark.write_text(json.dumps(json.loads(mark.read_text()) | {'num_layers': 3}))
  done = run('launch.generate', SMOLLM2, '--prompt=a', f'--config.target.source={tmp_path / "it"}')
  assert done.returncode == 2 and done.stderr.count('\n') == 1
  assert 'does not match model.json (6 parameters)' in done.stderr


def test_leftovers_of_another_model_go(tmp_path):
  """A conversion that was killed left its tokenizer: the next one's counts. What is not a leftover is never touched."""
  out, source = tmp_path / 'it', FIXTURES / 'models' / 'llama2'
  (out / 'tokenizer').mkdir(parents=True)
  (out / 'weights').mkdir()
  (out / 'tokenizer' / 'tokenizer.gguf').write_text('of another model')
  with pytest.raises(InputError, match='holds other files'):
    convert.convert(source, out, 'float32')
  (out / 'model.json.part').touch()
  convert.convert(source, out, 'float32')
  assert not (out / 'tokenizer' / 'tokenizer.gguf').exists()


def test_nothing_is_converted_twice(tmp_path):
  export_hf(random_decoder(DecoderConfig.tiny()), tmp_path / 'source')
  convert.convert(tmp_path / 'source', tmp_path / 'it', 'float32')
  for source in ('source', 'it'):
    with pytest.raises(InputError, match='already'):
      convert.convert(tmp_path / source, tmp_path / ('it' if source == 'source' else 'other'), 'float32')


def test_orbax_is_imported_only_where_it_is_needed():
  """It takes half a second, which commands that read no checkpoint of ours should not wait."""
  done = subprocess.run([sys.executable, '-c', 'import launch.generate, sys; print("orbax.checkpoint" in sys.modules)'],
                        cwd=ROOT, capture_output=True, text=True)
  assert done.stdout == 'False\n', done.stderr
