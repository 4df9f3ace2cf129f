"""`launch.train` on a tiny model: as a user runs it, ended by SIGTERM, with every field of its config."""

import importlib.machinery
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time
import types

import jax
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import pretrain, toy_pair
from launch import pretraining
from launch.errors import RunError
from launch.prompts import load_prompts
from launch.session import Session
from launch.train import check_same, train
from models.errors import InputError
from models.loading import load_decoder
from specdec.training.log import read_metrics

ROOT = Path(__file__).parents[1]
TIMES = {'tokens_per_second'}
MODEL = {'vocab_size': 300, 'width': 16, 'num_layers': 2, 'num_heads': 2, 'num_kv_heads': 1, 'head_dim': 8,
         'ff_width': 32}
TRAIN = {'row_tokens': 32, 'batch': 4, 'tokens': 2048, 'warmup_steps': 2, 'held_out_rows': 4, 'log_every': 2,
         'eval_every': 8, 'save_every': 4}
SENTENCES = [f'def f{i}(x):\n  return x + {i}\n\n' * (3 + i % 5) for i in range(40)]


@pytest.fixture(scope='module')
def data(tmp_path_factory) -> Path:
  """A directory of texts, with the vocabulary made of them."""
  path = tmp_path_factory.mktemp('data')
  for number, text in enumerate(SENTENCES):
    (path / f'{number:02d}.py').write_text(text)
  (path / 'texts.jsonl').write_text(''.join(json.dumps({'text': text, 'other': text[::-1]}) + '\n'
                                            for text in SENTENCES))
  pretraining.tokenizer_of(tiny(path, path))
  return path


def tiny(data: Path, directory: Path) -> ConfigDict:
  config = pretrain.get_config('draft').unlock()
  config.model.update(MODEL)
  config.train.update(TRAIN | {'directory': str(directory / 'run')})
  config.tokenizer.source = str(data / 'tokenizer')
  config.data.update(kind='text', path=str(data / '*.py'), held_out=0.3)
  return config


def flags(config: ConfigDict) -> list[str]:
  base = pretrain.get_config('draft')
  changed = [(section, name, value) for section in ('model', 'tokenizer', 'data', 'train')
             for name, value in config[section].items() if base[section][name] != value]
  return [f'--config={ROOT}/configs/pretrain.py:draft', *(
      f'--config.{section}.{name}={value}' for section, name, value in changed)]


def start(config: ConfigDict) -> subprocess.Popen:
  return subprocess.Popen([sys.executable, '-m', 'launch.train', *flags(config)], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {'PYTHONPATH': str(ROOT)})


def curve(directory: Path) -> list[dict]:
  return [{name: value for name, value in row.items() if name not in TIMES} for row in read_metrics(directory / 'run')]


@pytest.mark.slow
def test_sigterm_saves_and_a_new_start_goes_on(data, tmp_path):
  """As bit for bit as an uninterrupted run: every line of the log, and every parameter."""
  alone, ended = (tiny(data, tmp_path / name) for name in ('alone', 'ended'))
  for config in (alone, ended):
    config.train.tokens = 2048 * 4  # 64 steps
  process = start(ended)
  while len(curve(tmp_path / 'ended')) < 3:
    assert process.poll() is None, process.stderr.read()
    time.sleep(0.005)
  process.send_signal(signal.SIGTERM)
  _, errors = process.communicate(timeout=60)
  assert process.returncode == 42 and errors.splitlines()[-1].startswith('ended by SIGTERM: start the same command')
  assert not (tmp_path / 'ended' / 'run' / 'model').exists() and curve(tmp_path / 'ended')[-1]['step'] < 64
  for config in (ended, alone):
    process = start(config)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f'{config.train.directory}/model: 64 steps, loss ' in said
  assert curve(tmp_path / 'ended') == curve(tmp_path / 'alone')
  models = [load_decoder(tmp_path / name / 'run' / 'model')[0] for name in ('ended', 'alone')]
  for ours, theirs in zip(*map(jax.tree.leaves, models), strict=True):
    np.testing.assert_array_equal(ours, theirs)


@pytest.fixture(scope='module')
def trained(data, tmp_path_factory) -> tuple[Path, dict]:
  directory = tmp_path_factory.mktemp('trained')
  return directory, train(tiny(data, directory))


