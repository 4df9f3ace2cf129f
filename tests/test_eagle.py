"""EAGLE in the loop: text as without it, true features in the head's cache, laws as those of one node at a time."""

from collections.abc import Iterator
import dataclasses
import functools

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from launch.mesh import make_mesh
from models.config import EagleConfig
from models.decoder import Decoder
from models.eagle import EagleHead, EagleWeights
from models.errors import InputError
from models.loading import export_hf, load_decoder
from models.loading.eagle import load_eagle, save_eagle
from specdec.draft import TreeDraft
from specdec.drafters import Dynamic, Eagle, Empty, Hybrid, Lookup
from specdec.drafters.eagle import EagleState
from specdec.engine import Params, context_of
from specdec.state import DecodeState
from specdec.tree import TreeSpec
from specdec.warp import warp
from tests.toys import (
  CONFIG,
  PROMPTS,
  SAMPLED,
  VOCAB,
  assert_same_live_slots,
  decode,
  engine,
  greedy_text,
  random_toy,
  request,
  target,
)

NEW, DEPTH, SLOTS = 64, 4, 96
CHAIN = TreeSpec.chain(DEPTH)
SPEC = TreeSpec.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)])
LAYER = dataclasses.replace(CONFIG, num_layers=1)
VERSION_1 = EagleConfig(LAYER, fc_bias=True)
VERSION_3 = EagleConfig(LAYER, version=3, num_taps=2, draft_vocab=48)  # the toy has two layers


@functools.cache
def target_of(version: int) -> Decoder:
  """The same model; for version 3 it gives the outputs of its layers."""
  return random_toy(dataclasses.replace(CONFIG, taps=(0, 1))) if version == 3 else target()


@functools.cache
def learnt() -> tuple[np.ndarray, np.ndarray]:
  """The texts that heads learn by heart, and their lengths."""
  rows = [[*prompt, *text] for prompt, text in zip(PROMPTS, greedy_text(NEW), strict=True)]
  tokens_BT = np.zeros((len(rows), max(map(len, rows))), np.int32)
  for index, row in enumerate(rows):
    tokens_BT[index, :len(row)] = row
  return tokens_BT, np.array([len(row) for row in rows])


@jax.jit
def true_features(model: Decoder, tokens_BT: Array) -> Array:
  """[B, T, F]: of one pass over the whole text."""
  batch, width = tokens_BT.shape
  cache = model.init_cache(batch, width)
  position_BT = jnp.broadcast_to(jnp.arange(width), (batch, width))
  output = model(tokens_BT, position_BT, cache.causal_mask(width), cache)
  return output.hidden_BTD if output.taps_BTF is None else output.taps_BTF


def unrolled(weights: EagleWeights, tokens_BT: Array, features_BTF: Array) -> Array:
  """[B, P, M, U]: the logits of a chain of M drafted tokens after each of P pairs, given the text's own tokens.

  Guess s of a pair sees the true pairs up to it and the earlier guesses from it, as when drafting.
  """
  batch, pairs = tokens_BT.shape[0], tokens_BT.shape[1] - 1
  cache = weights.head.init_cache(batch, pairs * DEPTH)
  true_BPP = cache.causal_mask(pairs)[..., :pairs]
  own_BPP, none_BPP = (jnp.broadcast_to(x, true_BPP.shape) for x in (jnp.eye(pairs, dtype=bool), jnp.array(False)))
  features_BPD, logits = weights.head.fuse(features_BTF[:, :-1]), []
  for step in range(DEPTH):
    mask_BPS = jnp.concatenate([true_BPP] + [own_BPP] * step + [none_BPP] * (DEPTH - 1 - step), axis=-1)
    position_BP = jnp.broadcast_to(jnp.arange(pairs) + step, (batch, pairs))
    next_BP, start_B = jnp.roll(tokens_BT, -1 - step, axis=1)[:, :pairs], jnp.full((batch,), step * pairs)
    features_BPD, cache = weights(next_BP, features_BPD, position_BP, mask_BPS, cache.with_length(start_B))
    logits.append(weights.logits(features_BPD))
  return jnp.stack(logits, axis=2)


