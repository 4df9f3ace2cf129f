"""The road of Chen et al. (2023) at toy scale: a target and a small draft from scratch, then speculative decoding.

    make pretrain
    python -m experiments.pretrain --directory=results/pretrain

Trains both variants of configs/pretrain.py on the standard library's sources and measures what the draft is worth to
the target, greedy and sampled, on files that neither has seen.
Interrupted and started again it goes on from the last checkpoint. A pass of models so small is all overhead, so the
draft costs a third of the target's pass rather than a twentieth: what the toy shows is acceptance, and no time is won.
In the directory:

    target/, draft/     of `launch.train`; model/ in each is what configs/toy_pair.py loads
    rows.jsonl          rows of `launch.bench` with the task, losses and sizes of both models
    loss.png            loss over tokens
"""

from collections.abc import Mapping
import json
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from configs import pretrain, toy_pair
from experiments import loss_curves, plot
from experiments.short_training import placed
from launch import bench, cli, results
from launch.pretraining import model_config
from launch.prompts import load_prompts
from launch.roofline import num_parameters
from launch.session import Session
from launch.texts import texts
from launch.train import train

VARIANTS = ('target', 'draft')
TASKS = {'greedy': {'temperature': 0.0}, 'sampled': {'temperature': 1.0}}
GAMMAS = (2, 4)
PROMPT_CHARACTERS = 90  # some 45 tokens of the toy vocabulary


def training_config(variant: str, directory: Path, tokens: int | None) -> ConfigDict:
  return placed(pretrain.get_config(variant), directory, variant, tokens, tokens_per_step)


def tokens_per_step(config: ConfigDict) -> int:
  return config.train.batch * config.train.row_tokens


def decoding_config(task: str, gamma: int, directory: Path, prompts: int) -> ConfigDict:
  config = toy_pair.get_config()
  config.target.source, config.drafter.source = (str(directory / variant / 'model') for variant in VARIANTS)
  config.data.path, config.data.limit = str(directory / 'prompts.jsonl'), prompts
  config.sampling.update(TASKS[task])
  config.engine.gamma = gamma
  return config


def write_prompts(config: ConfigDict, path: Path) -> None:
  """How the held-out files begin, to the end of a line where there is one."""
  lines = []
  for text in texts(config.data, held_out=True):
    prompt = text[:PROMPT_CHARACTERS]
    lines.append(json.dumps({'prompt': prompt[:prompt.rfind('\n') + 1] or prompt}))
  results.write_text(str(path), '\n'.join(lines) + '\n')


def measure(directory: Path, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
  """For each task a plain row, and one for each γ."""
  rows, model = [], None
  for task in TASKS:
    sessions = {}
    for gamma in GAMMAS:
      config = decoding_config(task, gamma, directory, PROMPTS.value)
      sessions[f'gamma {gamma}'] = session = Session.from_config(config, model)
      model = session.params.target, session.tokenizer
    rows += [{'task': task} | row | facts
             for row in bench.compare(sessions, load_prompts(config.data), REPEATS.value)]
  return rows


def main() -> None:
  cli.refuse_job()
  directory = Path(DIRECTORY.value)
  rows_path, plot_path = str(directory / 'rows.jsonl'), str(directory / 'loss.png')
  results.check_rows(rows_path)
  plot.check(plot_path)
  configs = {variant: training_config(variant, directory, TOKENS.value) for variant in VARIANTS}
  facts = {}
  for variant, config in configs.items():
    values = train(config)
    facts |= {f'{variant}_parameters': num_parameters(model_config(config)), f'{variant}_loss': values['loss'],
              f'{variant}_held_out_loss': values['held_out_loss']}
    cli.say(f'{variant}: {facts[f"{variant}_parameters"]:,} parameters, held-out loss {values["held_out_loss"]:.3f}')
  loss_curves.draw({variant: loss_curves.Curve.read(directory / variant, tokens_per_step(config))
                    for variant, config in configs.items()}, plot_path)
  write_prompts(configs['target'], directory / 'prompts.jsonl')
  rows = measure(directory, facts)
  for row in rows:
    results.append_row(rows_path, row)
  bench.show(rows, cli.output())
  cli.say(f'rows: {rows_path}   loss: {plot_path}')
  cli.write_json(rows)


if __name__ == '__main__':
  DIRECTORY = flags.DEFINE_string('directory', 'results/pretrain', 'Everything is written here.')
  TOKENS = flags.DEFINE_integer('tokens', None, 'Train on so many, instead of what the config says.', lower_bound=1)
  PROMPTS = flags.DEFINE_integer('prompts', 24, 'Held-out files to go on with, per task.', lower_bound=1)
  REPEATS = flags.DEFINE_integer('repeats', 3, 'Timed runs of each prompt.', lower_bound=1)
  cli.run(main)
