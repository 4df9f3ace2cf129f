"""Objectives of drafts: what is trained is what the loop runs, packed rows are texts of their own, masks."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from launch.corpus import Text, rows
from models.config import EagleConfig, MedusaConfig
from models.decoder import Decoder
from models.eagle import EagleHead, EagleWeights
from models.heads import MedusaHeads
from models.sequence import stack
from specdec.drafters import Eagle, Medusa, MedusaParams, Model, ReducedModel
from specdec.engine import Engine, Params, context_of
from specdec.training.acceptance import measured_ranks, simulated_tokens_per_pass
from specdec.training.config import TrainConfig
from specdec.training.distill import DistillObjective
from specdec.training.eagle import EagleObjective, unroll
from specdec.training.frozen import Frozen, observe, over_rows, rows_of_head, split
from specdec.training.guesses import counted
from specdec.training.medusa import BACKBONE, HEADS, JointObjective, MedusaObjective, learning_rates
from specdec.training.roots import all_places, roots_of
from specdec.training.trainer import Trainer
from specdec.tree import TreeSpec
from specdec.warp import Sampling
from tests.toys import CONFIG, PROMPTS, VOCAB, decode, engine, greedy_text, random_toy, request, target

NEW, DEPTH, WIDTH = 40, 3, 96
CHAIN = TreeSpec.chain(DEPTH)
TREE = TreeSpec.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
LAYER = dataclasses.replace(CONFIG, num_layers=1)
HEADS_OF = {'eagle': EagleConfig(LAYER, fc_bias=True, draft_vocab=48),
            'eagle 3': EagleConfig(LAYER, version=3, num_taps=2, draft_vocab=48),
            'medusa': MedusaConfig(DEPTH, CONFIG.width, VOCAB, own_head=False, draft_vocab=48),
            'medusa, own': MedusaConfig(DEPTH, CONFIG.width, VOCAB, num_layers=2)}
KEY = jax.random.key(0)


@functools.cache
def tapped() -> Decoder:
  return random_toy(dataclasses.replace(CONFIG, taps=(0, 1)))


def target_of(kind: str) -> Decoder:
  return tapped() if kind == 'eagle 3' else target()


def texts(temperature: float = 0.0) -> list[Text]:
  return [Text(f'toy/{i}', 'chat', temperature, len(prompt), (*prompt, *text[:NEW]))
          for i, (prompt, text) in enumerate(zip(PROMPTS, greedy_text(), strict=True))]


def batch_of(some: list[Text], length: int = WIDTH) -> dict[str, jax.Array]:
  made = rows(some, length)
  return {name: jnp.stack([row[name] for row in made]) for name in made[0]}


@functools.cache
def known_ids() -> np.ndarray:
  """48 tokens, those of the texts among them."""
  said = np.unique([token for text in texts() for token in text.tokens])
  assert len(said) < 48
  return np.sort(np.r_[said, np.setdiff1d(np.arange(VOCAB), said)][:48])


def head_of(kind: str, seed: int = 0) -> EagleHead | MedusaHeads:
  """Untrained, nothing in it zero; some of the texts' tokens cannot be drafted."""
  make = EagleHead if kind.startswith('eagle') else MedusaHeads
  head = make(HEADS_OF[kind], nnx.Rngs(seed))
  noise = np.random.default_rng(seed)
  fill = lambda x: x if x.dtype == jnp.int32 else jnp.asarray(
      noise.standard_normal(x.shape) * (1 if x.ndim == 1 else CONFIG.width ** -0.5), jnp.float32)
  head = jax.tree.map(fill, head)
  if head.draft_ids is not None:
    head.draft_ids[...] = jnp.arange(8, 56, dtype=jnp.int32)
  return head


def setting(kind: str, head: EagleHead | MedusaHeads, **changes):
  """Objective, what is trained, and what is frozen."""
  graph, trainable, rest = split(head)
  make = EagleObjective if kind.startswith('eagle') else MedusaObjective
  if kind == 'eagle 3':
    changes = {'feature_weight': 0.0} | changes
  return make(graph, VOCAB, **changes), trainable, Frozen(target_of(kind), rest)


