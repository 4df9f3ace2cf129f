"""The setup of Leviathan et al. (2023) at toy scale: a T5 target and a draft from scratch, then speculative decoding.

    python -m experiments.t5_pair
    python -m experiments.t5_pair --directory=results/t5_pair --tokens=200000

Trains both variants of configs/span_corruption.py on the standard library's sources and measures, on pieces of files
that neither has seen, what the draft is worth to the target, greedy and sampled, for gamma = 1..7; and beside it, at
one gamma, what needs no model: lookup in source and text, unigrams and bigrams. Interrupted and started again it goes
on from the last checkpoint. In the directory:

    target/, draft/     of `launch.train`; model/ in each is what configs/toy_t5.py loads
    tokenizer/, prompts.jsonl, counts.npy
    rows.jsonl          rows of `launch.bench` with the task, losses and sizes of both models
    loss.png            loss over tokens
    gamma.png           time, acceptance and step time over gamma

`python -m experiments.leviathan --rows=DIRECTORY/rows.jsonl` sets the measured rows beside the paper's.
"""

from collections.abc import Mapping
import json
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict
import numpy as np

from configs import span_corruption, toy_t5
from experiments import loss_curves, plot
from experiments.short_training import placed
from launch import bench, cli, results
from launch.prompts import load_prompts
from launch.roofline import num_parameters
from launch.session import Session
from launch.span_training import model_config, rows_of, spans_of, tokenizer_of
from launch.train import train
from models.tokenizer import Tokenizer

VARIANTS = ('target', 'draft')
TASKS = {'greedy': {'temperature': 0.0}, 'sampled': {'temperature': 1.0}}
GAMMAS = range(1, 8)
FREE, FREE_GAMMA = ('lookup', 'unigram', 'bigram'), 3  # drafts that cost no pass
COUNTED_TEXTS = 150  # for the tables, of those that are trained on: splitting all of them takes a quarter minute


def training_config(variant: str, directory: Path, tokens: int | None) -> ConfigDict:
  return placed(span_corruption.get_config(variant), directory, variant, tokens, tokens_per_step)


def tokens_per_step(config: ConfigDict) -> int:
  return config.train.batch * spans_of(config).target_tokens


def decoding_config(variant: str, task: str, gamma: int, directory: Path, prompts: int) -> ConfigDict:
  config = toy_t5.get_config(variant)
  config.target.source = str(directory / 'target' / 'model')
  if 'source' in config.drafter:
    config.drafter.source = str(directory / 'draft' / 'model')
  if 'counts' in config.drafter:
    config.drafter.counts = str(directory / 'counts.npy')
  config.data.path, config.data.limit = str(directory / 'prompts.jsonl'), prompts
  config.sampling.update(TASKS[task])
  config.engine.gamma = gamma
  return config


def write_prompts(config: ConfigDict, tokenizer: Tokenizer, path: Path, count: int) -> None:
  """Held-out sources as texts: those that are read back as the very same tokens."""
  lines = []
  for row in rows_of(config, tokenizer, held_out=True).spread(4 * count):
    ids = row['source'][1:].tolist()
    text = tokenizer.decode(ids)
    if tokenizer.encode(text) == ids:
      lines.append(json.dumps({'prompt': text}))
  results.write_text(str(path), '\n'.join(lines[::max(1, len(lines) // count)][:count]) + '\n')


def write_counts(config: ConfigDict, tokenizer: Tokenizer, path: Path) -> None:
  """What the target was trained to say, one row after the other."""
  few = config.copy_and_resolve_references()
  few.data.limit = COUNTED_TEXTS
  np.save(path, np.concatenate([row['tokens'] for row in rows_of(few, tokenizer, held_out=False)]).astype(np.int32))


def measure(directory: Path, facts: Mapping[str, Any], prompts: int, repeats: int, out: str) -> list[dict[str, Any]]:
  """For each task a plain row, one for each γ of the draft, and one for each draft without a model.

  A task's rows are appended to `out` as soon as they are there.
  """
  rows, model = [], None
  cases = {f'gamma {gamma}': ('model', gamma) for gamma in GAMMAS} | {name: (name, FREE_GAMMA) for name in FREE}
  for task in TASKS:
    sessions = {}
    for name, (variant, gamma) in cases.items():
      sessions[name] = session = Session.from_config(decoding_config(variant, task, gamma, directory, prompts), model)
      model = session.params.target, session.tokenizer
    texts = load_prompts(next(iter(sessions.values())).config.data)
    for row in bench.compare(sessions, texts, repeats):
      rows.append({'task': task} | row | facts)
      results.append_row(out, rows[-1])
  return rows


def main() -> None:
  cli.refuse_job()
  directory = Path(DIRECTORY.value)
  paths = {name: str(directory / name) for name in ('rows.jsonl', 'loss.png', 'gamma.png')}
  results.check_rows(paths['rows.jsonl'])
  plot.check(paths['loss.png'])
  configs = {variant: training_config(variant, directory, TOKENS.value) for variant in VARIANTS}
  facts = {}
  for variant, config in configs.items():
    values = train(config)
    size = num_parameters(model_config(config, None))
    facts |= {f'{variant}_parameters': size, f'{variant}_loss': values['loss'],
              f'{variant}_held_out_loss': values['held_out_loss']}
    cli.say(f'{variant}: {size:,} parameters, held-out loss {values["held_out_loss"]:.3f}')
  loss_curves.draw({variant: loss_curves.Curve.read(directory / variant, tokens_per_step(config))
                    for variant, config in configs.items()}, paths['loss.png'])
  tokenizer = tokenizer_of(configs['target'])
  write_prompts(configs['target'], tokenizer, directory / 'prompts.jsonl', PROMPTS.value)
  write_counts(configs['target'], tokenizer, directory / 'counts.npy')
  rows = measure(directory, facts, PROMPTS.value, REPEATS.value, paths['rows.jsonl'])
  plot.draw([row for row in rows if row['drafter'] in ('none', 'model')], paths['gamma.png'], kind='gamma')
  bench.show(rows, cli.output())
  cli.say(f'rows: {paths["rows.jsonl"]}   loss: {paths["loss.png"]}   over gamma: {paths["gamma.png"]}')
  cli.write_json(rows)


if __name__ == '__main__':
  DIRECTORY = flags.DEFINE_string('directory', 'results/t5_pair', 'Everything is written here.')
  TOKENS = flags.DEFINE_integer('tokens', None, 'Train each model on so many, instead of what the config says.',
                                lower_bound=1)
  PROMPTS = flags.DEFINE_integer('prompts', 24, 'Held-out pieces to fill in, per task.', lower_bound=1)
  REPEATS = flags.DEFINE_integer('repeats', 3, 'Timed runs of each prompt.', lower_bound=1)
  cli.run(main)
