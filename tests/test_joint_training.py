"""Medusa-2: a target on disk and its heads are trained together, saved as a pair, and decode as a pair."""

import dataclasses
import functools
import json
from pathlib import Path

from flax import nnx
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import optax
import pytest

from configs import tiny, train_medusa
from launch import draft_training
from launch.bpe import SMALLEST, train_tokenizer
from launch.build import TINY
from launch.mesh import make_mesh
from launch.prompts import Prompt
from launch.session import Session
from launch.train import run, train
from models.config import DecoderConfig
from models.decoder import Decoder
from models.errors import InputError
from models.loading import load_decoder, orbax
from models.random_weights import random_decoder
from models.sequence import stack, unstack
from specdec.training.checkpoints import Checkpoints
from specdec.training.log import read_metrics
from specdec.training.lora import new_adapter
from specdec.training.medusa import BACKBONE, HEADS, learning_rates
from specdec.training.schedule import learning_rate
from specdec.training.step import first_state
from tests.test_draft_recipes import interrupted, trained
from tests.toys import forward

VARIANTS = ('medusa2', 'self_distilled')
ROW, STEPS = 48, 6
TOKENS = jnp.arange(1, 25).reshape(2, 12)


@pytest.fixture(scope='module')
def toy(tmp_path_factory) -> Path:
  """DIR/target, a model with a tokenizer of bytes, and DIR/corpus, its greedy answers."""
  directory = tmp_path_factory.mktemp('toy')
  orbax.prepare(directory / 'target')
  train_tokenizer(['some text'], SMALLEST, directory / 'target' / orbax.TOKENIZER)
  orbax.save_decoder(directory / 'target', random_decoder(DecoderConfig.tiny(**TINY), 0))
  config = decoding(directory / 'target', {'name': 'none'})
  with config.unlocked():
    config.engine.batch, config.sampling.max_new_tokens = 16, 20
  session = Session.from_config(config)
  prompts = [Prompt(f'text/{number}', f'{number} and so', False) for number in range(64)]
  made = []
  for prompt, completion in zip(prompts, session.generate(prompts), strict=True):
    ids = session.encode(prompt)
    made.append({'id': prompt.id, 'kind': 'chat', 'temperature': 0.0, 'prompt_length': len(ids),
                 'tokens': [*ids, *completion.token_ids]})
  (directory / 'corpus').mkdir()
  (directory / 'corpus' / 'unit-00000-of-00001.json').write_text(json.dumps({'texts': made}))
  return directory


def decoding(target: Path, drafter: dict) -> ConfigDict:
  config = tiny.get_config('none')
  with config.unlocked():
    config.target.source, config.drafter = str(target), drafter
  return config


def config_of(variant: str, toy: Path, directory: Path, **train_changes) -> ConfigDict:
  config = train_medusa.get_config(variant)
  with config.unlocked():
    config.target.source, config.draft.vocab, config.draft.dtype = str(toy / 'target'), 200, 'float32'
    config.data.update({'corpus': str(toy / 'corpus'), 'row_tokens': ROW, 'keep_vectors': False})
    config.loss.roots, config.backbone.heads_first = 30, 2
    if 'adapter' in config.backbone:
      config.backbone.adapter.rank = 4
    config.draft.num_heads = 2
    config.train.update({'directory': str(directory), 'steps': STEPS, 'batch': 4, 'accumulate': 2, 'warmup_steps': 1,
                         'learning_rate': 2e-3, 'log_every': 1, 'eval_every': 2, 'save_every': 2,
                         'keep': 9} | train_changes)
  return config


def made(config: ConfigDict) -> draft_training.Recipe:
  return draft_training.recipe(draft_training.medusa2, config)


@functools.cache
def text_of(target: Path, drafter: Path | None) -> list[int]:
  section = {'name': 'none'}
  if drafter is not None:
    section = {'name': 'medusa', 'source': str(drafter), 'dtype': 'float32', 'tree': ((0,), (1,), (0, 0)),
               'num_heads': 2, 'own_head': False}
  config = decoding(target, section)
  with config.unlocked():
    if drafter is not None:
      config.engine.gamma, config.accept.rule = 3, 'multiround'
  return Session.from_config(config).generate([Prompt('it', '7 and so', False)])[0].token_ids


def parameters(model: Decoder) -> dict[str, np.ndarray]:
  return {'.'.join(map(str, path)): np.asarray(leaf.get_value())
          for path, leaf in nnx.to_flat_state(nnx.state(model))}


