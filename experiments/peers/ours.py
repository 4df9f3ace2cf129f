"""This project as a contestant."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax

from experiments.peers.contestant import Contestant
from models.decoder import Decoder
from models.tokenizer import Tokenizer
from specdec import engine as engines
from specdec.accept import RULES
from specdec.drafters import Empty, Lookup
from specdec.warp import Sampling


def contestants(decoder: Decoder, tokenizer: Tokenizer, settings: Sequence[dict[str, Any]], new_tokens: int,
                capacity: int) -> list[Contestant]:
  """Plain decoding, then lookup with each of `settings` (gamma and fields of `Lookup`)."""
  plain = engines.Engine(Empty(), RULES['rejection'], 0, capacity, tokenizer.num_tokens)
  variants = [('none', {}, plain)]
  for setting in settings:
    fields = dict(setting)
    gamma = fields.pop('gamma')
    variants.append(('lookup', setting, dataclasses.replace(plain, drafter=Lookup(**fields), gamma=gamma)))
  params = engines.Params(decoder)
  prepare = functools.partial(_prepare, params=params, eos_ids=tuple(sorted(tokenizer.eos_ids)), new_tokens=new_tokens)
  return [
      Contestant('specdec', f'jax {jax.__version__}', drafter, setting,
                 functools.partial(prepare, engine=engine), functools.partial(engines.run, engine, params),
                 lambda state: engines.to_result(state).tokens[0])
      for drafter, setting, engine in variants]


def _prepare(ids: Sequence[int], *, engine: engines.Engine, params: engines.Params, eos_ids: tuple[int, ...],
             new_tokens: int) -> engines.DecodeState:
  request = engines.Request([list(ids)], [0], Sampling.create(temperature=0.0), new_tokens, eos_ids)
  return jax.block_until_ready(engine.start(params, request))
