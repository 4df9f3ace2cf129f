"""`launch.train` of drafts: from a corpus to what `launch.bench` loads; resumed as if never interrupted."""

import functools
import json
from pathlib import Path

from flax import nnx
import jax
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import tiny, train_draft, train_eagle, train_medusa
from launch import draft_training
from launch.build import build_model
from launch.build_drafter import tree_of
from launch.corpus import Text, rows
from launch.prompts import Prompt
from launch.session import Session
from launch.train import run, train
from models.errors import InputError
from specdec.training import kept_vectors
from specdec.training.kept_vectors import with_vectors
from specdec.training.log import read_metrics
from specdec.tree import TreeSpec

CONFIGS = {'eagle': train_eagle.get_config, 'medusa': train_medusa.get_config, 'distill': train_draft.get_config}
TAPS = (0, 1)
ROW, STEPS = 48, 6


@functools.cache
def texts() -> tuple[Text, ...]:
  """Greedy answers of the tiny target."""
  config = tiny.get_config('none')
  with config.unlocked():
    config.engine.batch, config.sampling.max_new_tokens = 16, 20
  session = Session.from_config(config)
  prompts = [Prompt(f'text/{number}', f'{number} and so', False) for number in range(64)]
  made = []
  for prompt, completion in zip(prompts, session.generate(prompts), strict=True):
    ids = session.encode(prompt)
    made.append(Text(prompt.id, 'chat', 0.0, len(ids), (*ids, *completion.token_ids)))
  return tuple(made)


def write_corpus(directory: Path, some: list[dict]) -> None:
  directory.mkdir()
  (directory / 'unit-00000-of-00001.json').write_text(json.dumps({'texts': some}))


@pytest.fixture
def corpus(tmp_path) -> Path:
  write_corpus(tmp_path / 'corpus', [vars(text) for text in texts()])
  return tmp_path / 'corpus'


def config_of(kind: str, corpus: Path, name: str = 'run', **train_changes) -> ConfigDict:
  config = train_eagle.get_config('eagle3') if kind == 'eagle 3' else CONFIGS[kind]()
  with config.unlocked():
    if kind == 'eagle 3':
      config.draft.taps = TAPS
    config.target.source = 'random:tiny_target'
    config.data.corpus, config.data.row_tokens = str(corpus), ROW
    config.draft.vocab, config.draft.dtype = 200, 'float32'
    if kind == 'distill':
      config.draft.num_layers = 1
    if 'eagle' in kind:
      config.loss.unroll_from = 0
    config.train.update({'directory': str(corpus.parent / name), 'steps': STEPS, 'batch': 4, 'accumulate': 2,
                         'warmup_steps': 1, 'log_every': 1, 'eval_every': 3, 'save_every': 2} | train_changes)
  return config


@pytest.mark.parametrize('kind', [
    'medusa', *(pytest.param(kind, marks=pytest.mark.slow) for kind in ('eagle', 'eagle 3', 'distill'))])
def test_from_corpus_to_drafter(kind, corpus):
  """The loss falls, the log has what acceptance will be, and configs that decode load what comes out."""
  facts = train(config_of(kind, corpus, steps=12, learning_rate=3e-3))
  losses = [row['held_out_loss'] for row in read_metrics(corpus.parent / 'run') if 'held_out_loss' in row]
  assert losses[-1] < losses[0]
  assert 1 <= facts['held_out_tokens_per_pass'] <= 5
  assert {'overlap', 'accepted', 'right_1', 'kept_2'} <= facts.keys()
  config = tiny.get_config('none')
  section = {'source': facts['model'], 'dtype': 'float32', 'tree': ((0,), (1,), (0, 0)), 'children': 'top',
             'version': 1, 'taps': (), 'num_heads': 3, 'own_head': False, 'draft_vocab': ''}
  if kind == 'eagle 3':
    section |= {'version': 3, 'taps': TAPS}
  with config.unlocked():
    config.drafter = section | {'name': 'model' if kind == 'distill' else kind.partition(' ')[0]}
    config.engine.gamma, config.accept.rule = 3, 'rejection' if kind == 'distill' else 'multiround'
  session = Session.from_config(config)
  prompt = Prompt('it', '7 and so', False)
  assert session.generate([prompt])[0].token_ids == session.plain().generate([prompt])[0].token_ids
  again = train(config_of(kind, corpus, steps=12, learning_rate=3e-3))
  assert again == facts


