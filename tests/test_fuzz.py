"""Changed files, configs and prompts: answered rightly, or refused in a line. `experiments.fuzz` puts more of them."""

import json
import subprocess
import sys

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
import pytest

from experiments import fuzz, fuzz_checks
from experiments import fuzz_files as files
from experiments.sample_files import read_samples
from launch import corpus, results
from launch.draft_ids import read_draft_ids
from launch.prompts import load_prompts
from launch.tree_file import read_tree
from launch.work_units import WorkUnits
from models.byte_tokenizer import ByteTokenizer
from models.errors import InputError

# Inputs of each target; what builds a model each time gets few.
INPUTS = dict.fromkeys(fuzz_checks.TARGETS, 40) | {'hf_config': 4, 'overrides': 4, 'prompts_file': 20, 'rows_file': 20}


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=[pytest.mark.slow] if name == 'decoding' else []) for name in fuzz_checks.TARGETS])
def test_target(name):
  @settings(max_examples=INPUTS[name], deadline=None, derandomize=True, database=None,
            phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))
  @given(fuzz_checks.TARGETS[name].inputs)
  def put(value):
    fuzz_checks.check(name, value)

  put()


@pytest.mark.parametrize('name, value', [
    ('safetensors', files.safetensors_file()), ('gguf', files.gguf_file()),
    ('hf_config', files.hf_directory()['config.json']), ('overrides', ('lookup', {'engine.gamma': 3})),
    ('prompt', 'The <|im_end|> of é'), ('samples_file', b'{"task_id": "a", "completion": "b"}'),
    ('corpus', json.dumps(files.UNIT).encode()), ('draft_ids', json.dumps(files.IDS).encode()),
    ('rows_file', b'{"a": 1}\n{"b": 2')])
def test_what_is_whole_is_read(name, value, monkeypatch):
  """Without a change nothing is refused, so that the checks do see answers."""
  monkeypatch.setattr(fuzz_checks, 'refused', fuzz_checks.contextlib.nullcontext)
  fuzz_checks.check(name, value)


@pytest.mark.parametrize('name, change', [
    ('safetensors', lambda data: data.replace(b'[0,24]', b'[1,24]')), ('safetensors', lambda data: data[:-1]),
    ('gguf', lambda data: data[:-1]), ('hf_config', lambda data: data.replace(b'"num_hidden_layers": 1', b'"x": 1'))])
def test_what_is_broken_is_refused(name, change, monkeypatch):
  whole = {'safetensors': files.safetensors_file, 'gguf': files.gguf_file,
           'hf_config': lambda: files.hf_directory()['config.json']}[name]()
  assert change(whole) != whole
  monkeypatch.setattr(fuzz_checks, 'refused', fuzz_checks.contextlib.nullcontext)
  with pytest.raises(InputError):
    fuzz_checks.check(name, change(whole))


NESTED = pytest.mark.parametrize('text', files.NESTED, ids=['lists', 'objects', 'digits'])


@NESTED
def test_brackets_and_digits_without_end(text, tmp_path):
  """Python's parser gives up on them with errors of its own."""
  lines, whole, unit = tmp_path / 'lines.jsonl', tmp_path / 'whole.json', tmp_path / 'unit-00000-of-00001.json'
  for path in (lines, whole, unit):
    path.write_text(text + '\n')
  data = fuzz_checks.ConfigDict({'kind': 'file', 'path': str(lines), 'form': 'raw'})
  for read in (lambda: results.read_rows(str(lines)), lambda: read_samples(str(lines)), lambda: load_prompts(data),
               lambda: corpus.read_texts(str(tmp_path)), lambda: read_tree(str(whole)),
               lambda: read_draft_ids(whole, 9)):
    with pytest.raises(InputError):
      read()
  (tmp_path / 'about.json').write_text(text)
  with pytest.raises(InputError, match='is broken'):
    WorkUnits(str(tmp_path), {}, 1)


@pytest.mark.parametrize('field, value', [
    ('tokens', '123'), ('tokens', [1, -1]), ('tokens', [1.5]), ('tokens', [2**31]), ('prompt_length', 9),
    ('prompt_length', 1.0), ('id', 7), ('id', '\ud800'), ('temperature', '1'), ('kind', None), ('more', 1)])
def test_fields_of_a_corpus(field, value, tmp_path):
  """Was: read as they are, so that training failed later, or trained on something else."""
  unit = json.loads(json.dumps(files.UNIT))
  unit['texts'][0][field] = value
  (tmp_path / 'unit-00000-of-00001.json').write_text(json.dumps(unit))
  with pytest.raises(InputError, match='is no unit of a corpus'):
    corpus.read_texts(str(tmp_path))


def test_half_a_character_is_refused_by_bytes():
  with pytest.raises(InputError, match='half of a surrogate pair at character 1'):
    ByteTokenizer().encode('a\ud800')


def test_a_fault_is_found_and_told(monkeypatch):
  """The smallest input that shows it, and status 1."""
  def check(value):
    assert value < 1000

  monkeypatch.setitem(fuzz_checks.TARGETS, 'planted', fuzz_checks.Target(st.integers(0, 10**6), check))
  row = fuzz.fuzz('planted', 60.0, 0)
  assert row['inputs'] > 1 and len(row['faults']) == 1
  assert 'AssertionError' in row['faults'][0] and 'value=1000' in row['faults'][0]


def test_a_hang_is_a_fault(monkeypatch):
  monkeypatch.setattr(fuzz_checks, 'SECONDS', 0.2)

  def check(value):
    while True:
      pass

  monkeypatch.setitem(fuzz_checks.TARGETS, 'planted', fuzz_checks.Target(st.just(0), check))
  with pytest.raises(TimeoutError, match='still at work'):
    fuzz_checks.check('planted', 0)


def test_command(tmp_path):
  out = tmp_path / 'fuzz.json'
  run = lambda *flags: subprocess.run(
      [sys.executable, '-m', 'experiments.fuzz', *flags], capture_output=True, text=True)
  done = run('--minutes=0.001', '--targets=samples_file', f'--json_out={out}')
  assert done.returncode == 0, done.stderr
  (row,) = json.loads(out.read_text())
  assert (row['target'], row['faults']) == ('samples_file', []) and row['inputs'] >= 100
  assert run('--targets=nothing').returncode == 2


@pytest.mark.parametrize('name, offset, value', [
    (b'blk.0.attn_k.weight', 4, 0), (b'blk.0.attn_k.weight', 12, 0), (b'llama.attention.head_count', 4, 7)])
def test_heads_that_do_not_fit_the_rows(name, offset, value, tmp_path):
  """Was: a ValueError of NumPy's where a tensor has no entries, or rows that the heads do not share evenly."""
  data = bytearray(files.gguf_file())
  place = data.index(name) + len(name) + offset
  data[place:place + 4] = value.to_bytes(4, 'little')
  path = tmp_path / 'model.gguf'
  path.write_bytes(data)
  with pytest.raises(InputError, match=r'does not fit|dimension of 0'), fuzz_checks.GgufFile(path) as file:
    file.read('blk.0.attn_q.weight' if value else 'blk.0.attn_k.weight')