# Alignment


@pytest.mark.parametrize('kind', ['eagle', pytest.param('eagle 3', marks=pytest.mark.slow)])
def test_unrolled_steps_are_the_depths_of_a_draft(kind):
  """Faults 38, 39 and 40: given the same tokens, the laws of unrolled step s are those that the drafter draws from at
  depth s, whichever row of a batch or place in a packed row the text is in."""
  weights = EagleWeights.create(head_of(kind), target_of(kind))
  drafter = Eagle(VOCAB, CHAIN, 'without', HEADS_OF[kind].version)
  its, wanted = engine(drafter, DEPTH), request(5, Sampling.create(1.0), prompts=PROMPTS[1:], seeds=(3, 4))
  _, state = decode(its, Params(target_of(kind), weights), wanted)
  state = state.replace(reason_B=jnp.zeros_like(state.reason_B),
                        limits=state.limits.replace(max_length_B=state.length_B + NEW))
  draft, _ = jax.jit(lambda weights, state: drafter.propose(
      weights, state.draft_state, context_of(its, state), DEPTH))(weights, state)
  row = int(np.argmax(state.draft_state.count_B))  # one that was in the last step
  length = int(state.length_B[row])
  tokens = (*np.asarray(state.tokens_BL)[row, :length].tolist(), *np.asarray(draft.tokens_BM)[row].tolist(), 0)
  batch = batch_of([Text('other', 'chat', 0.0, 3, tuple(range(20, 33))), Text('it', 'chat', 0.0, length, tokens)])
  place = int(np.flatnonzero(batch['segments'][0] == 2)[0]) + length - 2  # the last pair of the text

  @jax.jit
  def laws(weights):
    seen = observe(target_of(kind), batch, VOCAB)
    features_BTF = seen.hidden_BTD if seen.taps_BTF is None else seen.taps_BTF
    return [jax.nn.softmax(weights.logits(guess_BTD)[0, place]) for guess_BTD in
            unroll(weights, batch, features_BTF, DEPTH, all_places(batch['tokens']))]

  ids = np.asarray(weights.head.draft_ids[...])
  for depth, law_U in enumerate(laws(weights)):
    np.testing.assert_allclose(draft.probs_BMV[row, depth, ids], law_U, atol=2e-6)
    assert np.delete(draft.probs_BMV[row, depth], ids).sum() == 0


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['eagle', 'medusa'])
def test_ranks_are_those_of_the_drafter(kind):
  """Of a head that chooses wrongly and rightly, and cannot say all tokens: simulated steps are the loop's."""
  head = half_trained(kind)
  objective, trainable, frozen = setting(kind, head)
  measure = measured_ranks(objective, frozen, rows(texts(), WIDTH), 1, DEPTH)
  for tree in (CHAIN, TREE):
    result, _ = decode(loop(kind, tree), Params(target(), params_of(kind, head)), request(NEW))
    assert result.tokens == [text[:NEW] for text in greedy_text()]
    assert 0.1 < result.total.mean_accepted < 0.9 * DEPTH
    first = sum(len(prompt) == 1 for prompt in PROMPTS)  # a text of one token is decoded plainly for one step
    tokens, passes = result.total.emitted - first, result.total.passes - first
    assert simulated_tokens_per_pass(tree, measure(trainable)) == pytest.approx(tokens / passes)


def loop(kind: str, tree: TreeSpec) -> Engine:
  drafter = Eagle(VOCAB, tree) if kind == 'eagle' else Medusa(tree, VOCAB)
  rule = 'rejection' if kind == 'eagle' and tree == CHAIN else 'multiround'
  return engine(drafter, tree.num_nodes, rule)


def params_of(kind: str, head: EagleHead | MedusaHeads) -> EagleWeights | MedusaParams:
  if kind == 'eagle':
    return EagleWeights.create(head, target())
  return MedusaParams(head, None if head.config.own_head else target().lm_head[head.draft_ids[...]])


@functools.cache
def half_trained(kind: str) -> EagleHead | MedusaHeads:
  head = head_of(kind)
  head.draft_ids[...] = jnp.asarray(np.setdiff1d(np.arange(VOCAB), known_ids()[::4])[:48], jnp.int32)
  return trained(kind, head, 25)