def test_variants_have_their_own_directories():
  """Nobody finds what another one trained."""
  variants = {train_draft: train_draft.LOSSES, train_eagle: train_eagle.LOSSES, train_medusa: train_medusa.LABELS}
  names = [module.get_config(variant).train.directory for module, some in variants.items() for variant in some]
  assert len(set(names)) == len(names)
  assert {'results/train_draft', 'results/train_eagle', 'results/train_medusa'} < set(names)


def test_a_draft_begins_where_another_ended(corpus):
  """With its layers and no other; one of another vocabulary is refused."""
  config = config_of('distill', corpus)
  first = draft_training.recipe(draft_training.draft, config)
  moved = jax.tree.map(lambda x: x + 1, first.trainable)
  first.save(moved, corpus.parent / 'before')
  again = config_of('distill', corpus)
  again.draft.start = str(corpus.parent / 'before')
  jax.tree.map(np.testing.assert_array_equal, draft_training.recipe(draft_training.draft, again).trainable, moved)
  again.draft.vocab = 100
  with pytest.raises(InputError, match=r"draft\.start='.*' has 1 layers and 200 tokens"):
    draft_training.recipe(draft_training.draft, again)
  again.draft.start = str(corpus)
  with pytest.raises(InputError, match=r'holds no draft that launch\.train trained'):
    draft_training.recipe(draft_training.draft, again)


@pytest.mark.slow
@pytest.mark.parametrize('kind', CONFIGS)
def test_interrupted(kind, corpus, monkeypatch):
  """Ended after four steps and started again: the same log and the same parameters, bit for bit."""
  whole = trained(config_of(kind, corpus, 'whole'))
  config = config_of(kind, corpus, 'parts')
  with pytest.raises(InterruptedError):
    interrupted(config, monkeypatch)
  parts = trained(config)
  jax.tree.map(np.testing.assert_array_equal, parts, whole)
  curve = lambda name: [{key: value for key, value in row.items() if key != 'tokens_per_second'}
                        for row in read_metrics(corpus.parent / name)]
  assert curve('parts') == curve('whole')


def trained(config: ConfigDict):
  return run(draft_training.recipe(draft_training.MAKERS[config.train.objective], config), config.train.directory)


def interrupted(config: ConfigDict, monkeypatch) -> None:
  def bar(*_):
    def on_step(step, loss):
      if step == 5:
        raise InterruptedError
    on_step.close = lambda: None
    return on_step
  with monkeypatch.context() as patch:
    patch.setattr('launch.train.TrainingBar', bar)
    trained(config)


def test_kept_vectors(tmp_path):
  """Those of a pass, once for all; computed anew for other rows, and only what is missing after an interruption."""
  target, tokenizer = build_model(ConfigDict({'source': 'random:tiny_target', 'dtype': 'float32'}), 0)
  some = rows(texts()[:20], ROW)
  first = with_vectors(target, tokenizer.num_tokens, some, tmp_path, 4)
  assert len(first) == len(some) and first[3]['hidden'].shape == (ROW, target.config.width)
  seen = target(*(np.stack([some[3][name]]) for name in ('tokens', 'positions')),
                np.tril(some[3]['segments'][:, None] == some[3]['segments'])[None], target.init_cache(1, ROW))
  np.testing.assert_allclose(first[3]['hidden'], seen.hidden_BTD[0], rtol=2e-3, atol=2e-3)
  totals_T = jax.nn.logsumexp(seen.logits_BRV[0, :, :tokenizer.num_tokens], axis=-1)
  np.testing.assert_allclose(first[3]['log_total'], totals_T, rtol=1e-5)
  done = tmp_path / 'done.json'
  done.write_text(json.dumps(json.loads(done.read_text()) | {'done': 4}))
  again = with_vectors(target, tokenizer.num_tokens, some, tmp_path, 4)
  np.testing.assert_array_equal(again[5]['hidden'], first[5]['hidden'])
  other = with_vectors(target, tokenizer.num_tokens, some[::-1], tmp_path, 4)
  np.testing.assert_array_equal(other[0]['tokens'], some[-1]['tokens'])
  assert json.loads(done.read_text())['done'] == len(some)