@pytest.fixture(scope='module', params=[
    pytest.param(variant, marks=[pytest.mark.slow] * (variant == 'medusa2')) for variant in VARIANTS])
def pair(request, toy, tmp_path_factory) -> tuple[ConfigDict, dict]:
  """A run that has ended, and what the command says of it."""
  config = config_of(request.param, toy, tmp_path_factory.mktemp(request.param))
  return config, train(config)


@pytest.mark.slow
def test_from_corpus_to_pair(pair, toy):
  """The loss of the heads falls, the log has what acceptance will be, and configs that decode load what comes out; the
  text is that of plain decoding of the changed target."""
  config, facts = pair
  losses = [row['held_out_loss'] - row['held_out_own'] for row in read_metrics(config.train.directory)
            if 'held_out_loss' in row]
  assert losses[-1] < losses[0] * 0.99 and 1 <= facts['held_out_tokens_per_pass'] <= 3
  assert {'own', 'held_out_own', 'accepted', 'right_1', 'kept_2'} <= facts.keys()
  heads, target = Path(facts['model']), Path(facts['model']) / 'target'
  assert text_of(target, heads) == text_of(target, None)
  assert train(config) == facts


def test_what_is_trained(pair, toy):
  """All of the target, or what the adapter is added to: then the rest is as it was, bit for bit."""
  config, facts = pair
  before, after = (parameters(load_decoder(path)[0]) for path in (toy / 'target', Path(facts['model']) / 'target'))
  moved = {name.rpartition('.')[2] for name, value in before.items() if not np.array_equal(after[name], value)}
  every = {name.rpartition('.')[2] for name in before}
  assert moved == ({'qkv', 'out', 'up', 'down', 'head'} if 'adapter' in config.backbone else every)


def test_what_is_saved_is_what_was_trained(pair, toy):
  """Within rounding what a training pass says, in a checkpoint with the tokenizer that the target had."""
  config, facts = pair
  recipe = made(config)
  before = parameters(load_decoder(toy / 'target')[0])
  if recipe.frozen.target is not None:
    jax.tree.map(np.testing.assert_array_equal, parameters(unstack(recipe.frozen.target)), before)
  learnt = run(recipe, config.train.directory)  # nothing is left to do
  says = jax.jit(lambda part: _logits(recipe.objective.target(part, recipe.frozen)))(learnt[BACKBONE])
  read, size = load_decoder(Path(facts['model']) / 'target')[0], np.abs(says).max()
  np.testing.assert_allclose(jax.jit(_logits)(stack(read)), says, rtol=0, atol=1e-6 * size)
  np.testing.assert_allclose(forward(read, TOKENS), says, rtol=0, atol=5e-6 * size)
  tokenizer = Path(orbax.TOKENIZER) / 'tokenizer.json'
  ours, theirs = (path / tokenizer for path in (Path(facts['model']) / 'target', toy / 'target'))
  assert ours.read_bytes() == theirs.read_bytes()
  assert json.loads((Path(facts['model']) / 'config.json').read_text())['base_model_name_or_path'] == 'target'


def _logits(backbone):
  return backbone.logits(backbone(TOKENS).hidden_BTD)


def test_heads_first(pair):
  """In the first stage the heads learn, and no weight of the target moves."""
  config, _ = pair
  recipe = made(config)
  checkpoints = Checkpoints(config.train.directory, config.train.keep)
  assert config.backbone.heads_first == checkpoints.steps()[0] == 2
  like = first_state(recipe.objective, recipe.optimizer, recipe.config, recipe.trainable, recipe.frozen,
                     first_batch(recipe))
  after = checkpoints.load_state(2, like).trainable
  same = jax.tree.map(np.array_equal, after, recipe.trainable)
  assert all(jax.tree.leaves(same[BACKBONE])) and not any(jax.tree.leaves(same[HEADS]))


@pytest.mark.slow
def test_interrupted(pair, tmp_path, monkeypatch):
  """Ended after four steps and started again: the same log and the same parameters, bit for bit."""
  whole, _ = pair
  config = whole.copy_and_resolve_references()
  config.train.directory = str(tmp_path / 'parts')
  with pytest.raises(InterruptedError):
    interrupted(config, monkeypatch)
  jax.tree.map(np.testing.assert_array_equal, trained(config), trained(whole))
  curve = lambda config: [{key: value for key, value in row.items() if key != 'tokens_per_second'}
                          for row in read_metrics(config.train.directory)]
  assert curve(config) == curve(whole)


