"""Pretraining from scratch, from a config: vocabulary, packed rows, model, steps by Chinchilla's rule."""

from collections.abc import Iterator
import functools
from pathlib import Path
import sys

import jax
from ml_collections import ConfigDict

from launch import distributed
from launch.bpe import train_tokenizer
from launch.build import given_by
from launch.convert import copy_tokenizer
from launch.recipe import Recipe, train_config
from launch.roofline import num_parameters
from launch.texts import texts
from models.abstract import AnyModel
from models.config import DecoderConfig
from models.errors import InputError
from models.loading import orbax
from models.random_weights import random_decoder
from models.sequence import Stack, check_alike, stack, unstack
from models.tokenizer import Tokenizer
from specdec.training.config import TrainConfig
from specdec.training.held_out import HeldOut
from specdec.training.next_token import NextToken
from specdec.training.optimizer import adamw
from specdec.training.packing import PackedRows, pack
from specdec.training.schedule import planned_tokens, steps_for

SECTIONS = ('model', 'tokenizer', 'data', 'train')


def recipe(config: ConfigDict) -> Recipe:
  """All of a pretraining run.

  Raises:
    InputError: one line about the field at fault.
  """
  missing = [section for section in SECTIONS if section not in config]
  if missing:
    raise InputError(f'the config has no section {missing[0]!r}: pretraining reads {", ".join(SECTIONS)} and mesh')
  model, schedule = model_config(config), schedule_of(config)
  tokenizer = tokenizer_of(config)
  if tokenizer.num_tokens > model.vocab_size:
    raise InputError(f'model.vocab_size={model.vocab_size} is smaller than the vocabulary in tokenizer.source='
                     f'{config.tokenizer.source!r}, {tokenizer.num_tokens} tokens: raise it, or name another tokenizer')
  rows, held_out = (rows_of(config, tokenizer, held_out) for held_out in (False, True))
  objective = NextToken(config.train.remat)
  tokens = schedule.steps * schedule.batch * config.train.row_tokens
  if distributed.speaks():
    print(f'{num_parameters(model):,} parameters; {tokens:,} tokens in {schedule.steps:,} steps, {rows.predicted:,} '
          f'different ones ({tokens / max(1, rows.predicted):.1f} epochs)', file=sys.stderr, flush=True)
  return Recipe(
      objective=objective, optimizer=adamw(schedule), trainable=new_stack(model, schedule.seed), frozen=None, rows=rows,
      config=schedule, save=functools.partial(save, Path(config.tokenizer.source)),
      evaluate=HeldOut(objective, None, held_out.spread(config.train.held_out_rows),
                       schedule.batch // schedule.accumulate, schedule.dtype))


def model_config(config: ConfigDict) -> DecoderConfig:
  """Of the `model` section; rows are as long as the model will ever read.

  Raises:
    InputError: for shapes that cannot be, or layers that are not alike.
  """
  if config.train.row_tokens < 1:
    raise InputError(f'train.row_tokens={config.train.row_tokens} must be 1 or more')
  with given_by('model'):
    model = DecoderConfig(**config.model.to_dict(), max_positions=config.train.row_tokens)
  check_alike(model)
  return model


def schedule_of(config: ConfigDict) -> TrainConfig:
  """With as many steps as the planned tokens take: `train.tokens`, or by the rule."""
  section = config.train
  tokens = section.tokens or planned_tokens(num_parameters(model_config(config)), section.tokens_per_parameter)
  return train_config(section, steps=steps_for(tokens, section.batch, section.row_tokens))


def new_stack(model: DecoderConfig, seed: int) -> Stack:
  """Random float32 parameters, where they belong on the process's mesh."""
  mesh = jax.sharding.get_mesh()
  return stack(random_decoder(model, seed, None if mesh.empty else mesh))


def tokenizer_of(config: ConfigDict) -> Tokenizer:
  """The vocabulary in `tokenizer.source`; where there is none, one is made of the training texts.

  On several hosts it must be there already, since each would make its own.
  """
  directory = Path(config.tokenizer.source)
  if not any((directory / name).exists() for name in ('tokenizer.json', 'tokenizer.model', orbax.GGUF_TOKENIZER)):
    if distributed.joined():
      raise InputError(f'tokenizer.source={config.tokenizer.source!r} has no tokenizer: make it on one host first')
    train_tokenizer(texts(config.data, held_out=False), config.model.vocab_size, directory)
  return Tokenizer.of_model(directory)


def rows_of(config: ConfigDict, tokenizer: Tokenizer, held_out: bool) -> PackedRows:
  """Documents, each with the end of a text before and behind it, in rows of `train.row_tokens` + 1."""
  return pack(_documents(config, tokenizer, held_out), config.train.row_tokens + 1)


def _documents(config: ConfigDict, tokenizer: Tokenizer, held_out: bool) -> Iterator[list[int]]:
  end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
  for text in texts(config.data, held_out):
    ids = tokenizer.encode(text, add_special=True)
    yield ids if ids[-1:] == end else ids + end


def save(tokenizer: Path, trained: Stack, directory: Path) -> None:
  """See `save_model`."""
  save_model(tokenizer, unstack(trained), directory)


def save_model(tokenizer: Path, model: AnyModel, directory: Path) -> None:
  """A checkpoint of ours, which `target.source` and `drafter.source` name."""
  orbax.prepare(directory)
  if jax.process_index() == 0:
    copy_tokenizer(tokenizer, directory / orbax.TOKENIZER)
  orbax.save_decoder(directory, model)
