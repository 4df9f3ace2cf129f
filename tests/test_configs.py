"""Every field of every config is read: changing it changes what runs (fault 66)."""

import importlib
import pathlib

import jax
from ml_collections import ConfigDict
import pytest

from configs import smollm2, tiny
from launch.build import build_sampling
from launch.prompts import load_prompts
from launch.session import Session
from models.errors import InputError

ROOT = pathlib.Path(__file__).parents[1]
OTHER_VALUES = {
    'target.source': 'random:tiny_draft', 'target.dtype': 'bfloat16',
    'drafter.num_layers': 2, 'drafter.source': 'random:tiny_target', 'drafter.dtype': 'bfloat16',
    'drafter.alpha': 0.5, 'drafter.min_ngram': 2, 'drafter.max_ngram': 5, 'drafter.match': 'latest',
    'drafter.partial': False, 'drafter.draft_vocab': 'ids.json',
    'accept.rule': 'coupled', 'accept.lenience': 0.5,
    'engine.gamma': 3, 'engine.capacity': 400, 'engine.batch': 2, 'engine.rows': 8, 'engine.widths': (2,),
    'engine.precision': 'default', 'engine.attention_block': 0,
    'engine.logprobs': False, 'engine.adaptive.enabled': True, 'engine.adaptive.draft_cost': 0.5,
    'engine.adaptive.verify_cost': (1.0, 1.1, 1.2, 1.3, 1.4), 'engine.adaptive.prior': 0.2,
    'sampling.temperature': 0.5, 'sampling.top_k': 3, 'sampling.top_p': 0.5, 'sampling.max_new_tokens': 7,
    'sampling.seed': 5, 'sampling.stop': ('x',),
    'data.kind': 'file', 'data.text': 'something else', 'data.limit': 1, 'data.offset': 1, 'data.path': 'other.txt',
    'data.form': 'chat', 'data.shots': 1}
# `drafter.name` picks the variant and is covered by them all; these need data of another kind to matter.
NEEDS_FILE = {'data.path', 'data.limit', 'data.offset'}
FIVE = (1.0, 1.1, 1.2, 1.3, 1.5)


def fields(config: ConfigDict, prefix: str = '') -> list[str]:
  names = []
  for name, value in config.items():
    names += fields(value, f'{prefix}{name}.') if isinstance(value, ConfigDict) else [prefix + name]
  return names


def observe(config: ConfigDict) -> str:
  """All that a run depends on, as text."""
  prompts = load_prompts(config.data)
  session = Session.from_config(config)
  size = config.engine.batch
  try:
    request = session.request(prompts[:size])
  except InputError as refused:  # no chat template
    return str(refused)
  weights = jax.tree.map(lambda x: (x.shape, str(x.dtype), float(x.ravel()[0])), session.params)
  requested = (request.prompts, request.seeds, request.max_new_tokens, request.stop_table.shape)
  programs = (session.engine, session.params.target.config, jax.config.jax_default_matmul_precision)
  return repr((programs, size, jax.tree.leaves(weights), requested, build_sampling(config), prompts))


@pytest.fixture
def files(tmp_path, monkeypatch):
  precision = jax.config.jax_default_matmul_precision
  monkeypatch.chdir(tmp_path)
  pathlib.Path('prompts.txt').write_text('one\ntwo\nthree\n')
  pathlib.Path('other.txt').write_text('four\nfive\nsix\n')
  pathlib.Path('ids.json').write_text('[1, 2, 3]')
  yield
  jax.config.update('jax_default_matmul_precision', precision)


def prepared(variant: str, field: str) -> ConfigDict:
  """A config in which the field can matter."""
  config = tiny.get_config(variant).unlock()
  if field in NEEDS_FILE:
    config.data.kind, config.data.path = 'file', 'prompts.txt'
  if field == 'data.kind':
    config.data.path = 'prompts.txt'
  if field.startswith('engine.adaptive.'):
    config.engine.adaptive.verify_cost = FIVE
    config.engine.adaptive.enabled = field != 'engine.adaptive.enabled'
  if field == 'data.shots':
    config.data.kind, config.data.form, config.data.limit = 'news', 'raw', 1
    config.engine.capacity = 4096
  return config


CASES = [(variant, field) for variant in tiny.DRAFTERS for field in fields(tiny.get_config(variant))
         if field != 'drafter.name' and not field.startswith('mesh.')  # of the process: tests/test_distributed.py
         and (variant == 'model' or field.startswith('drafter.'))]


@pytest.mark.parametrize(('variant', 'field'), CASES)
def test_each_field_is_read(variant, field, files):
  """Fault 66."""
  before = observe(prepared(variant, field))
  changed = prepared(variant, field)
  with changed.unlocked():
    changed.update_from_flattened_dict({field: OTHER_VALUES[field]})
  assert observe(changed) != before


@pytest.mark.parametrize('variant', smollm2.DRAFTERS)
def test_configs_share_their_fields(variant):
  """What holds for the toy's fields holds for the embedded model's."""
  ours = {field for field in fields(smollm2.get_config(variant)) if not field.startswith('drafter.')}
  assert ours == {field for field in fields(tiny.get_config()) if not field.startswith('drafter.')}


@pytest.mark.parametrize('name', sorted({path.stem for path in (ROOT / 'configs').glob('*.py')} - {'__init__'}))
def test_every_config_loads_and_is_locked(name):
  config = importlib.import_module(f'configs.{name}').get_config()
  assert config.is_locked
  with pytest.raises(AttributeError):
    config.no_such_section = 1
