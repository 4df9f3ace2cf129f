"""From config sections to models, drafter, rule and engine. ConfigDicts stop here."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import pathlib

import jax
from ml_collections import ConfigDict

from launch.drafter_fields import check_drafter
from models.abstract import AnyConfig, AnyModel
from models.byte_tokenizer import ByteTokenizer
from models.config import DecoderConfig, EncDecConfig
from models.errors import InputError
from models.loading import embedded_model, load_decoder
from models.loading.load import float_dtype
from models.random_weights import random_decoder
from models.tokenizer import Tokenizer
from specdec import drafters
from specdec.accept import RULES
from specdec.accept.protocol import AcceptRule
from specdec.accept.rejection import Rejection
from specdec.adaptive import AdaptiveGamma
from specdec.engine import Engine
from specdec.warp import Sampling

TINY = {'vocab_size': 264, 'width': 64, 'head_dim': 16, 'ff_width': 128, 'max_positions': 4096}
TINY_ENCDEC = {'vocab_size': 264, 'width': 48, 'start_token': 256}
RANDOM_MODELS: dict[str, tuple[Callable[[], AnyConfig], int]] = {  # name: config, seed of the weights
    'tiny_target': (lambda: DecoderConfig.tiny(**TINY), 0),
    'tiny_draft': (lambda: DecoderConfig.tiny(**TINY, num_layers=1), 1),
    'chinchilla_70b': (DecoderConfig.chinchilla_70b, 0),
    'chinchilla_4b': (DecoderConfig.chinchilla_4b, 1),
    'llama2_70b': (DecoderConfig.llama2_70b, 0),
    'llama2_7b': (DecoderConfig.llama2_7b, 1),
    'mistral_7b': (DecoderConfig.mistral_7b, 0),
    'tiny_encdec_target': (lambda: EncDecConfig.tiny(**TINY_ENCDEC), 0),
    'tiny_encdec_draft': (lambda: EncDecConfig.tiny(**TINY_ENCDEC, num_layers=1, num_encoder_layers=1), 1),
    't5_xxl': (EncDecConfig.t5_xxl, 0),
    't5_large': (EncDecConfig.t5_large, 1),
    't5_base': (EncDecConfig.t5_base, 1),
    't5_small': (EncDecConfig.t5_small, 1),
}

PRECISIONS = ('default', 'high', 'highest')
MOST = 1 << 30  # sums of two such numbers fit into 32 bits
MOST_AT_ONCE = 1 << 16  # rows, and tokens of a pass: lists of that many are made on the host
LIMITS = {'engine.gamma': (0, MOST_AT_ONCE), 'engine.capacity': (2, MOST), 'engine.batch': (1, MOST_AT_ONCE),
          'engine.attention_block': (0, MOST), 'engine.rows': (1, MOST_AT_ONCE), 'sampling.max_new_tokens': (1, MOST)}

AnyTokenizer = Tokenizer | ByteTokenizer


def check_fields(config: ConfigDict) -> None:
  """Refuses what is wrong whatever the model, so that it is said before one is loaded."""
  for field, (least, most) in LIMITS.items():
    if not least <= config[field] <= most:
      raise InputError(f'{field}={config[field]} must lie in {least}..{most}')
  for width in config.engine.widths:
    if not isinstance(width, int) or not 1 <= width <= config.engine.gamma + 1:
      raise InputError(f'engine.widths holds {width!r}: widths lie in 1..{config.engine.gamma + 1}, engine.gamma + 1')
  if config.engine.precision not in PRECISIONS:
    raise InputError(f'engine.precision={config.engine.precision!r} is unknown: use one of {", ".join(PRECISIONS)}')
  if config.mesh.draft not in ('sharded', 'replicated'):
    raise InputError(f"mesh.draft={config.mesh.draft!r} is unknown: use 'sharded' or 'replicated'")
  if config.drafter.name == 'self' and not splits_draft(config):
    raise InputError("mesh.draft='replicated' needs a draft with weights of its own: drafter.name='self' has those of "
                     "the target; use 'sharded'")
  if config.accept.rule not in RULES:
    raise InputError(f'accept.rule={config.accept.rule!r} is unknown: use one of {", ".join(RULES)}')
  build_rule(config.accept)
  check_drafter(config.drafter)
  for stop in config.sampling.stop:
    if not isinstance(stop, str) or not stop:
      raise InputError(f'sampling.stop holds {stop!r}: stop strings are texts, and not empty')
    try:
      stop.encode()
    except UnicodeEncodeError as error:
      raise InputError(f'sampling.stop holds {stop!r}, half of a surrogate pair: no tokenizer knows it') from error
  build_sampling(config)


def check_capacity(config: ConfigDict, max_positions: int) -> None:
  """Refuses rows longer than the context of the target."""
  if config.engine.capacity > max_positions:
    raise InputError(f'engine.capacity={config.engine.capacity} is past the context of the target: '
                     f'lower it to {max_positions} or less')


def check_source(config: ConfigDict, has_encoder: bool) -> None:
  """Refuses a target that reads sources without room for them, and room where nothing reads them."""
  room = source_capacity(config)
  if has_encoder and not 1 <= room <= MOST:
    raise InputError(f'engine.source_capacity={room}: the target has an encoder, which reads a source beside the text: '
                     f'give it room for 1..{MOST} tokens')
  if room and not has_encoder:
    raise InputError(f'engine.source_capacity={room} is for targets with an encoder: leave it out, or set it to 0')


def source_capacity(config: ConfigDict) -> int:
  """Tokens that an encoder reads, at most; configs of targets without one need not name it."""
  return config.engine.get('source_capacity', 0)


def check_layers(drafting: int, layers: int, section: str = 'drafter') -> None:
  if not 1 <= drafting <= layers:
    raise InputError(f'{section}.num_layers={drafting} must lie in 1..{layers}, the layers of the target')


def splits_draft(config: ConfigDict) -> bool:
  """Whether a draft model is split over the model axis as the target is; else each device has all of it."""
  return config.mesh.draft == 'sharded'


@contextlib.contextmanager
def given_by(section: str) -> Iterator[None]:
  """What a constructor refuses, the user has written into this section."""
  try:
    yield
  except (ValueError, TypeError) as error:
    raise InputError(f'{section}: {error}') from error


def random_config(section: ConfigDict, attention_block: int) -> tuple[AnyConfig, int]:
  """The model of a source 'random:NAME', and the seed of its weights."""
  name = section.source.removeprefix('random:')
  if name not in RANDOM_MODELS:
    raise InputError(f'source={section.source!r} is unknown: after random: use one of {", ".join(RANDOM_MODELS)}')
  make, seed = RANDOM_MODELS[name]
  return dataclasses.replace(make(), dtype=float_dtype(section.dtype), attention_block=attention_block or None), seed


def build_model(section: ConfigDict, attention_block: int, split: bool = True,
                taps: tuple[int, ...] = ()) -> tuple[AnyModel, AnyTokenizer]:
  """The model of a `target` or `drafter` section: `source` is 'embedded', 'random:NAME' or a path."""
  source, block, mesh = section.source, attention_block or None, jax.sharding.get_mesh()
  mesh = None if mesh.empty else mesh
  if source.startswith('random:'):
    config, seed = random_config(section, attention_block)
    return random_decoder(dataclasses.replace(config, split=split, taps=taps), seed, mesh), ByteTokenizer()
  path = embedded_model() if source == 'embedded' else pathlib.Path(source)
  tokenizer = Tokenizer.of_model(path)  # what is missing is said before the weights are read
  model, _ = load_decoder(path, dtype=section.dtype, mesh=mesh, attention_block=block, split=split, taps=taps)
  if tokenizer.num_tokens > model.vocab_size:
    raise InputError(f'{path}: the tokenizer has {tokenizer.num_tokens} tokens, the model {model.vocab_size}: '
                     'use the tokenizer that the model was trained with')
  return model, tokenizer


def build_engine(config: ConfigDict, drafter: drafters.Drafter, num_tokens: int) -> Engine:
  """Costs of an adaptive γ that the config leaves open are not in it: `Session.from_config` measures them."""
  engine, adaptive = config.engine, None
  with given_by('engine'):
    if engine.adaptive.enabled and engine.adaptive.verify_cost:
      adaptive = AdaptiveGamma(
          engine.adaptive.draft_cost, tuple(engine.adaptive.verify_cost), engine.adaptive.prior)
    return Engine(
        drafter=drafter, rule=build_rule(config.accept), gamma=engine.gamma, capacity=engine.capacity,
        num_tokens=num_tokens, widths=tuple(engine.widths), rows=engine.rows, logprobs=engine.logprobs,
        adaptive=adaptive, source_capacity=source_capacity(config))


def build_rule(section: ConfigDict) -> AcceptRule:
  """The rule of an `accept` section; only the token rule has a `lenience`."""
  rule = RULES[section.rule]
  lenience = section.get('lenience', 1.0)
  if lenience == 1:
    return rule
  if not isinstance(rule, Rejection):
    raise InputError(f"accept.lenience={lenience} is for accept.rule='rejection', not {section.rule!r}")
  with given_by('accept'):
    return Rejection(lenience=lenience)


def build_sampling(config: ConfigDict) -> Sampling:
  with given_by('sampling'):
    return Sampling.create(config.sampling.temperature, config.sampling.top_k, config.sampling.top_p)