def test_vectors_are_of_every_parameter():
  """Another number anywhere in the target makes others of them; the same target, loaded again, does not."""
  section = ConfigDict({'source': 'random:tiny_target', 'dtype': 'float32'})
  target, again = (build_model(section, 0)[0] for _ in range(2))
  some = rows(texts()[:2], ROW)
  before = kept_vectors._digest(target, 260, some)
  assert kept_vectors._digest(again, 260, some) == before
  for path, leaf in nnx.to_flat_state(nnx.state(again, nnx.Param)):
    whole = leaf.get_value()
    changed = whole.at[(-1,) * whole.ndim].add(0.5)
    nnx.update(again, nnx.from_flat_state([(path, leaf.replace(changed))]))
    assert kept_vectors._digest(again, 260, some) != before, path
    nnx.update(again, nnx.from_flat_state([(path, leaf.replace(whole))]))


def test_refusals(corpus, tmp_path):
  """One line each: a leak, a tree or a corpus that is none, what does not fit."""
  leak = 'def has close elements numbers List float threshold float bool Check if in given list of numbers'
  write_corpus(tmp_path / 'leaky', [vars(text) for text in texts()] + [
      {'id': 'bad/1', 'kind': 'chat', 'temperature': 0.0, 'prompt_length': 2, 'tokens': list(leak.encode())}])
  with pytest.raises(InputError, match="text 'bad/1' shares 13 words with HumanEval/0"):
    train(config_of('eagle', tmp_path / 'leaky'))
  for changes, message in (({'loss': {'labels': 'words'}}, "labels='words' are unknown"),
                           ({'draft': {'vocab': 300}}, 'a draft vocabulary of 300 tokens: the target has'),
                           ({'draft': {'version': 3, 'taps': (0, 1)}}, 'feature_weight must be 0'),
                           ({'draft': {'version': 3}}, r"reads some of the target's layers 0\.\.1"),
                           ({'draft': {'taps': (0,)}}, 'others read none'),
                           ({'draft': {'version': 3, 'taps': (1, 2)}}, r'draft\.taps=\(1, 2\)')):
    config = config_of('eagle', corpus)
    with config.unlocked():
      config.update(changes)
    with pytest.raises(InputError, match=message):
      train(config)
  config = config_of('eagle', corpus)
  with config.unlocked():
    config.update({'draft': {'version': 3, 'taps': (0, 1)}, 'loss': {'feature_weight': 0.0}})
  with pytest.raises(InputError, match='set it to False'):
    train(config)


WRONG = {
    'draft.num_layers': 0, 'draft.start': 'nowhere', 'draft.vocab': -1, 'draft.levels': 0, 'draft.dtype': 'int8',
    'draft.version': 2, 'draft.taps': (7,), 'draft.num_heads': 0, 'loss.token_loss': 'foo', 'loss.labels': 'words',
    'loss.inputs': 'words', 'loss.steps': 0, 'loss.token_weight': -1.0, 'loss.feature_weight': float('nan'),
    'loss.noise': -0.1, 'loss.unroll_from': 10**6, 'loss.decay': 1.5, 'loss.roots': -1, 'data.corpus': 'nowhere',
    'data.row_tokens': 1, 'data.learn': 'words'}