@functools.cache
def fitted(config: EagleConfig, steps: int) -> EagleWeights:
  """A head after so many steps of Adam on `learnt`; 120 are enough for all of it."""
  model, (tokens_BT, length_B) = target_of(config.version), learnt()
  head = EagleHead(config, nnx.Rngs(0))
  known = np.arange(VOCAB)
  if config.draft_vocab is not None:
    known = np.sort(np.r_[np.unique(tokens_BT), np.setdiff1d(known, tokens_BT)][:config.draft_vocab])
    head.draft_ids[...] = jnp.asarray(known, jnp.int32)
  pairs = tokens_BT.shape[1] - 1
  label_BPM = np.stack([np.roll(tokens_BT, -2 - step, axis=1)[:, :pairs] for step in range(DEPTH)], axis=2)
  place_BPM = np.searchsorted(known, label_BPM)
  is_known_BPM = known[np.minimum(place_BPM, len(known) - 1)] == label_BPM
  counts_BPM = is_known_BPM & (np.arange(pairs)[:, None] + 2 + np.arange(DEPTH) < length_B[:, None, None])
  graph, params, ids = nnx.split(head, nnx.Param, ...)
  optimizer = optax.adam(3e-3)

  def loss(params, model, features_BTF):
    weights = EagleWeights.create(nnx.merge(graph, params, ids), model)
    losses_BPM = optax.softmax_cross_entropy_with_integer_labels(
        unrolled(weights, jnp.asarray(tokens_BT), features_BTF), jnp.where(is_known_BPM, place_BPM, 0))
    return jnp.sum(losses_BPM, where=counts_BPM) / counts_BPM.sum()

  @jax.jit
  def train(params, model, features_BTF):
    def one_step(_, carry):
      params, state = carry
      updates, state = optimizer.update(jax.grad(loss)(params, model, features_BTF), state)
      return optax.apply_updates(params, updates), state
    return jax.lax.fori_loop(0, steps, one_step, (params, optimizer.init(params)))[0]

  params = train(params, model, true_features(model, jnp.asarray(tokens_BT)))
  return EagleWeights.create(nnx.merge(graph, params, ids), model)


def half_fitted(version: int) -> Params:
  """Right now and then, so that rows accept different numbers of tokens."""
  return Params(target_of(version), fitted(VERSION_3 if version == 3 else VERSION_1, 45))


def assert_true_features(state: DecodeState, params: Params):
  """Faults 38 and 39: the head's cache is that of one pass over the committed text with the target's features, each
  with the token after it, and what the last step added is pending with the target's features."""
  pending: EagleState = state.draft_state
  fed_B, tokens_BT = pending.cache.length_B, state.tokens_BL[:, :SLOTS]
  np.testing.assert_array_equal(fed_B + pending.count_B, state.length_B - 1)
  features_BTF = true_features(params.target, tokens_BT)
  cache = params.draft.head.init_cache(len(fed_B), SLOTS)
  position_BT = jnp.broadcast_to(jnp.arange(SLOTS - 1), (len(fed_B), SLOTS - 1))
  _, cache = params.draft(tokens_BT[:, 1:], params.draft.head.fuse(features_BTF[:, :-1]), position_BT,
                          cache.causal_mask(SLOTS - 1), cache)
  assert_same_live_slots(pending.cache, cache.with_length(fed_B))
  for row, (start, count) in enumerate(zip(fed_B, pending.count_B, strict=True)):
    expected = features_BTF[row, start:start + count]
    np.testing.assert_allclose(pending.features_BEF[row, :count], expected, atol=1e-5 * np.abs(features_BTF).max())


CASES = {
    'chain': (Eagle(VOCAB, CHAIN), 'rejection'),
    'drawn chain': (Eagle(VOCAB, CHAIN, 'without'), 'block'),
    'tree, without replacement': (Eagle(VOCAB, SPEC, 'without'), 'multiround'),
    'tree, with replacement': (Eagle(VOCAB, SPEC, 'with', version=3), 'multiround'),
    'tree, shared noise, padded': (Eagle(VOCAB, SPEC, 'without', rows=4), 'coupled'),
    'dynamic': (Eagle(VOCAB, Dynamic(3, 4, 9)), 'multiround'),
    'dynamic, cut to few nodes': (Eagle(VOCAB, Dynamic(4, 3, 4), version=3), 'multiround'),
}
QUICK_CASES = ('tree, without replacement', 'dynamic')


