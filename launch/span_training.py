"""Training of an encoder-decoder from scratch by span corruption, from a config: vocabulary, rows, model."""

from collections.abc import Iterator
import functools
from pathlib import Path
import sys

import jax
from ml_collections import ConfigDict
import numpy as np

from launch import distributed
from launch.bpe import train_tokenizer
from launch.build import given_by
from launch.pretraining import SECTIONS, save_model
from launch.recipe import Recipe, train_config
from launch.roofline import num_parameters
from launch.texts import texts
from models.config import EncDecConfig
from models.errors import InputError
from models.random_weights import random_decoder
from models.tokenizer import Tokenizer
from specdec.training.held_out import HeldOut
from specdec.training.optimizer import adamw
from specdec.training.schedule import steps_for
from specdec.training.span_corruption import CorruptedRows, SpanCorruption, Spans


def recipe(config: ConfigDict) -> Recipe:
  """All of a run.

  Raises:
    InputError: one line about the field at fault.
  """
  missing = [section for section in (*SECTIONS, 'spans') if section not in config]
  if missing:
    raise InputError(f'the config has no section {missing[0]!r}: span corruption reads {", ".join(SECTIONS)}, spans '
                     'and mesh')
  spans, tokenizer = spans_of(config), tokenizer_of(config)
  model = model_config(config, tokenizer.bos_id)
  if tokenizer.num_tokens > model.vocab_size:
    raise InputError(f'model.vocab_size={model.vocab_size} is smaller than the vocabulary in tokenizer.source='
                     f'{config.tokenizer.source!r}, {tokenizer.num_tokens} tokens: raise it, or name another tokenizer')
  schedule = train_config(config.train, steps=steps_for(config.train.tokens, config.train.batch, spans.target_tokens))
  rows, held_out = (rows_of(config, tokenizer, held_out) for held_out in (False, True))
  if distributed.speaks():
    rounds = schedule.steps * schedule.batch / max(1, len(rows))
    print(f'{num_parameters(model):,} parameters; {schedule.steps:,} steps of {schedule.batch} rows, {len(rows):,} '
          f'different ones ({rounds:.1f} epochs)', file=sys.stderr, flush=True)
  mesh, objective = jax.sharding.get_mesh(), SpanCorruption()
  return Recipe(
      objective=objective, optimizer=adamw(schedule),
      trainable=random_decoder(model, schedule.seed, None if mesh.empty else mesh), frozen=None, rows=rows,
      config=schedule, save=functools.partial(save_model, Path(config.tokenizer.source)),
      evaluate=HeldOut(objective, None, held_out.spread(config.train.held_out_rows),
                       schedule.batch // schedule.accumulate, schedule.dtype))


def spans_of(config: ConfigDict) -> Spans:
  with given_by('spans'):
    return Spans(**config.spans.to_dict())


def gap_names(count: int) -> list[str]:
  """What stands for gaps, as T5 names them."""
  return [f'<extra_id_{gap}>' for gap in range(count)]


def model_config(config: ConfigDict, start_token: int | None) -> EncDecConfig:
  """Of the `model` section."""
  with given_by('model'):
    return EncDecConfig(**config.model.to_dict(), start_token=start_token or 0)


def tokenizer_of(config: ConfigDict) -> Tokenizer:
  """The vocabulary in `tokenizer.source`; where there is none, one is made of the training texts, and of gaps.

  Raises:
    InputError: a vocabulary without gaps, or without the token that begins and ends a text; on several hosts, none.
  """
  directory, names = Path(config.tokenizer.source), gap_names(spans_of(config).count)
  if not (directory / 'tokenizer.json').exists():
    if distributed.joined():
      raise InputError(f'tokenizer.source={config.tokenizer.source!r} has no tokenizer: make it on one host first')
    train_tokenizer(texts(config.data, held_out=False), config.model.vocab_size, directory, markers=names)
  tokenizer = Tokenizer.from_hf(directory)
  known = set(tokenizer.vocab.values())
  if not known.issuperset(names) or tokenizer.bos_id is None or tokenizer.bos_id != tokenizer.eos_id:
    raise InputError(f'tokenizer.source={config.tokenizer.source!r} is no vocabulary for span corruption: it needs '
                     f'{names[0]} to {names[-1]}, and one token that begins and ends a text; name another directory')
  return tokenizer


def rows_of(config: ConfigDict, tokenizer: Tokenizer, held_out: bool) -> CorruptedRows:
  """Pieces of the texts, what is left at the end of a text left out.

  Raises:
    InputError: if no text is as long as a piece.
  """
  spans, ids_of_names = spans_of(config), {name: token for token, name in tokenizer.vocab.items()}
  pieces = list(_pieces(config, tokenizer, held_out, spans.piece))
  if not pieces:
    raise InputError(f'spans.piece={spans.piece} is longer than every text: lower it, or add data')
  gaps = [ids_of_names[name] for name in gap_names(spans.count)]
  return CorruptedRows(np.asarray(pieces, np.int32), spans, gaps, tokenizer.eos_id, config.train.seed)


def _pieces(config: ConfigDict, tokenizer: Tokenizer, held_out: bool, length: int) -> Iterator[list[int]]:
  for text in texts(config.data, held_out):
    ids = tokenizer.encode(text)
    for start in range(0, len(ids) - length + 1, length):
      yield ids[start:start + length]