def trained(kind: str, head: EagleHead | MedusaHeads, updates: int, **changes) -> EagleHead | MedusaHeads:
  """By the trainer, two micro-batches at a time."""
  objective, trainable, frozen = setting(kind, head, **changes)
  config = TrainConfig(steps=updates, batch=2, accumulate=2, learning_rate=1e-2, log_every=updates)
  some = rows([dataclasses.replace(text, id=f'{text.id}/{copy}') for copy in range(2) for text in texts()], WIDTH)
  trainable = jax.tree.map(jnp.copy, trainable)
  trainable = Trainer(objective, optax.adam(1e-2), trainable, frozen, some, config, None).run()
  return nnx.merge(objective.graph, trainable, frozen.rest)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['eagle', 'medusa, own'])
def test_overfitted_heads_are_accepted(kind):
  """Fault 41: what the trainer learns by heart the loop accepts, and the log says so before."""
  head = head_of(kind)
  changes = {'labels': 'text'}
  if kind == 'eagle':
    head.draft_ids[...] = jnp.asarray(known_ids(), jnp.int32)
    changes |= {'steps': DEPTH, 'noise': 0.02, 'feature_weight': 0.0}
  head = trained(kind, head, 150 if kind == 'eagle' else 300, **changes)
  result, _ = decode(loop(kind, CHAIN), Params(target(), params_of(kind, head)), request(NEW - DEPTH))
  assert result.total.mean_accepted >= 0.9 * DEPTH
  objective, trainable, frozen = setting(kind, head, **changes)
  total, sums = jax.jit(objective.loss)(trainable, frozen, batch_of(texts()), KEY)
  assert total / sums['count'] < 0.1
  assert sums['accepted'] / sums['count'] >= 0.85 * DEPTH  # near the ends of texts less is asked


# Rows


@pytest.mark.parametrize('kind', [pytest.param('eagle', marks=pytest.mark.slow), 'eagle 3', 'medusa', 'draft'])
def test_packed_rows_are_texts_of_their_own(kind):
  """Loss, sums and ranks of texts in one row are those of the texts in rows of their own, and rows in which nothing
  counts (fault 42) add nothing, nor does what lies in the padding."""
  objective, trainable, frozen = draft_setting() if kind == 'draft' else setting(kind, head_of(kind))
  packed, apart = batch_of(texts(), 180), [batch_of([text], 180) for text in texts()]
  assert packed['tokens'].shape[0] == 1
  loss = jax.jit(objective.loss)
  total, sums = loss(trainable, frozen, packed, KEY)
  parts = [loss(trainable, frozen, batch, KEY) for batch in apart]
  np.testing.assert_allclose(total, sum(part for part, _ in parts), rtol=1e-5)
  for name, value in sums.items():
    np.testing.assert_allclose(value, sum(part[name] for _, part in parts), rtol=1e-5)
  assert sums['count'] == sum(len(text.tokens) - max(text.prompt_length, 2 if kind != 'draft' else 1)
                              for text in texts())
  masked = {name: jnp.concatenate([x, x]) for name, x in packed.items()}
  masked['trains'] = masked['trains'].at[1].set(False)
  masked['tokens'] = jnp.where(masked['segments'] == 0, VOCAB - 1, masked['tokens'])
  np.testing.assert_allclose(loss(trainable, frozen, masked, KEY)[0], total, rtol=1e-6)


@pytest.mark.parametrize('kind', ['eagle', 'medusa', 'draft'])
def test_nothing_counts(kind):
  """Fault 42: loss 0, gradients 0."""
  objective, trainable, frozen = draft_setting() if kind == 'draft' else setting(kind, head_of(kind))
  batch = batch_of(texts())
  batch['trains'] = jnp.zeros_like(batch['trains'])
  (total, sums), grads = jax.jit(jax.value_and_grad(objective.loss, has_aux=True))(trainable, frozen, batch, KEY)
  assert total == 0 and sums['count'] == 0
  assert all((leaf == 0).all() for leaf in jax.tree.leaves(grads))