@functools.cache
def plain_sampled(rule: str) -> list[list[int]]:
  return decode(engine(Empty(), 0, rule), Params(target()), request(NEW, SAMPLED))[0].tokens


@pytest.mark.parametrize('case', [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK_CASES)) for name in CASES])
def test_text_and_features(case):
  """Prompts of 1, 2 and 17 tokens, with ragged acceptance. Greedy, text is the same; drawn, it is the same where the
  target's choice does not depend on the draft."""
  drafter, rule = CASES[case]
  params = half_fitted(drafter.version)
  its = engine(drafter, drafter.tree.num_nodes, rule, rows=drafter.rows)
  result, state = decode(its, params, request(NEW))
  assert result.tokens == greedy_text(NEW)
  assert 0.15 * drafter.tree.levels < result.total.mean_accepted < 0.95 * drafter.tree.levels
  assert_true_features(state, params)
  result, state = decode(its, params, request(NEW, SAMPLED))
  assert result.total.accepted > 0
  assert_true_features(state, params)
  if rule == 'coupled' or (rule == 'multiround' and not drafter.draws):
    assert result.tokens == plain_sampled(rule)


@pytest.mark.parametrize('config', [
    pytest.param(VERSION_1, marks=pytest.mark.slow, id='version 1'),
    pytest.param(VERSION_3, id='version 3, reduced vocabulary')])
def test_overfitted_head_is_accepted(config):
  """Fault 41: what is drafted in the loop is what was learnt."""
  params = Params(target_of(config.version), fitted(config, 150))
  result, _ = decode(engine(Eagle(VOCAB, CHAIN, version=config.version), DEPTH), params, request(NEW - DEPTH))
  assert result.tokens == greedy_text(NEW - DEPTH)
  assert result.total.mean_accepted >= 0.9 * DEPTH


@functools.partial(jax.jit, static_argnames='length')
def guesses(weights: EagleWeights, tokens_T: Array, features_TD: Array, length: int) -> Array:
  cache = weights.head.init_cache(1, length)
  position_BT = jnp.arange(length)[None]
  return weights(tokens_T[None], features_TD[None], position_BT, cache.causal_mask(length), cache)[0][0]


class OneByOne:
  """The head's logits after a path of drafted tokens, by passes over everything that comes before."""

  def __init__(self, params: Params, tokens: list[int]):
    self.weights, self.tokens = params.draft, tokens
    features_BTF = true_features(params.target, jnp.asarray([tokens]))
    self.features_TD = np.asarray(self.weights.head.fuse(features_BTF)[0, :-1])

  def logits(self, path: tuple[int, ...]) -> np.ndarray:
    features_TD, tokens = self.features_TD, [*self.tokens[1:], *path]
    while True:
      count = len(features_TD)
      guessed_TD = guesses(self.weights, jnp.asarray(np.resize(tokens, SLOTS)),
                           jnp.asarray(np.pad(features_TD, ((0, SLOTS - count), (0, 0)))), SLOTS)
      last_D = np.asarray(guessed_TD)[count - 1]
      if count == len(tokens):
        return np.asarray(self.weights.logits(jnp.asarray(last_D)[None, None]))[0, 0]
      features_TD = np.concatenate([features_TD, last_D[None]])


def proposed(case: str, params: Params, weights: EagleWeights | None = None) -> Iterator[tuple[TreeDraft, DecodeState]]:
  """Drafts after a few tokens (by other weights, if given), and the states that they were made from."""
  drafter, rule = CASES[case]
  its = engine(drafter, drafter.tree.num_nodes, rule)
  propose = jax.jit(lambda weights, state: drafter.propose(
      weights, state.draft_state, context_of(its, state), its.gamma)[0])
  for count in (8, 10, 13):
    _, state = decode(its, params, request(count, SAMPLED))
    limits = state.limits.replace(max_length_B=state.length_B + NEW)
    state = state.replace(reason_B=jnp.zeros_like(state.reason_B), limits=limits)  # as if more had been wanted
    yield propose(weights or params.draft, state), state


def last_to_end(state: DecodeState) -> list[int]:
  """The rows that were in the last step; what the others would draft means nothing."""
  rows = np.flatnonzero(state.draft_state.count_B).tolist()
  assert rows
  return rows