def first_batch(recipe) -> dict[str, np.ndarray]:
  return {name: np.stack([row[name] for row in recipe.rows[:4]]) for name in recipe.rows[0]}


def test_losses(toy, tmp_path):
  """L_LM is a divergence that begins at 0, or the text's cross entropy; λ_0 of the heads' own loss is added."""
  for variant in VARIANTS:
    recipe = made(config_of(variant, toy, tmp_path))
    joint, batch, key = recipe.objective, first_batch(recipe), jax.random.key(0)
    target = load_decoder(toy / 'target', attention_block=None)[0]
    total, sums = jax.jit(joint.loss)(recipe.trainable, recipe.frozen, batch, key)
    alone, its = jax.jit(joint.heads.loss)(
        recipe.trainable[HEADS], dataclasses.replace(recipe.frozen, target=target), batch, key)
    np.testing.assert_allclose(total - sums['own'], joint.weight * alone, rtol=1e-3, atol=1e-3)
    assert sums['count'] == its['count'] > 0
    if variant == 'self_distilled':
      np.testing.assert_allclose(sums['own'] / sums['count'], 0, atol=1e-5)
      continue
    whole = dataclasses.replace(joint, heads=dataclasses.replace(joint.heads, roots=0))
    own, count = 0.0, 0
    for row in recipe.rows[:4]:
      for segment in range(1, row['segments'].max() + 1):
        place_T = np.flatnonzero(row['segments'] == segment)
        logits_TV = forward(target, row['tokens'][None, place_T])[0, :, :SMALLEST]
        for i in range(2, len(place_T)):  # the first two have no vector before them whose heads guess them
          if row['trains'][place_T[i]]:
            own -= float(jax.nn.log_softmax(logits_TV[i - 1])[row['tokens'][place_T[i]]])
            count += 1
    sums = jax.jit(whole.loss)(recipe.trainable, recipe.frozen, batch, key)[1]
    np.testing.assert_allclose(sums['own'], own, rtol=1e-4)
    assert sums['count'] == count


def test_rates(toy, tmp_path):
  """Four times the target's for the heads, from the first step on; the target rests, and then warms up."""
  recipe = made(config_of('medusa2', toy, tmp_path, steps=20, warmup_steps=3))
  schedule = recipe.config
  optimizer = learning_rates(learning_rate(schedule), 4.0, optax.sgd, heads_first=5, warmup=schedule.warmup_steps)
  ones = jax.tree.map(jnp.ones_like, recipe.trainable)
  state, found = optimizer.init(ones), []
  for _ in range(12):
    updates, state = optimizer.update(ones, state, ones)
    heads, target = (jax.tree.leaves(updates[name]) for name in (HEADS, BACKBONE))
    found.append((-float(heads[0].ravel()[0]), -float(target[0].ravel()[0])))
  rates = np.array([learning_rate(schedule)(step) for step in range(12)])
  np.testing.assert_allclose([heads for heads, _ in found], 4 * rates, rtol=1e-5)
  share = np.clip((np.arange(12) - 4) / 4, 0, 1)
  np.testing.assert_allclose([target for _, target in found], share * rates, rtol=1e-5)
  assert share[4] == 0 < share[5] < share[7] < share[8] == 1


def test_the_whole_gradient_is_clipped(toy, tmp_path):
  """Heads and target together, not each for itself: the moments after a step are of a gradient as long as clip_norm."""
  optimizer = made(config_of('self_distilled', toy, tmp_path, clip_norm=0.5)).optimizer
  grads = {HEADS: jnp.full(4, 30.0), BACKBONE: jnp.full(3, 40.0)}
  _, state = optimizer.update(grads, optimizer.init(grads), grads)
  moments = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state) if '.mu' in jax.tree_util.keystr(path)]
  assert len(moments) == 2
  np.testing.assert_allclose(optax.global_norm(moments), 0.1 * 0.5, rtol=1e-5)


def test_ramp(toy, tmp_path):
  """λ_0 sin(π/2 · share of the steps), whole at the end and in held-out losses."""
  recipe = made(config_of('self_distilled', toy, tmp_path, steps=10))
  joint = recipe.objective
  weights = [float(joint.at_step(jnp.int32(step)).weight) for step in range(10)]
  np.testing.assert_allclose(weights, 0.01 * np.sin(np.pi / 2 * np.arange(1, 11) / 10), rtol=1e-5)
  assert joint.weight == 0.01
  plain = made(config_of('medusa2', toy, tmp_path)).objective
  assert plain.at_step(jnp.int32(3)) is plain


