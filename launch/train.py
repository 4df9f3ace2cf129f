"""Trains what a config says, and goes on where an earlier start of the same command ended.

    python -m launch.train --config=configs/pretrain.py:target

In `train.directory` lie run.json (the config: another one is refused there), the newest states (`step_00000200`),
metrics.jsonl and the same for TensorBoard, and at the end model/, which other commands load by `target.source` or
`drafter.source`. SIGTERM saves before it ends; a loss that is no number ends the run with status 1, the last good state
kept.
"""

from collections.abc import Callable, Mapping
import functools
import pathlib
from typing import Any

from ml_collections import ConfigDict

from launch import cli, distributed, draft_training, preemption, pretraining, results, span_training
from launch.errors import RunError
from launch.mesh import set_mesh
from launch.recipe import Recipe
from launch.training_bar import TrainingBar
from launch.work_units import agree, difference
from models.errors import InputError
from models.loading import orbax
from models.loading.safetensors import read_json
from specdec.training.checkpoints import Checkpoints
from specdec.training.log import read_metrics
from specdec.training.trainer import DivergedError, StoppedError, Trainer

MODEL, ABOUT = 'model', 'run.json'
FREE = ('directory', 'log_every', 'eval_every', 'save_every', 'keep')  # of train: may change while a run goes on
SHOWN = ('loss', 'held_out_loss', 'held_out_tokens_per_pass')
RECIPES: Mapping[str, Callable[[ConfigDict], Recipe]] = {  # by train.objective
    'next_token': pretraining.recipe, 'span_corruption': span_training.recipe,
    **{name: functools.partial(draft_training.recipe, make) for name, make in draft_training.MAKERS.items()}}


def train(config: ConfigDict) -> dict[str, Any]:
  """Runs to the end, and returns where the model is and what the log says last.

  Raises:
    InputError: one line about the field at fault.
    Preempted: after SIGTERM; the state is saved.
    RunError: the loss is no number.
  """
  objective, directory = config.train.objective, pathlib.Path(config.train.directory)
  if objective not in RECIPES:
    raise InputError(f'train.objective={objective!r} is unknown: use one of {", ".join(RECIPES)}')
  finished = any((directory / MODEL / name).exists() for name in (orbax.MARK, draft_training.MARK))
  check_same(config, directory, begun=finished or bool(Checkpoints(directory, 1).steps()))
  if not finished:
    set_mesh(config)
    recipe = RECIPES[objective](config)
    trained = run(recipe, str(directory))
    recipe.save(trained, directory / MODEL)
  return {'model': str(directory / MODEL)} | last_values(directory)


def check_same(config: ConfigDict, directory: pathlib.Path, begun: bool) -> None:
  """Writes down what is trained in a directory, or refuses one in which a run of something else has begun.

  A directory of before this was written down is taken for what it is asked to be.

  Raises:
    InputError: names the first field that differs.
  """
  if not distributed.speaks():
    return
  about, path = results.plain(config), directory / ABOUT
  del about['mesh']  # states are read on any
  about['train'] = {name: value for name, value in about['train'].items() if name not in FREE}
  if not begun:
    results.check_writable(str(path))
    results.write_json(str(path), about)
  elif path.exists() and (there := read_json(path)) != about:
    raise InputError(f'{directory} has a run of another config ({difference(there, about)}): name another '
                     'train.directory, or remove it')


def run(recipe: Recipe, directory: str) -> Any:
  """The trained parameters of a recipe."""
  row = recipe.rows[0]['tokens']
  bar = TrainingBar(recipe.config.steps, recipe.config.batch * len(row))
  try:
    with preemption.finishing():
      return Trainer(
          recipe.objective, recipe.optimizer, recipe.trainable, recipe.frozen, recipe.rows, recipe.config, directory,
          recipe.evaluate, should_stop=lambda: any(agree([preemption.requested()])), on_step=bar).run()
  except StoppedError:
    raise preemption.Preempted from None
  except DivergedError as error:
    raise RunError(str(error)) from None
  finally:
    bar.close()


def last_values(directory: pathlib.Path) -> dict[str, Any]:
  """The newest value of everything that the log holds."""
  values: dict[str, Any] = {}
  for row in read_metrics(directory):
    values |= row
  return values


def main() -> None:
  facts = train(cli.config_of(CONFIG, ('train', 'mesh')))
  shown = ', '.join(f'{name} {facts[name]:.3f}' for name in SHOWN if facts.get(name) is not None)
  cli.say(f'{facts["model"]}: {facts["step"]} steps, {shown}')
  cli.write_json(facts)


if __name__ == '__main__':
  CONFIG = cli.define_config()
  cli.run(main)