def test_kept_vectors():
  """Rows that hold the target's vectors and totals give the same loss, without a pass."""
  objective, trainable, frozen = setting('eagle', head_of('eagle'))
  batch = batch_of(texts())
  seen = jax.jit(lambda target, batch: observe(target, batch, VOCAB))(frozen.target, batch)
  np.testing.assert_allclose(
      seen.log_total_BT, jax.nn.logsumexp(over_rows(frozen.target, batch).logits_BRV, axis=-1), rtol=1e-6)
  expected, _ = objective.loss(trainable, frozen, batch, KEY)
  kept = batch | {'hidden': seen.hidden_BTD, 'log_total': seen.log_total_BT}
  actual, _ = objective.loss(trainable, frozen, kept, KEY)
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize('kind', [pytest.param('eagle', marks=pytest.mark.slow), 'medusa'])
def test_some_roots(kind):
  """So many pairs of each row, of those that count; with room for all of them it is the loss of all."""
  batch = batch_of(texts())
  roots_BN = np.asarray(roots_of(batch, 30, KEY))
  assert roots_BN.shape == (2, 30) and (np.diff(roots_BN) > 0).all()
  counts_BT = np.asarray(counted(batch, 2))
  for roots_N, counts_T in zip(roots_BN, counts_BT, strict=True):
    assert counts_T[roots_N].all()
  whole, trainable, frozen = setting(kind, head_of(kind))
  most = int(counts_BT.sum(axis=1).max())
  total, sums = jax.jit(whole.loss)(trainable, frozen, batch, KEY)
  some, its = jax.jit(dataclasses.replace(whole, roots=most).loss)(trainable, frozen, batch, KEY)
  np.testing.assert_allclose(some, total, rtol=1e-5)
  jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), its, sums)
  _, its = jax.jit(dataclasses.replace(whole, roots=30).loss)(trainable, frozen, batch, KEY)
  assert its['count'] == 60


def test_noise():
  """U(-.1, .1) on what is read, another draw for another key, none without a width."""
  noisy, trainable, frozen = setting('eagle', head_of('eagle'), noise=0.1)
  quiet, batch = dataclasses.replace(noisy, noise=0.0), batch_of(texts())
  total = lambda objective, seed: float(objective.loss(trainable, frozen, batch, jax.random.key(seed))[0])
  assert total(quiet, 0) == total(quiet, 1)
  assert len({total(noisy, 0), total(noisy, 1), total(quiet, 0)}) == 3


# Distillation and joint training


def draft_setting(num_layers: int = 1, ids: np.ndarray | None = None, borrows_head: bool = False):
  """A draft of the target's first layers; the embedding is the target's."""
  ids = np.arange(8, 56) if ids is None else ids
  draft = target().first_layers(num_layers).with_head(rows_of_head(target(), jnp.asarray(ids), VOCAB))
  borrowed = ('embed', 'head') if borrows_head else ('embed',)
  graph, trainable, rest = split(draft, lambda path, _: path[0] not in borrowed)
  return DistillObjective(graph, VOCAB, DEPTH), trainable, Frozen(target(), rest, jnp.asarray(ids))


def test_a_target_is_its_own_best_draft():
  """All overlap, no KL, every guess right: the draft reads and speaks as the target does."""
  objective, trainable, frozen = draft_setting(CONFIG.num_layers, np.arange(VOCAB))
  total, sums = objective.loss(trainable, frozen, batch_of(texts()), KEY)
  np.testing.assert_allclose(total / sums['count'], 0, atol=1e-5)
  np.testing.assert_allclose(sums['overlap'] / sums['count'], 1, atol=1e-5)
  assert sums['right_1'] == sums['count']