OTHER_VALUES = {'weight': 0.5, 'ramp': False, 'heads_rate': 2.0, 'heads_first': 0, 'remat': True, 'dtype': 'bfloat16',
                'labels': 'text', 'adapter.rank': 2, 'adapter.alpha': 4.0}


def observe(config: ConfigDict) -> str:
  """All that a run depends on, as text."""
  recipe = made(config)
  ones = {name: jnp.ones(1) for name in recipe.trainable}
  updates, _ = recipe.optimizer.update(ones, recipe.optimizer.init(ones), ones)
  shapes = [leaf.shape for leaf in jax.tree.leaves(recipe.trainable)]
  saved = jax.eval_shape(recipe.save.args[0].changed, recipe.trainable)
  return repr((dataclasses.replace(recipe.objective, heads=None), updates, shapes, saved.embed.get_value().dtype))


@functools.cache
def as_it_is(toy: Path) -> str:
  return observe(config_of('self_distilled', toy, toy))


@pytest.mark.parametrize('field', OTHER_VALUES)
def test_each_field_is_read(field, toy, tmp_path):
  """Fault 66."""
  config = config_of('self_distilled', toy, tmp_path)
  before = as_it_is(toy)
  config.backbone.update_from_flattened_dict({field: OTHER_VALUES[field]})
  assert observe(config) != before


def test_every_field_is_named():
  named = {'adapter.rank', 'adapter.alpha'} | set(train_medusa.get_config('self_distilled').backbone) - {'adapter'}
  assert named == set(OTHER_VALUES)


@pytest.mark.parametrize('variant, field, value, said', [
    ('medusa2', 'target.source', 'random:tiny_target', 'has no tokenizer to go with the changed target'),
    ('medusa2', 'data.keep_vectors', True, "nothing is learnt from the target's vectors here"),
    ('medusa2', 'backbone.labels', 'words', "backbone: labels='words' are unknown"),
    ('medusa2', 'draft.num_heads', 0, 'draft: num_heads=0 must be positive'),
    ('medusa2', 'loss.labels', 'words', "loss: labels='words' are unknown"),
    ('medusa2', 'backbone.heads_first', 7, r'backbone\.heads_first=7 must lie in 0\.\.train\.steps=6'),
    ('medusa2', 'backbone.dtype', 'int8', "dtype='int8' is not a floating-point type"),
    ('medusa2', 'backbone.weight', 0.0, r'backbone\.weight=0\.0 must be positive'),
    ('self_distilled', 'backbone.adapter.rank', 0, r'backbone\.adapter\.rank=0 must be positive'),
    ('self_distilled', 'backbone.adapter.alpha', -1.0, r'backbone\.adapter\.alpha=-1\.0 must be positive')])
def test_wrong_input(variant, field, value, said, toy, tmp_path):
  config = config_of(variant, toy, tmp_path)
  config.update_from_flattened_dict({field: value})
  with pytest.raises(InputError, match=said):
    train(config)


def test_no_section(toy, tmp_path):
  config = config_of('medusa2', toy, tmp_path)
  with config.unlocked():
    del config.backbone
  with pytest.raises(InputError, match='reads the section backbone'):
    train(config)


def test_an_adapter_that_is_new_leaves_the_target(toy, tmp_path):
  recipe = made(config_of('self_distilled', toy, tmp_path))
  adapter = new_adapter(recipe.frozen.target, 4, jax.random.key(0))
  model = unstack(recipe.objective.target(adapter, recipe.frozen))
  jax.tree.map(np.testing.assert_array_equal, stack(model), recipe.frozen.target)


@pytest.mark.slow
def test_on_a_mesh(pair, tmp_path):
  """Rows over two devices, or the target, its adapter and the heads: the same within rounding."""
  whole, _ = pair
  learnt = jax.device_get(trained(whole))
  for data, parts in ((2, 1), (1, 2)):
    config = whole.copy_and_resolve_references()
    config.train.directory = str(tmp_path / f'{data}x{parts}')
    with jax.set_mesh(make_mesh(data, parts, jax.devices()[:2])):
      ours = jax.device_get(trained(config))
    losses = [[row['loss'] for row in read_metrics(one.train.directory) if 'loss' in row] for one in (config, whole)]
    np.testing.assert_allclose(*losses, rtol=2e-4)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(learnt), strict=True):
      np.testing.assert_allclose(mine, other, atol=5e-4)
