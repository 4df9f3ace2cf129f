"""Span corruption: what rows hold, that a model learns from them, and the toy pair's configs."""

import json
import os
from pathlib import Path
import subprocess
import sys
import types

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from configs import span_corruption, toy_t5
from experiments import t5_pair
from launch import results, span_training
from launch.errors import RunError
from launch.prompts import load_prompts
from launch.roofline import num_parameters
from launch.span_training import gap_names, model_config, rows_of, spans_of, tokenizer_of
from launch.train import train
from models.config import EncDecConfig
from models.errors import InputError
from models.loading import load_decoder
from models.random_weights import random_decoder
from specdec.training.config import TrainConfig
from specdec.training.optimizer import adamw
from specdec.training.span_corruption import CorruptedRows, SpanCorruption, Spans, random_parts
from specdec.training.trainer import StoppedError, Trainer

ROOT = Path(__file__).parents[1]
SPANS = Spans(24, 0.35, 3.0)
GAPS = tuple(range(60, 60 + SPANS.count))


@given(st.integers(4, 200), st.floats(0.05, 0.9), st.floats(1, 12), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_rows_put_together_again_are_the_piece(piece, density, mean_span, seed):
  """Whatever is taken out stands behind its gap in the target; both are as long as announced."""
  try:
    spans = Spans(piece, density, mean_span)
  except InputError:
    return
  ids, gaps = list(range(1000, 1000 + piece)), list(range(spans.count))
  source, target = spans.cut(ids, gaps, np.random.default_rng(seed))
  assert len(source) + 1 == spans.source_tokens and len(target) + 1 == spans.target_tokens
  said = {gap: target[target.index(gap) + 1:target.index(gap + 1) if gap + 1 in target else None] for gap in gaps}
  assert all(said.values())
  whole = [token for part in source for token in (said[part] if part < spans.count else [part])]
  assert whole == ids


def test_parts_are_all_equally_likely():
  rng = np.random.default_rng(0)
  drawn = [tuple(random_parts(5, 3, rng)) for _ in range(3000)]
  assert {sum(parts) for parts in drawn} == {5} and len(set(drawn)) == 6
  assert all(abs(drawn.count(parts) - 500) < 100 for parts in set(drawn))


def rows() -> CorruptedRows:
  """Counting in a circle: what is missing follows from what is there."""
  pieces = (np.arange(64)[:, None] * 7 + np.arange(SPANS.piece)) % 40 + 1
  return CorruptedRows(pieces, SPANS, GAPS, end=0, seed=3)


def test_rows_are_the_same_each_time():
  one, again = rows()[5], rows()[5]
  assert one['source'].shape == (SPANS.source_tokens,) and one['tokens'].shape == (SPANS.target_tokens + 1,)
  assert one['tokens'][0] == one['tokens'][-1] == one['source'][0] == 0
  np.testing.assert_array_equal(one['tokens'], again['tokens'])
  assert not np.array_equal(rows()[6]['source'] > 59, one['source'] > 59), 'gaps lie elsewhere in another row'


@pytest.mark.slow
def test_a_model_learns_it():
  """Loss falls far below that of a guess by frequency, and a run that goes on ends like one that was not stopped."""
  model = EncDecConfig.tiny(vocab_size=64, width=32, num_encoder_layers=1, num_layers=1)
  config = TrainConfig(steps=150, batch=16, learning_rate=1e-2, warmup_steps=10, log_every=50)
  before = random_decoder(model, 0)
  batch = {name: np.stack([rows()[i][name] for i in range(16)]) for name in ('source', 'tokens')}
  loss = lambda trained: (lambda pair: float(pair[0] / pair[1]['count']))(
      jax.jit(SpanCorruption().loss)(trained, None, batch, jax.random.key(0)))
  first = loss(before)
  trained = Trainer(SpanCorruption(), adamw(config), before, None, rows(), config, None).run()
  assert first > 3.5 and loss(trained) < 1.2


def toy_config(tmp_path: Path, variant: str = 'target', **train_fields):
  (tmp_path / 'texts').mkdir(exist_ok=True)
  for number in range(30):
    (tmp_path / 'texts' / f'{number}.txt').write_text(f'value_{number} = alpha(beta, {number})\n' * 20)
  config = t5_pair.training_config(variant, tmp_path, 3000)
  with config.unlocked():
    config.data.update({'kind': 'text', 'path': str(tmp_path / 'texts' / '*.txt'), 'held_out': 0.3})
    config.spans.update({'piece': 40, 'mean_span': 4.0})
    config.train.update({'batch': 8, 'warmup_steps': 1, 'held_out_rows': 8} | train_fields)
    config.model.update({'width': 16, 'num_layers': 1, 'num_encoder_layers': 1, 'num_heads': 1, 'head_dim': 8,
                         'ff_width': 16})
  return config


def test_training_from_a_config(tmp_path):
  """Vocabulary, rows, model: all by one command; the checkpoint loads, and prompts are held-out sources."""
  config = toy_config(tmp_path)
  facts = train(config)
  model, saved = load_decoder(facts['model'])
  assert saved == model_config(config, 0)
  assert facts['held_out_loss'] > 0 and facts['step'] > 1
  assert facts == train(config), 'what is finished is not done again'
  tokenizer = tokenizer_of(config)
  assert tokenizer.num_tokens <= model.vocab_size
  assert tokenizer.encode('a <extra_id_1> b') != tokenizer.encode('a extra_id_1 b')
  assert len(tokenizer.encode('<extra_id_0>')) == 1
  t5_pair.write_prompts(config, tokenizer, tmp_path / 'prompts.jsonl', 4)
  prompts = load_prompts(t5_pair.decoding_config('model', 'greedy', 4, tmp_path, 4).data)
  sources = [row['source'].tolist() for row in rows_of(config, tokenizer, held_out=True)]
  assert 0 < len(prompts) <= 4
  assert all(tokenizer.encode(prompt.text, add_special=True) in sources for prompt in prompts)


@pytest.mark.slow
def test_an_interrupted_run_goes_on(tmp_path):
  """To the same parameters, bit for bit."""
  alone = train(toy_config(tmp_path))
  (tmp_path / 'target').rename(tmp_path / 'alone')
  config = toy_config(tmp_path, save_every=5)
  recipe = span_training.recipe(config)
  steps = iter(range(1, 1000))
  with pytest.raises(StoppedError):
    Trainer(recipe.objective, recipe.optimizer, recipe.trainable, None, recipe.rows, recipe.config,
            str(tmp_path / 'target'), recipe.evaluate, should_stop=lambda: next(steps) == 7).run()
  ended = train(config)
  assert ended['step'] == alone['step']
  one, other = (load_decoder(tmp_path / name / 'model')[0] for name in ('alone', 'target'))
  for mine, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(('section', 'fields', 'message'), [
    ('spans', {'density': 1.5}, 'spans'), ('spans', {'mean_span': 0.5}, 'spans'),
    ('spans', {'piece': 1000, 'mean_span': 90.0}, r'spans\.piece=1000 is longer than every text'),
    ('model', {'mlp': 'swiglu'}, 'model: mlp'), ('model', {'vocab_size': 200}, 'with 4 markers 261')])
def test_configs_that_are_refused(tmp_path, section, fields, message):
  config = toy_config(tmp_path)
  with config.unlocked():
    config[section].update(fields)
  with pytest.raises(InputError, match=message) as caught:
    train(config)
  assert '\n' not in str(caught.value)


def test_the_pair():
  """A draft of a tenth; what was trained on is what is decoded."""
  configs = {name: span_corruption.get_config(name) for name in ('target', 'draft')}
  sizes = {name: num_parameters(model_config(config, 0)) for name, config in configs.items()}
  assert 8 < sizes['target'] / sizes['draft'] < 16
  spans, engine = spans_of(configs['target']), toy_t5.get_config().engine
  assert spans == spans_of(configs['draft'])
  assert spans.source_tokens <= engine.source_capacity and spans.target_tokens < engine.capacity
  assert gap_names(2) == ['<extra_id_0>', '<extra_id_1>']
  for module in (span_corruption, toy_t5):
    with pytest.raises(ValueError, match='does not exist: use one of'):
      module.get_config('both')


def test_rows_of_a_task_are_written_before_the_next(tmp_path, monkeypatch):
  def compare(sessions, prompts, repeats):
    if next(iter(sessions.values())).config.sampling.temperature:
      raise RunError('not finite')
    return [{'drafter': name} for name in sessions]

  made = lambda config, _: types.SimpleNamespace(
      config=config, params=types.SimpleNamespace(target=None), tokenizer=None)
  monkeypatch.setattr(t5_pair.Session, 'from_config', made)
  monkeypatch.setattr(t5_pair, 'load_prompts', lambda data: [])
  monkeypatch.setattr(t5_pair.bench, 'compare', compare)
  file = str(tmp_path / 'rows.jsonl')
  with pytest.raises(RunError):
    t5_pair.measure(tmp_path, {'target_loss': 1.0}, 2, 1, file)
  rows = results.read_rows(file)
  assert {row['task'] for row in rows} == {'greedy'} and len(rows) == 10 and rows[0]['target_loss'] == 1


@pytest.mark.slow
def test_t5_pair(tmp_path):
  """The whole road, on few tokens."""
  done = subprocess.run(
      [sys.executable, '-m', 'experiments.t5_pair', f'--directory={tmp_path}', '--tokens=40000', '--prompts=2',
       '--repeats=1', '--json_out=-'], cwd=ROOT, capture_output=True, text=True, env=os.environ | {
           'PYTHONPATH': str(ROOT)})
  assert done.returncode == 0, done.stderr
  rows = json.loads(done.stdout)
  assert [(row['task'], row['drafter'], row['gamma']) for row in rows] == [
      (task, *case) for task in ('greedy', 'sampled') for case in (
          ('none', 0), *(('model', gamma) for gamma in range(1, 8)), ('lookup', 3), ('unigram', 3), ('bigram', 3))]
  assert all(row['target_loss'] > 0 and row['draft_parameters'] > 0 for row in rows)
  assert {path.name for path in tmp_path.iterdir()} == {
      'target', 'draft', 'tokenizer', 'prompts.jsonl', 'counts.npy', 'rows.jsonl', 'loss.png', 'gamma.png'}
