"""The training configs of a pair that one command trains and measures."""

from collections.abc import Callable
from pathlib import Path

from ml_collections import ConfigDict


def placed(config: ConfigDict, directory: Path, variant: str, tokens: int | None,
           tokens_per_step: Callable[[ConfigDict], int]) -> ConfigDict:
  """The config with its run in a folder of the pair's directory, and the pair's tokenizer; cut short if asked.

  Args:
    config: of a model that `launch.train` trains; it is changed.
    directory: of the pair.
    variant: the folder.
    tokens: to train on instead of what the config says.
    tokens_per_step: of a config.
  """
  config.train.directory = str(directory / variant)
  config.tokenizer.source = str(directory / 'tokenizer')
  if tokens is not None:
    config.train.tokens = tokens
    config.train.warmup_steps = min(config.train.warmup_steps, tokens // tokens_per_step(config) // 4)
  return config