def paths_of(draft: TreeDraft, row: int) -> list[tuple[int, ...]]:
  """The tokens that lead to each node, and to row 0 first."""
  paths = [()]
  for token, parent in zip(*jax.device_get((draft.tokens_BM[row], draft.parents_BM[row])), strict=True):
    paths.append((*paths[parent], int(token)))
  return paths


def text_of(state: DecodeState, row: int) -> list[int]:
  return np.asarray(state.tokens_BL)[row, :int(state.length_B[row])].tolist()


def test_laws_of_a_tree():
  """Each row's law is that of its own path, whatever else is in the tree."""
  params = half_fitted(1)
  for draft, state in proposed('tree, without replacement', params):
    assert draft.internal == SPEC.internal
    for row in last_to_end(state):
      one_by_one, paths = OneByOne(params, text_of(state, row)), paths_of(draft, row)
      for law_V, tree_row in zip(np.asarray(draft.laws_BRV[row]), draft.internal, strict=True):
        expected_V = np.asarray(warp(jnp.asarray(one_by_one.logits(paths[tree_row])), SAMPLED))
        np.testing.assert_allclose(law_V, expected_V, atol=1e-5)


def best_paths(tree: Dynamic, one_by_one: OneByOne) -> set[tuple[int, ...]]:
  def children(value, path):
    logprobs_V = np.asarray(jax.nn.log_softmax(one_by_one.logits(path)))
    return [(value + logprobs_V[token], (*path, int(token))) for token in np.argsort(-logprobs_V)[:tree.top_k]]

  beam = candidates = children(0.0, ())
  for _ in range(1, tree.levels):
    fresh = [child for node in beam for child in children(*node)]
    candidates = candidates + fresh
    beam = sorted(fresh, reverse=True)[:tree.top_k]
  return {path for _, path in sorted(candidates, reverse=True)[:tree.nodes]}


def test_dynamic_tree_is_the_best_one():
  """EAGLE-2, once more in the plainest way."""
  params, tree = half_fitted(1), CASES['dynamic'][0].tree
  for draft, state in proposed('dynamic', params):
    for row in last_to_end(state):
      assert set(paths_of(draft, row)[1:]) == best_paths(tree, OneByOne(params, text_of(state, row)))


def only(half: str) -> EagleWeights:
  """A head that lets only the token or only the feature through."""
  head = EagleHead(EagleConfig(LAYER), nnx.Rngs(0))
  eye, zero = np.eye(CONFIG.width), np.zeros((CONFIG.width, CONFIG.width))
  head.fc[...] = jnp.asarray(np.concatenate([eye, zero] if half == 'token' else [zero, eye], axis=1), jnp.float32)
  return EagleWeights.create(head, target())


@pytest.mark.parametrize('half', ['token', 'feature'])
def test_alignment(half):
  """Fault 39: slot i of the head's cache holds feature i and token i + 1."""
  bucket, changed = 32, 5
  tokens_BL = np.tile(np.arange(1, 41), (2, 1))
  features_BTF = np.random.default_rng(0).standard_normal((2, bucket, CONFIG.width)).astype(np.float32)
  features_BTF[1] = features_BTF[0]
  if half == 'token':
    tokens_BL[1, changed] += 1
  else:
    features_BTF[1, changed] += 1
  state = Eagle(VOCAB, CHAIN).init(only(half), jnp.asarray(tokens_BL), jnp.array([20, 20]), bucket, features_BTF, None)
  np.testing.assert_array_equal(state.cache.length_B, 18)
  np.testing.assert_array_equal(state.features_BEF[:, 0], features_BTF[:, 18])
  keys_BSH = np.asarray(state.cache.k[0]).swapaxes(1, 2).reshape(2, 40, -1)
  differs_S = np.abs(keys_BSH[0] - keys_BSH[1]).max(axis=-1) > 1e-6
  np.testing.assert_array_equal(np.flatnonzero(differs_S), [changed - 1 if half == 'token' else changed])
  np.testing.assert_array_equal(state.cache.position_BS[:, :18], np.tile(np.arange(18), (2, 1)))


