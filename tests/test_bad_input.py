"""Wrong input at the commands: one line on standard error, status 2, nothing on standard output, nothing written."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import safetensors.numpy

from models.config import DecoderConfig
from models.loading import export_hf
from tests.forked import statuses
from tests.models.random_decoder import random_decoder

ROOT = pathlib.Path(__file__).parents[1]
TOKENIZERS = ROOT / 'tests' / 'fixtures' / 'tokenizers'
TINY, SMOLLM2 = f'--config={ROOT}/configs/tiny.py', f'--config={ROOT}/configs/smollm2.py'
SWEEP = f'--config={ROOT}/configs/sweep_gamma.py'
WHOLE = [SMOLLM2 + ':none', '--config.target.source=FILES/whole', '--raw']
JSON = '--json_out=result.json'

# Name -> flags (in which FILES is the folder of `files`), and what the line must say.
GENERATE = {
    'prompt longer than the capacity': ([*WHOLE, '--prompt=' + '(' * 1100], "prompt 'text' has 1101 tokens"),
    'third of three prompts too long': ([*WHOLE, '--prompts=FILES/three.txt'], "prompt 'three/3' has 1101 tokens"),
    'empty prompt': ([TINY, '--prompt='], 'set data.text'),
    'half a surrogate pair': ([TINY, '--prompts=FILES/surrogate.jsonl'], 'half of a surrogate pair at character 2'),
    'prompt and prompts': ([TINY, '--prompt=a', '--prompts=FILES/three.txt'], '--prompt and --prompts'),
    'no config': (['--prompt=a'], 'pass --config=FILE:variant'),
    'missing config': (['--config=none.py'], 'cannot load the config file none.py'),
    'unknown variant': ([TINY + ':best'], "variant 'best' of configs/tiny.py does not exist"),
    'unknown field': ([TINY, '--config.engine.gama=3'],
                      'no such config field: gama. Did you mean "gamma" instead of "gama"?'),
    'unknown section': ([TINY, '--config.engin.gamma=3'],
                        'no such config field: engin. Did you mean "engine" instead of "engin"?'),
    'value of another type': ([TINY, '--config.engine.gamma=many'], 'many'),
    'unknown flag': ([TINY, '--promt=a'], 'promt'),
    'left-over argument': ([TINY, 'a prompt'], "unexpected argument 'a prompt'"),
    'negative gamma': ([TINY, '--config.engine.gamma=-1'], 'engine.gamma=-1'),
    'no query rows': ([TINY, '--config.engine.rows=0'], 'engine.rows=0 must lie in 1..'),
    'a batch of millions': ([TINY, '--config.engine.batch=1000000'], 'engine.batch=1000000 must lie in 1..65536'),
    'gamma of millions': ([TINY, '--config.engine.gamma=1000000'], 'engine.gamma=1000000 must lie in 0..65536'),
    'acceptance that is none': (
        [TINY + ':lookup', '--config.engine.adaptive.enabled', '--config.engine.adaptive.prior=2.0',
         '--config.engine.adaptive.verify_cost=(1.0, 1.1, 1.2, 1.3, 1.4)', '--config.engine.gamma=4'],
        'adaptive.prior must lie in [0, 1]'),
    'another drafter than the variant': (
        [TINY + ':lookup', '--config.drafter.name=self'], "drafter.name='self' needs drafter.num_layers"),
    'negative temperature': ([TINY, '--config.sampling.temperature=-1'], 'temperature'),
    'top_p 0': ([TINY, '--config.sampling.top_p=0'], 'top_p must lie in (0, 1], got 0.0'),
    'top_p 1.5': ([TINY, '--config.sampling.top_p=1.5'], 'top_p must lie in (0, 1], got 1.5'),
    'empty stop string': ([TINY, "--config.sampling.stop=('x', '')"], "sampling.stop holds ''"),
    'stop that is no string': ([TINY, '--config.sampling.stop=(1,)'], 'sampling.stop holds 1'),
    'capacity past the context': ([*WHOLE, '--config.engine.capacity=20000'], 'engine.capacity=20000 is past'),
    'draft of another vocabulary': ([TINY, '--config.drafter.source=FILES/whole'], 'another vocabulary: id 0'),
    'tokenizer wider than the target': ([SMOLLM2, '--config.target.source=FILES/narrow'],
                                        'the tokenizer has 480 tokens, the model 100'),
    'tokenizer wider than the draft': ([TINY, '--config.drafter.source=FILES/narrow'],
                                       'the tokenizer has 480 tokens, the model 100'),
    'missing checkpoint': ([SMOLLM2, '--config.target.source=FILES/nowhere'], 'nowhere does not exist'),
    'truncated safetensors': ([SMOLLM2, '--config.target.source=FILES/truncated'], 'is truncated'),
    'truncated GGUF': ([SMOLLM2, '--config.target.source=FILES/truncated.gguf'], 'is not a whole GGUF file'),
    'foreign file': ([SMOLLM2, '--config.target.source=FILES/foreign.gguf'], 'is not a GGUF file'),
    'foreign family': ([SMOLLM2, '--config.target.source=FILES/foreign'], "'model_type' is 'bert'"),
    'tensor missing': ([SMOLLM2, '--config.target.source=FILES/missing'], "'model.norm.weight' is missing"),
    'tensor of another shape': ([SMOLLM2, '--config.target.source=FILES/shape'],
                                "'model.norm.weight' has shape (3,), not (32,)"),
    'no tokenizer': ([SMOLLM2, '--config.target.source=FILES/mute'], 'neither tokenizer.json nor tokenizer.model'),
    'chat without a template': ([*WHOLE, '--prompt=a', '--noraw'], 'no chat template'),
    'missing prompts': ([TINY, '--prompts=FILES/none.txt'], 'none.txt cannot be read: No such file'),
    'directory of prompts': ([TINY, '--prompts=FILES/folder.txt'], 'folder.txt cannot be read: Is a directory'),
    'prompts that are not UTF-8': ([TINY, '--prompts=FILES/latin.txt'], 'latin.txt, line 2 is not UTF-8'),
    'broken JSON lines': ([TINY, '--prompts=FILES/broken.jsonl'], 'broken.jsonl, line 1 is not JSON'),
    'result that cannot be written': ([TINY, '--prompt=a', '--json_out=FILES/three.txt/x.json'], 'cannot write'),
    'result over a folder': ([TINY, '--prompt=a', '--json_out=FILES/folder.txt'], 'cannot write'),
}
# In the long run only: another one is refused by the same code, or tests/test_session.py has the field.
MORE = {
    'third of three prompts too long', 'missing config', 'unknown section', 'negative gamma', 'no query rows',
    'a batch of millions', 'gamma of millions', 'acceptance that is none', 'another drafter than the variant',
    'top_p 0', 'top_p 1.5', 'stop that is no string', 'capacity past the context', 'tokenizer wider than the draft',
    'truncated GGUF', 'foreign file', 'tensor of another shape', 'directory of prompts', 'broken JSON lines',
    'result over a folder'}


@pytest.fixture(scope='module')
def files(tmp_path_factory) -> pathlib.Path:
  """Everything that is wrong with a file, and one checkpoint that is whole."""
  folder = tmp_path_factory.mktemp('files')
  (folder / 'three.txt').write_text('one\ntwo\n' + '(' * 1100)
  (folder / 'latin.txt').write_bytes(b'fine\n\xff\n')
  (folder / 'broken.jsonl').write_text('{"prompt": \n')
  (folder / 'surrogate.jsonl').write_text('{"prompt": "ab\\ud800"}\n')
  (folder / 'folder.txt').mkdir()
  (folder / 'foreign.gguf').write_text('hello')
  (folder / 'truncated.gguf').write_bytes((TOKENIZERS / 'sentencepiece.gguf').read_bytes()[:1000])
  _checkpoints(folder)
  return folder


def _checkpoints(folder: pathlib.Path) -> None:
  config = DecoderConfig.tiny(vocab_size=480, max_positions=2048)
  export_hf(random_decoder(config), folder / 'whole')
  export_hf(random_decoder(dataclasses.replace(config, vocab_size=100)), folder / 'narrow')
  for name in ('whole', 'narrow'):
    shutil.copy(TOKENIZERS / 'tokenizer.model', folder / name)
  for name in ('truncated', 'foreign', 'missing', 'shape', 'mute'):
    shutil.copytree(folder / 'whole', folder / name)
  (folder / 'mute' / 'tokenizer.model').unlink()
  weights = (folder / 'whole' / 'model.safetensors').read_bytes()
  (folder / 'truncated' / 'model.safetensors').write_bytes(weights[:-100])
  fields = json.loads((folder / 'whole' / 'config.json').read_text())
  (folder / 'foreign' / 'config.json').write_text(json.dumps(fields | {'model_type': 'bert'}))
  tensors = safetensors.numpy.load(weights)
  norm = tensors.pop('model.norm.weight')
  safetensors.numpy.save_file(tensors, folder / 'missing' / 'model.safetensors')
  safetensors.numpy.save_file(tensors | {'model.norm.weight': norm[:3].copy()}, folder / 'shape' / 'model.safetensors')


@pytest.fixture(scope='module')
def ended(request, files, tmp_path_factory) -> dict[str, tuple[int, pathlib.Path]]:
  """Status and directory of each command that is asked for. What a command printed lies beside its directory."""
  names = [item.callspec.params['name'] for item in request.session.items
           if getattr(item, 'function', None) is test_generate]
  places = {name: tmp_path_factory.mktemp('case') for name in names}
  found = statuses([(str(place), str(place), 'launch.generate',
                     [JSON, *(flag.replace('FILES', str(files)) for flag in GENERATE[name][0])])
                    for name, place in places.items()])
  return dict(zip(places, zip(found, places.values(), strict=True), strict=True))


def assert_one_line(status: int, stdout: str, stderr: str, expected: str) -> None:
  assert stderr.startswith('error: ') and stderr.count('\n') == 1 and stderr.endswith('\n'), stderr
  assert expected in stderr
  assert (status, stdout) == (2, '')


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in GENERATE])
def test_generate(name, ended):
  status, place = ended[name]
  stdout, stderr = (place.with_name(f'{place.name}.{stream}').read_text() for stream in ('stdout', 'stderr'))
  assert_one_line(status, stdout, stderr, GENERATE[name][1])
  assert not list(place.iterdir())


@pytest.mark.parametrize('module, flags, expected', [
    ('launch.bench', [TINY, '--config.engine.gamma=-1'], 'engine.gamma=-1'),
    pytest.param('launch.bench', [TINY, '--config.engine.capacity=20000', JSON], 'engine.capacity=20000',
                 marks=pytest.mark.slow),
    ('launch.bench', [SWEEP], "sweep_gamma.py has no 'target', so it is no config of this command"),
    ('launch.generate', [f'--config={ROOT}/configs/peers.py'], "peers.py has no 'target'"),
    ('launch.plan', [SWEEP, '--topology=v4-32'], "sweep_gamma.py has no 'target'"),
    ('experiments.sweep', [f'--config={ROOT}/configs/sweep_plan.py'], "sweep_plan.py has no 'grid'"),
    ('experiments.plan_sweep', [SWEEP], "sweep_gamma.py has no 'topologies'"),
    ('experiments.peers.timing', [TINY], "tiny.py has no 'model'"),
    ('experiments.sweep', [SWEEP, '--out=-'], 'rows are appended to a file, not to -'),
    ('experiments.planted', ['--rows=-'], 'rows are appended to a file, not to -'),
    ('experiments.exactness', [TINY, '--rungs=nine'], '--rungs=nine is unknown'),
    pytest.param('experiments.sweep', [f'--config={ROOT}/configs/sweep_gamma.py:tiny', '--config.base=none.py'],
                 'none.py', marks=pytest.mark.slow),
])
def test_other_commands(module, flags, expected, tmp_path):
  done = subprocess.run([sys.executable, '-m', module, *flags], capture_output=True, text=True, cwd=tmp_path,
                        env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)})
  assert_one_line(done.returncode, done.stdout, done.stderr, expected)
  assert not list(tmp_path.iterdir())