EITHER = {'draft.borrows_head', 'data.keep_vectors'}


@pytest.mark.parametrize('kind', CONFIGS)
def test_a_wrong_field_is_refused(kind, corpus, monkeypatch):
  """Each of loss, draft and data, in one line that names it, before anything is trained."""
  base = config_of(kind, corpus)
  target = build_model(base.target, 0)
  monkeypatch.setattr(draft_training, 'build_model', lambda *_, **__: target)
  monkeypatch.setattr(draft_training, 'check_clean', lambda texts: None)
  fields = [f'{section}.{name}' for section in ('loss', 'draft', 'data') for name in base[section]]
  assert set(fields) <= set(WRONG) | EITHER
  for field in fields:
    if field in WRONG:
      config = config_of(kind, corpus)
      config.update_from_flattened_dict({field: WRONG[field]})
      with pytest.raises(InputError) as caught:
        draft_training.recipe(draft_training.MAKERS[config.train.objective], config)
      assert '\n' not in str(caught.value)
      said = {'draft.vocab': 'draft vocabulary', 'data.corpus': 'nowhere'}.get(field, field.partition('.')[2])
      assert said in str(caught.value)


def test_long_texts_are_not_held_out(corpus, capsys):
  """A text that lost its beginning is trained on, and said; what is measured is whole."""
  config = config_of('medusa', corpus)
  lengths = sorted(len(text.tokens) for text in texts() if text.held_out)
  config.data.row_tokens = lengths[0]
  draft_training.recipe(draft_training.medusa, config)
  told = [sum(len(text.tokens) > lengths[0] for text in texts() if text.held_out is part) for part in (False, True)]
  assert f'={lengths[0]}: {told[0]} texts, trained on without their beginning, and {told[1]} held out' in (
      capsys.readouterr().err)
  config.data.row_tokens = lengths[0] - 1
  with pytest.raises(InputError, match=r'0 held out that fit into data\.row_tokens'):
    draft_training.recipe(draft_training.medusa, config)


def test_a_corpus_of_another_target(corpus, tmp_path):
  (corpus / 'about.json').write_text(json.dumps({'target': {'source': 'embedded'}}))
  with pytest.raises(InputError, match=r"holds answers of target\.source='embedded', not 'random:tiny_target'"):
    draft_training.recipe(draft_training.medusa, config_of('medusa', corpus))
  write_corpus(tmp_path / 'large', [{**vars(text), 'tokens': [*text.tokens, 9999]} for text in texts()])
  with pytest.raises(InputError, match='has the token 9999, and the target'):
    draft_training.recipe(draft_training.medusa, config_of('medusa', tmp_path / 'large'))


def test_one_process_trains_drafts(corpus, monkeypatch):
  monkeypatch.setattr(draft_training.distributed, 'joined', lambda: True)
  with pytest.raises(InputError, match='drafts are trained in one process'):
    draft_training.recipe(draft_training.medusa, config_of('medusa', corpus))


def test_a_target_with_an_encoder(corpus):
  config = config_of('medusa', corpus)
  config.target.source = 'random:tiny_encdec_target'
  with pytest.raises(InputError, match='has an encoder'):
    draft_training.recipe(draft_training.medusa, config)


def test_trees_in_files(tmp_path):
  """As a name, or as what an override makes of one."""
  path = tmp_path / 'tree.json'
  path.write_text('{"tree": [[0], [0, 0], [1]]}')
  expected = TreeSpec.from_paths([(0,), (1,), (0, 0)])
  assert tree_of(str(path)) == tree_of((str(path),)) == expected
  for content in ('{"tree": []}', '[[0]]', '{"tree": [["a"]]}', '{"tree": 3}'):
    path.write_text(content)
    with pytest.raises(InputError, match="holds no 'tree' of paths"):
      tree_of(str(path))
  with pytest.raises(InputError, match=r'name a file that experiments\.plan_tree wrote'):
    tree_of(str(tmp_path / 'none.json'))