def test_what_a_run_leaves(data, trained):
  directory, facts = trained
  rows = curve(directory)
  losses = [row['loss'] for row in rows if 'loss' in row]
  assert facts['step'] == 16 and losses[-1] < losses[0] - 0.3
  assert [row['step'] for row in rows if 'held_out_loss' in row] == [8, 16]
  assert facts['held_out_loss'] == rows[-1]['held_out_loss']
  kept = {path.name for path in (directory / 'run').iterdir()}
  assert kept == {'run.json', 'metrics.jsonl', 'tensorboard', 'model', 'step_00000012', 'step_00000016'}
  assert any((directory / 'run' / 'tensorboard').iterdir())


def test_a_finished_run_is_left_alone(data, trained):
  directory, facts = trained
  before = (directory / 'run' / 'metrics.jsonl').read_bytes()
  assert train(tiny(data, directory)) == facts
  assert (directory / 'run' / 'metrics.jsonl').read_bytes() == before


def test_a_directory_of_another_config(data, trained):
  """Refused by the first field that differs, finished or not; how often something is written may change."""
  directory, facts = trained
  config = tiny(data, directory)
  config.train.update(log_every=1, save_every=0, eval_every=0, keep=1)
  assert train(config) == facts
  config.train.learning_rate = 0.5
  with pytest.raises(InputError, match=r'run of another config \(train\.learning_rate is 0\.01 there and 0\.5 here\)'):
    train(config)


def test_a_run_that_left_nothing_may_change(data, tmp_path):
  config = tiny(data, tmp_path)
  config.train.batch, config.train.warmup_steps = 1000, 0
  with pytest.raises(InputError, match='do not fill a batch'):
    train(config)
  check_same(tiny(data, tmp_path), tmp_path / 'run', begun=False)
  with pytest.raises(InputError, match=r'train\.batch is 4 there and 1000 here'):
    check_same(config, tmp_path / 'run', begun=True)


def test_other_commands_load_it(data, trained, tmp_path):
  """As target and as draft; a model that drafts for itself is always right."""
  config = toy_pair.get_config().unlock()
  config.target.source = config.drafter.source = str(trained[0] / 'run' / 'model')
  config.engine.capacity, config.sampling.max_new_tokens = 32, 8
  (tmp_path / 'prompts.jsonl').write_text(json.dumps({'prompt': 'def f7('}) + '\n')
  config.data.path = str(tmp_path / 'prompts.jsonl')
  session = Session.from_config(config)
  (completion,) = session.generate(load_prompts(config.data))
  assert len(completion.token_ids) == 8 and completion.metrics.accepted == completion.metrics.tested > 0
  assert session.tokenizer.eos_id is not None


def test_a_loss_that_is_no_number(data, tmp_path):
  config = tiny(data, tmp_path)
  config.train.learning_rate, config.train.clip_norm = 1e30, 0.0
  with pytest.raises(RunError, match=r'no finite number at step \d+ .the state after step \d+ is kept.: lower'):
    train(config)
  assert not (tmp_path / 'run' / 'model').exists()


OTHER_VALUES = {
    'model.vocab_size': 320, 'model.mlp': 'gelu', 'model.positions': 'relative', 'model.tied_embedding': False,
    'model.width': 32, 'model.num_layers': 1, 'model.num_heads': 4, 'model.num_kv_heads': 2, 'model.head_dim': 16,
    'model.ff_width': 40,
    'data.kind': 'jsonl', 'data.field': 'other', 'data.limit': 30, 'data.held_out': 0.5, 'data.name': 'more',
    'data.split': 'test',
    'train.row_tokens': 16, 'train.batch': 2, 'train.accumulate': 2, 'train.learning_rate': 0.5,
    'train.warmup_steps': 1, 'train.dtype': 'bfloat16', 'train.remat': True, 'train.log_every': 3,
    'train.eval_every': 3, 'train.save_every': 3, 'train.tokens_per_parameter': 1.0, 'train.tokens': 4096,
    'train.final_share': 0.5, 'train.beta2': 0.5, 'train.weight_decay': 0.5, 'train.clip_norm': 0.5, 'train.seed': 5,
    'train.held_out_rows': 8, 'train.keep': 1}
