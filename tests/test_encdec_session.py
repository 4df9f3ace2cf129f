"""Encoder-decoders from configs: texts, fields, and one line for what cannot be."""

from ml_collections import ConfigDict
import pytest

from configs import leviathan_t5, tiny
from launch.chips import gpus_of
from launch.prompts import load_prompts
from launch.roofline import num_parameters, roofline
from launch.session import Session
from models.config import EncDecConfig
from models.errors import InputError


def config_of(variant: str = 'tiny', **fields) -> ConfigDict:
  config = leviathan_t5.get_config(variant).copy_and_resolve_references()
  with config.unlocked():
    config.update_from_flattened_dict(fields)
  return config


def completions(config: ConfigDict) -> list[str]:
  session = Session.from_config(config)
  return [completion.token_ids for completion in session.generate(load_prompts(config.data))]


@pytest.mark.slow
def test_texts_depend_on_the_source_alone():
  """Whatever drafts, alone and in a batch with a source of another length."""
  texts = [completions(config_of(variant)) for variant in ('tiny', 'tiny_lookup', 'tiny_none')]
  assert texts[0] == texts[1] == texts[2] and len(texts[0][0]) == 32
  assert completions(config_of(**{'data.text': 'another source'})) != texts[0]


@pytest.mark.slow
def test_batches_of_sources_of_different_lengths(tmp_path):
  (tmp_path / 'p.txt').write_text('abc\n' + 'long ' * 20 + '\nx\n')
  fields = {'data.kind': 'file', 'data.path': str(tmp_path / 'p.txt'), 'data.limit': 3}
  together, alone = (completions(config_of(**fields | {'engine.batch': batch})) for batch in (3, 1))
  assert together == alone and len({tuple(text) for text in alone}) == 3


@pytest.mark.slow
def test_self_and_adaptive_gamma():
  """The first layer of the target's decoder as the draft, and γ by measured costs."""
  plain = completions(config_of('tiny_none'))
  config = config_of(**{'engine.adaptive.enabled': True})
  config.drafter = ConfigDict({'name': 'self', 'num_layers': 1, 'draft_vocab': ''})
  assert completions(config) == plain


@pytest.mark.parametrize(('fields', 'message'), [
    ({'engine.source_capacity': 0}, 'engine.source_capacity=0: the target has an encoder'),
    ({'data.text': 'x' * 600}, "prompt 'text' has 600 tokens, more than engine.source_capacity=512"),
    ({'drafter.source': 'random:t5'}, 'random:t5'),
    ({'accept.lenience': 0.0}, 'accept: lenience must lie in'),
    ({'target.source': 'random:tiny_target', 'engine.source_capacity': 0}, 'has an encoder, but the target gives'),
    ({'target.source': 'random:tiny_target'}, 'engine.source_capacity=512 is for targets with an encoder')])
def test_configs_that_are_refused(fields, message):
  with pytest.raises(InputError, match=message) as caught:
    completions(config_of(**fields))
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize('section', [
    {'name': 'medusa', 'source': 'untrained', 'dtype': 'float32', 'tree': ((0,), (1,)), 'num_heads': 1,
     'own_head': True},
    {'name': 'eagle', 'source': 'untrained', 'dtype': 'float32', 'tree': ((0,), (1,)), 'children': 'top', 'version': 1,
     'taps': ()}], ids=lambda section: section['name'])
def test_heads_are_refused(section):
  config = config_of()
  with config.unlocked():
    config.drafter, config.engine.gamma = ConfigDict(section), 2
  with pytest.raises(InputError, match='its heads are for targets without an encoder'):
    Session.from_config(config)


def test_a_decoder_alone_as_the_draft():
  plain = completions(config_of('tiny_none'))
  assert completions(config_of(**{'drafter.source': 'random:tiny_draft'})) == plain
  assert 'source_capacity' not in tiny.get_config().engine


@pytest.mark.slow
def test_sizes_of_the_papers_models():
  """11B, 800M, 250M and 77M, as the paper counts them."""
  sizes = {name: num_parameters(getattr(EncDecConfig, f't5_{name}')()) for name in ('xxl', 'large', 'base', 'small')}
  for name, published in {'xxl': 11e9, 'large': 800e6, 'base': 250e6, 'small': 77e6}.items():
    assert sizes[name] == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize('variant', leviathan_t5.VARIANTS)
def test_variants(variant):
  config = leviathan_t5.get_config(variant)
  assert config.is_locked and config.engine.source_capacity == 512
  if variant.startswith('xxl') and variant != 'xxl_none':
    assert set(config.plan.workloads) == set(leviathan_t5.TASKS)


def test_gpus_are_for_decoders():
  with pytest.raises(InputError, match='GPUs are planned for decoders alone'):
    roofline(leviathan_t5.get_config(), *gpus_of('1xH100'))


def test_table_2_of_the_config_is_the_published_one():
  from experiments import published
  rows = published.LEVIATHAN_TABLES_2_AND_4['rows']
  for draft, table in leviathan_t5.TABLE_2.items():
    assert [(row[3], row[4], row[5]) for row in rows if row[2] == f'T5-{draft}'] == list(table)