@pytest.mark.slow
def test_copies_beside_a_tree():
  """A copied branch may be longer than the tree: the head is fed all that was accepted."""
  drafter = Hybrid(Eagle(VOCAB, TreeSpec.chain(2), longest=5), Lookup(1, 2, partial=True), 2, 5)
  params = half_fitted(1)
  prompts = (PROMPTS[0], (5, 6, 5, 6, 5, 6, 5), PROMPTS[2][:12] * 2)
  expected = decode(engine(Empty(), 0), Params(target()), request(NEW, prompts=prompts))[0].tokens
  result, state = decode(engine(drafter, 7, 'multiround'), params, request(NEW, prompts=prompts))
  assert result.tokens == expected
  assert_true_features(state.replace(draft_state=state.draft_state.inner), params)


def test_past_the_context_of_the_head():
  """A row that is too long for the head drafts nothing; others go on."""
  params = half_fitted(1)
  config = dataclasses.replace(params.draft.head.config, decoder=dataclasses.replace(LAYER, max_positions=20))
  graph, _ = nnx.split(nnx.eval_shape(lambda: EagleHead(config, nnx.Rngs(0))))
  short = params.draft.replace(head=nnx.merge(graph, nnx.state(params.draft.head)))
  draft, state = list(proposed('tree, without replacement', params, short))[1]
  np.testing.assert_array_equal(state.length_B, [11, 12, 27])
  np.testing.assert_array_equal(draft.count_B > 0, [True, True, False])


@pytest.mark.slow
@pytest.mark.parametrize('version', [1, 3])
def test_text_on_a_mesh_from_files(tmp_path, version):
  """Target and head saved, read onto eight devices, and decoding there: the text is the same."""
  params = half_fitted(version)
  export_hf(target(), tmp_path / 'target')
  save_eagle(params.draft.head, tmp_path / 'head')
  mesh = make_mesh(2, 4)
  with jax.set_mesh(mesh):
    taps = target_of(version).config.taps
    model, _ = load_decoder(tmp_path / 'target', mesh=mesh, attention_block=None, taps=taps)
    head = load_eagle(tmp_path / 'head', model, mesh=mesh)
    drafter = Eagle(VOCAB, SPEC, 'without', version)
    result, _ = decode(engine(drafter, SPEC.num_nodes, 'multiround'), Params(model, EagleWeights.create(head, model)),
                       request(NEW, prompts=PROMPTS[1:], seeds=(1, 2)))
  assert result.tokens == greedy_text(NEW)[1:]
  assert result.total.mean_accepted > 0.2


def test_accepting_more_than_was_expected():
  drafter = Hybrid(Eagle(VOCAB, TreeSpec.chain(2)), Lookup(1, 2, partial=True), 2, 5)
  with pytest.raises(ValueError, match='may accept 5 tokens'):
    decode(engine(drafter, 7, 'multiround'), half_fitted(1), request(NEW))


def test_refusals():
  with pytest.raises(InputError, match='use one of top, without, with'):
    Eagle(VOCAB, SPEC, 'drawn')
  with pytest.raises(InputError, match='must not be chosen by looking at it'):
    Eagle(VOCAB, Dynamic(3, 4, 9), 'without')
  with pytest.raises(InputError, match='has no nodes'):
    Eagle(VOCAB, TreeSpec(()))
  with pytest.raises(InputError, match='20 candidates: 21 nodes are too many'):
    Dynamic(2, 4, 21)
  with pytest.raises(InputError, match='of 1 or more, not 0, 4 and 3'):
    Dynamic(0, 4, 3)
  with pytest.raises(InputError, match='gamma=3 must be the 4 nodes'):
    Eagle(VOCAB, CHAIN).levels(3)
  with pytest.raises(InputError, match='wants features of width 64, the target gives 32'):
    Eagle(VOCAB, CHAIN, version=3).init(half_fitted(3).draft, jnp.ones((2, 40), int), jnp.ones(2, int), 32,
                                        jnp.zeros((2, 32, 32)), None)
  with pytest.raises(InputError, match='version=2'):
    EagleConfig(LAYER, version=2)
  with pytest.raises(InputError, match='draft_vocab=65'):
    EagleConfig(LAYER, draft_vocab=65)
  with pytest.raises(InputError, match='one layer with rotary positions, not 2'):
    EagleConfig(CONFIG)