def test_a_trained_draft_is_accepted():
  """The loop accepts what was measured; the target and what is borrowed stay as they are."""
  objective, trainable, frozen = draft_setting(ids=known_ids(), borrows_head=True)
  before = jax.device_get((frozen, trainable))
  config = TrainConfig(steps=60, batch=2, learning_rate=3e-3)
  some = rows([dataclasses.replace(text, id=f'{text.id}/{copy}') for copy in range(2) for text in texts()], WIDTH)
  learnt = Trainer(objective, optax.adam(3e-3), jax.tree.map(jnp.copy, trainable), frozen, some, config, None).run()
  jax.tree.map(np.testing.assert_array_equal, jax.device_get((frozen, trainable)), before)
  draft = nnx.merge(objective.graph, learnt, frozen.rest)
  result, _ = decode(engine(Model(VOCAB), DEPTH), Params(target(), ReducedModel(draft, frozen.ids_U)), request(NEW))
  measured = measured_ranks(objective, frozen, rows(texts(), WIDTH), 2, DEPTH)(learnt)
  assert simulated_tokens_per_pass(CHAIN, measured) == pytest.approx(result.total.emitted / result.total.passes)
  assert result.total.mean_accepted > 0.6 * DEPTH


def test_joint_training_moves_the_target_and_the_heads():
  """Medusa-2: the target's own loss starts at 0, both parts get gradients, the heads a rate of their own."""
  heads, trainable, frozen = setting('medusa', head_of('medusa'))
  joint, batch = JointObjective(heads, labels='law', weight=0.2), batch_of(texts())
  trained, frozen = {HEADS: trainable, BACKBONE: stack(target())}, frozen.replace(target=stack(target()))
  (total, sums), grads = jax.jit(jax.value_and_grad(joint.loss, has_aux=True))(trained, frozen, batch, KEY)
  alone, _ = heads.loss(trainable, frozen, batch, KEY)
  np.testing.assert_allclose(sums['own'], 0, atol=1e-3)
  np.testing.assert_allclose(total, 0.2 * alone, rtol=1e-3)
  assert all(optax.global_norm(part) > 0 for part in grads.values())
  optimizer = learning_rates(lambda step: 0.01, 4.0, optax.sgd)
  updates, _ = optimizer.update(grads, optimizer.init(trained), trained)
  for name, rate in ((HEADS, 0.04), (BACKBONE, 0.01)):
    jax.tree.map(lambda update, grad, rate=rate: np.testing.assert_allclose(update, -rate * grad, rtol=1e-5),
                 updates[name], grads[name])


@pytest.mark.parametrize('inputs', ['token', 'feature'])
def test_a_part_that_is_not_read_learns_nothing(inputs):
  """Its half of the projection gets no gradient, so that the file of a head that began without it has zeros there."""
  objective, trainable, frozen = setting('eagle', head_of('eagle'), inputs=inputs, steps=2)
  batch = batch_of(texts(), 40)
  grads = jax.grad(lambda trainable: objective.loss(trainable, frozen, batch, jax.random.key(0))[0])(trainable)
  token_DD, feature_DD = jnp.split(grads['fc'].get_value(), 2, axis=1)
  read, unread = (token_DD, feature_DD) if inputs == 'token' else (feature_DD, token_DD)
  assert jnp.any(read != 0) and not jnp.any(unread)


def test_unrolling_begins_at_its_step():
  """Before it loss, gradient and what is counted are those of one step; from it on, of all."""
  head, batch, key = head_of('eagle'), batch_of(texts(), 40), jax.random.key(0)
  objective, trainable, frozen = setting('eagle', head, steps=3, unroll_from=5)

  def learnt(objective, step=None):
    at = lambda trainable, step: (objective.at_step(step) if step is not None else objective).loss(
        trainable, frozen, batch, key)
    return jax.jit(jax.value_and_grad(at, has_aux=True))(trainable, step)

  for step, steps in ((4, 1), (5, 3)):
    (loss, sums), grads = learnt(objective, jnp.asarray(step))
    (same, its), theirs = learnt(setting('eagle', head, steps=steps)[0])
    assert float(loss) == pytest.approx(float(same), rel=1e-5)
    for name, value in its.items():
      assert float(sums[name]) == pytest.approx(float(value), rel=1e-5), name
    for mine, other in zip(jax.tree.leaves(grads), jax.tree.leaves(theirs), strict=True):
      np.testing.assert_allclose(mine, other, atol=1e-5 * float(jnp.abs(other).max() + 1))
