"""From config sections to models, drafter, rule and engine. ConfigDicts stop here."""

from collections.abc import Callable
import dataclasses
import pathlib
from typing import Any

from flax import nnx
from ml_collections import ConfigDict

from models.byte_tokenizer import ByteTokenizer
from models.config import DecoderConfig
from models.decoder import Decoder
from models.errors import InputError
from models.loading import embedded_model, load_decoder
from models.tokenizer import Tokenizer, check_same_vocabulary
from specdec import drafters
from specdec.accept import RULES
from specdec.adaptive import AdaptiveGamma
from specdec.engine import Engine, slots_for
from specdec.warp import Sampling

TINY = {'vocab_size': 264, 'width': 64, 'head_dim': 16, 'ff_width': 128}
RANDOM_MODELS: dict[str, tuple[Callable[[], DecoderConfig], int]] = {  # name: config, seed of the weights
    'tiny_target': (lambda: DecoderConfig.tiny(**TINY), 0),
    'tiny_draft': (lambda: DecoderConfig.tiny(**TINY, num_layers=1), 1),
}

AnyTokenizer = Tokenizer | ByteTokenizer


def build_model(section: ConfigDict) -> tuple[Decoder, AnyTokenizer]:
  """The model of a `target` or `drafter` section: `source` is 'embedded', 'random:NAME' or a path."""
  source = section.source
  if source.startswith('random:'):
    name = source.removeprefix('random:')
    if name not in RANDOM_MODELS:
      raise InputError(f'source={source!r} is unknown: after random: use one of {", ".join(RANDOM_MODELS)}')
    make, seed = RANDOM_MODELS[name]
    return Decoder(dataclasses.replace(make(), dtype=section.dtype), nnx.Rngs(seed)), ByteTokenizer()
  path = embedded_model() if source == 'embedded' else pathlib.Path(source)
  model, _ = load_decoder(path, dtype=section.dtype)
  return model, Tokenizer.from_gguf(path) if path.is_file() else Tokenizer.from_hf(path)


def build_drafter(config: ConfigDict, target: Decoder, tokenizer: AnyTokenizer) -> tuple[drafters.Drafter, Any]:
  """The drafter and what the device holds for it."""
  section = config.drafter
  slots = slots_for(config.engine.capacity, config.engine.gamma, config.engine.rows)
  if section.name == 'none':
    return drafters.Empty(), None
  if section.name == 'lookup':
    if section.match not in ('earliest', 'latest'):
      raise InputError(f"drafter.match={section.match!r} is unknown: use 'earliest' or 'latest'")
    return drafters.Lookup(
        section.min_ngram, section.max_ngram, latest=section.match == 'latest', partial=section.partial), None
  if section.name == 'self':
    layers = target.config.num_layers
    if not 1 <= section.num_layers <= layers:
      raise InputError(f'drafter.num_layers={section.num_layers} must lie in 1..{layers}, the layers of the target')
    return drafters.Model(tokenizer.num_tokens, slots), target.first_layers(section.num_layers)
  if section.name == 'model':
    draft, draft_tokenizer = build_model(section)
    check_same_vocabulary(tokenizer, draft_tokenizer)
    return drafters.Model(tokenizer.num_tokens, slots), draft
  if section.name == 'simulated':
    return drafters.Simulated(section.alpha), None
  raise InputError(f"drafter.name={section.name!r} is unknown: use 'none', 'lookup', 'self', 'model' or 'simulated'")


def build_engine(config: ConfigDict, drafter: drafters.Drafter, num_tokens: int) -> Engine:
  if config.accept.rule not in RULES:
    raise InputError(f'accept.rule={config.accept.rule!r} is unknown: use one of {", ".join(RULES)}')
  engine = config.engine
  adaptive = engine.adaptive
  return Engine(
      drafter=drafter, rule=RULES[config.accept.rule], gamma=engine.gamma, capacity=engine.capacity,
      num_tokens=num_tokens, widths=tuple(engine.widths), rows=engine.rows, logprobs=engine.logprobs,
      adaptive=AdaptiveGamma(adaptive.draft_cost, tuple(adaptive.verify_cost), adaptive.prior)
      if adaptive.enabled else None)


def build_sampling(config: ConfigDict) -> Sampling:
  return Sampling.create(config.sampling.temperature, config.sampling.top_k, config.sampling.top_p)
