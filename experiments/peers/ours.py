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
from specdec.drafters import Empty, Lookup, Model
from specdec.warp import Sampling


def contestants(decoder: Decoder, tokenizer: Tokenizer, settings: Sequence[dict[str, Any]], new_tokens: int,
                capacity: int, draft: Decoder | None = None, drafted: Sequence[int] = ()) -> list[Contestant]:
  """Plain decoding, lookup with each of `settings` (gamma and fields of `Lookup`), and `draft` with each γ."""
  plain = engines.Engine(Empty(), RULES['rejection'], 0, capacity, tokenizer.num_tokens)
  variants = [('none', {}, plain, None)]
  for setting in settings:
    fields = dict(setting)
    gamma = fields.pop('gamma')
    variants.append(('lookup', setting, dataclasses.replace(plain, drafter=Lookup(**fields), gamma=gamma), None))
  for gamma in drafted:
    engine = dataclasses.replace(plain, drafter=Model(tokenizer.num_tokens), gamma=gamma)
    variants.append(('draft', {'gamma': gamma}, engine, draft))
  prepare = functools.partial(_prepare, eos_ids=tuple(sorted(tokenizer.eos_ids)), new_tokens=new_tokens)
  found = []
  for drafter, setting, engine, model in variants:
    params = engines.Params(decoder, model)
    found.append(Contestant(
        'specdec', f'jax {jax.__version__}', drafter, setting, functools.partial(prepare, engine=engine, params=params),
        functools.partial(engines.run, engine, params), lambda state: engines.to_result(state).tokens[0],
        passes=lambda decode, state: engines.to_result(decode(state)).total.passes))
  return found


def _prepare(ids: Sequence[int], *, engine: engines.Engine, params: engines.Params, eos_ids: tuple[int, ...],
             new_tokens: int) -> engines.DecodeState:
  request = engines.Request([list(ids)], [0], Sampling.create(temperature=0.0), new_tokens, eos_ids)
  return jax.block_until_ready(engine.start(params, request))
