"""`make pretrain`: the pair's sizes, prompts that neither model saw, curves, and what is shown on the way."""

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from configs import pretrain, toy_pair
from experiments import loss_curves
from experiments.pretrain import PROMPT_CHARACTERS, decoding_config, tokens_per_step, training_config, write_prompts
from launch.pretraining import model_config, schedule_of
from launch.prompts import load_prompts
from launch.roofline import num_parameters
from launch.texts import texts
from launch.training_bar import TrainingBar
from models.errors import InputError

ROOT = Path(__file__).parents[1]


def test_the_pair():
  """A draft of a twentieth, on its share of tokens per parameter; prompt and answer fit into the rows."""
  configs = {name: pretrain.get_config(name) for name in ('target', 'draft')}
  sizes = {name: num_parameters(model_config(config)) for name, config in configs.items()}
  assert sizes['target'] / sizes['draft'] == pytest.approx(20, rel=0.03)
  for name, config in configs.items():
    tokens = schedule_of(config).steps * tokens_per_step(config)
    planned = config.train.tokens_per_parameter * sizes[name]
    assert planned <= tokens < planned + tokens_per_step(config)
    assert toy_pair.get_config().engine.capacity == config.train.row_tokens
  with pytest.raises(ValueError, match='does not exist: use one of target, draft, 1b'):
    pretrain.get_config('both')


def test_short_runs(tmp_path):
  config = training_config('target', tmp_path, 10 * 4096)
  schedule = schedule_of(config)
  assert schedule.steps == 10 and schedule.warmup_steps == 2
  assert training_config('target', tmp_path, None).train.warmup_steps == 50


def test_prompts_are_held_out(tmp_path):
  config = training_config('target', tmp_path, None)
  write_prompts(config, tmp_path / 'prompts.jsonl')
  prompts = load_prompts(decoding_config('greedy', 4, tmp_path, 24).data)
  trained = [*texts(config.data, held_out=False)]
  assert len(prompts) >= 20 and all(0 < len(prompt.text) <= PROMPT_CHARACTERS for prompt in prompts)
  held_out = [*texts(config.data, held_out=True)]
  assert not set(held_out) & set(trained)
  for prompt in prompts:
    assert any(text.startswith(prompt.text) for text in held_out) and not prompt.chat


def test_curves(tmp_path):
  rows = [{'step': 5, 'loss': 3.0}, {'step': 10, 'loss': None}, {'step': 10, 'held_out_loss': 2.5}]
  (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows) + '{"step": 15, "lo')
  curve = loss_curves.Curve.read(tmp_path, 100)
  assert curve.trained == [(500, 3.0)] and curve.held_out == [(1000, 2.5)]
  pytest.importorskip('matplotlib')
  loss_curves.draw({'target': curve, 'draft': curve}, str(tmp_path / 'loss.png'))
  assert (tmp_path / 'loss.png').read_bytes().startswith(b'\x89PNG')
  with pytest.raises(InputError, match='no losses to draw'):
    loss_curves.draw({'target': loss_curves.Curve([], [])}, str(tmp_path / 'loss.png'))


def test_lines_where_there_is_no_terminal(capsys, monkeypatch):
  """One every few seconds: step, loss, tokens/s and what is left."""
  clock = iter(range(0, 1000, 10))
  monkeypatch.setattr('time.monotonic', lambda: float(next(clock)))
  bar = TrainingBar(steps=4, tokens_per_step=500)
  for step, loss in ((1, None), (2, 3.25), (3, None), (4, 3.0)):
    bar(step, loss)
  bar.close()
  assert capsys.readouterr().err.splitlines() == [
      'training: 3/4, loss 3.250, 50 tokens/s, 10 s left', 'training: 4/4, loss 3.000, 50 tokens/s']


@pytest.mark.slow
def test_pretrain(tmp_path):
  """The whole road, on few tokens."""
  done = subprocess.run(
      [sys.executable, '-m', 'experiments.pretrain', f'--directory={tmp_path}', '--tokens=40000', '--prompts=2',
       '--repeats=1', '--json_out=-'], cwd=ROOT, capture_output=True, text=True, env=os.environ | {
           'PYTHONPATH': str(ROOT)})
  assert done.returncode == 0, done.stderr
  rows = json.loads(done.stdout)
  assert [(row['task'], row['gamma']) for row in rows] == [
      (task, gamma) for task in ('greedy', 'sampled') for gamma in (0, 2, 4)]
  assert all(row['target_loss'] > 0 and row['draft_parameters'] > 0 for row in rows)
  assert {path.name for path in tmp_path.iterdir()} == {
      'target', 'draft', 'tokenizer', 'prompts.jsonl', 'rows.jsonl', 'loss.png'}
