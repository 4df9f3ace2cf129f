"""What `launch.train` trains: all that a `Trainer` needs, and how the result is saved."""

from collections.abc import Callable, Sequence
import dataclasses
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
import optax

from models.errors import InputError
from specdec.training.config import TrainConfig
from specdec.training.rows import Row
from specdec.training.step import Objective


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A training run, made from a config.

  Attributes:
    objective, optimizer, trainable, frozen, rows, config, evaluate: of the `Trainer`.
    save: writes the trained parameters into a directory that other commands load; every process calls it.
  """

  objective: Objective
  optimizer: optax.GradientTransformation
  trainable: Any
  frozen: Any
  rows: Sequence[Row]
  config: TrainConfig
  evaluate: Callable[[Any], dict[str, float]] | None
  save: Callable[[Any, Path], None]


def train_config(section: ConfigDict, **changes: Any) -> TrainConfig:
  """Of the fields of the `train` section that are a `TrainConfig`'s.

  Raises:
    InputError: for a value that cannot be.
  """
  names = {field.name for field in dataclasses.fields(TrainConfig)}
  fields = {name: value for name, value in section.items() if name in names} | changes
  try:
    return TrainConfig(**fields)
  except TypeError as error:
    raise InputError(f'train: {error}') from error