ELSEWHERE = {'train.objective', 'train.directory'}  # read by `launch.train` itself: the tests above and below


@pytest.fixture
def hub(monkeypatch):
  """A package `datasets` whose texts tell what was asked for."""
  package = types.ModuleType('datasets')
  package.__spec__ = importlib.machinery.ModuleSpec('datasets', None)
  package.load_dataset = lambda name, part, split, streaming: (
      {'text': f'{name} {part} {split} ' + text, 'other': text} for text in SENTENCES)
  monkeypatch.setitem(sys.modules, 'datasets', package)


def observe(config: ConfigDict) -> str:
  """All that a run depends on, as text."""
  recipe = pretraining.recipe(config)
  weights = [(leaf.shape, float(leaf.ravel()[0])) for leaf in jax.tree.leaves(recipe.trainable)]
  rows = [len(recipe.rows), recipe.rows[0]['tokens'].tolist(), len(recipe.evaluate._rows)]
  return repr((recipe.objective, recipe.config, recipe.trainable.config, weights, rows, recipe.save))


def prepared(data: Path, directory: Path, field: str) -> ConfigDict:
  """A config in which the field can matter."""
  config = tiny(data, directory)
  config.train.batch = 4
  if field in ('data.kind', 'data.field', 'data.path'):
    config.data.kind, config.data.path = 'jsonl', str(data / 'texts.jsonl')
  if field == 'data.kind':
    config.data.kind, config.data.name = 'datasets', 'some'
  if field in ('data.name', 'data.split'):
    config.data.kind, config.data.name, config.data.path = 'datasets', 'some', ''
  if field == 'train.tokens_per_parameter':
    config.train.tokens = 0
  return config


FIELDS = [f'{section}.{name}' for section in ('model', 'tokenizer', 'data', 'train')
          for name in pretrain.get_config()[section] if f'{section}.{name}' not in ELSEWHERE]


@pytest.mark.parametrize('field', FIELDS)
def test_each_field_is_read(field, data, tmp_path, hub, monkeypatch):
  """Fault 66."""
  before, changed = observe(prepared(data, tmp_path, field)), prepared(data, tmp_path, field)
  (tmp_path / 'other.jsonl').write_text(''.join(json.dumps({'text': text * 2}) + '\n' for text in SENTENCES))
  paths = {'data.path': str(tmp_path / 'other.jsonl'), 'tokenizer.source': str(tmp_path / 'tokenizer')}
  changed.update_from_flattened_dict({field: (OTHER_VALUES | paths)[field]})
  if field == 'model.vocab_size':
    changed.tokenizer.source = str(tmp_path / 'tokenizer')
  assert observe(changed) != before


def test_a_section_that_is_missing(data, tmp_path):
  config = tiny(data, tmp_path)
  del config.tokenizer
  with pytest.raises(InputError, match="no section 'tokenizer': pretraining reads model, tokenizer, data, train"):
    train(config)


@pytest.mark.parametrize('field, value, said', [
    ('model.vocab_size', 260, 'model.vocab_size=260 is smaller than the vocabulary'),
    ('model.head_dim', 7, 'head_dim=7 must be even'), ('model.mlp', 'relu', "mlp='relu' is not supported"),
    ('train.objective', 'both', "train.objective='both' is unknown: use one of next_token"),
    ('train.row_tokens', 0, 'train.row_tokens=0 must be 1 or more'), ('train.accumulate', 3, 'train.batch=4 must be a'),
    ('train.tokens_per_parameter', -1.0, 'must be positive'), ('data.held_out', 0.0, 'gives no held-out text'),
    ('train.held_out_rows', 1, '1 held-out rows do not fill a batch of 4'),
    ('train.held_out_rows', -1, 'train.held_out_rows=-1 must'), ('train.tokens', -5, 'train.tokens=-5 must'),
    ('train.batch', 0, 'train.batch=0 must be 1 or more'), ('train.dtype', 'int8', 'float32 or')])
def test_wrong_input(field, value, said, data, tmp_path):
  config = tiny(data, tmp_path)
  config.train.tokens = 0 if field == 'train.tokens_per_parameter' else config.train.tokens
  config.update_from_flattened_dict({field: value})
  with pytest.raises(InputError) as caught:
    train(config)
  assert said in str(caught.value) and '\n' not in str(caught.value)
