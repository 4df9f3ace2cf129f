"""Medusa in the loop: which token goes to which node, which vector it comes from, and text as without it."""

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
from models.config import MedusaConfig
from models.errors import InputError
from models.heads import MedusaHeads
from models.loading import export_hf, load_decoder
from models.loading.medusa import load_medusa, save_medusa
from specdec import rng
from specdec.commit import Origin, Reason
from specdec.drafters import Empty, Hybrid, Lookup, Medusa, MedusaParams
from specdec.drafters.medusa import MedusaState
from specdec.drafters.protocol import Context
from specdec.engine import Engine, Params, step_once
from specdec.tree import TreeSpec
from tests.toys import (
  CONFIG,
  GREEDY,
  PROMPTS,
  SAMPLED,
  VOCAB,
  assert_same_live_slots,
  decode,
  engine,
  fresh_cache,
  greedy_text,
  request,
  target,
)

WIDTH, DEPTH, NEW = CONFIG.width, 3, 90
SPEC = TreeSpec.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)])
SHARED = MedusaConfig(4, WIDTH, VOCAB, own_head=False)  # one head more than the tree has levels
OWN = MedusaConfig(DEPTH, WIDTH, VOCAB, num_layers=2)


def medusa_engine(rule: str = 'multiround', spec: TreeSpec = SPEC, **changes) -> Engine:
  return engine(Medusa(spec, VOCAB), spec.num_nodes, rule, **changes)


@functools.cache
def random_heads(config: MedusaConfig) -> MedusaHeads:
  """Nothing in them is zero."""
  noise = np.random.default_rng(0)
  fill = lambda leaf: jnp.asarray(noise.standard_normal(leaf.shape, np.float32) * WIDTH ** -0.5)
  return jax.tree.map(fill, nnx.eval_shape(lambda: MedusaHeads(config, nnx.Rngs(0))))


def random_params(config: MedusaConfig = SHARED) -> MedusaParams:
  return MedusaParams(random_heads(config), None if config.own_head else target().lm_head)


@jax.jit
def vectors(tokens_BT: Array) -> Array:
  """[B, T, D]: the target's vectors before its LM head, of one pass over the whole text."""
  batch, width = tokens_BT.shape
  cache = target().init_cache(batch, width)
  position_BT = jnp.broadcast_to(jnp.arange(width), (batch, width))
  return target()(tokens_BT, position_BT, cache.causal_mask(width), cache).hidden_BTD


@functools.cache
def overfitted() -> MedusaParams:
  """Heads that know the target's greedy text by heart, at every token whose vector they will be asked about."""
  rows = [[*prompt, *text] for prompt, text in zip(PROMPTS, greedy_text(NEW + DEPTH), strict=True)]
  hidden, wanted = [], []
  for row in rows:
    hidden_TD = np.asarray(vectors(jnp.asarray([row]))[0])
    for t in range(len(row) - DEPTH - 1):
      hidden.append(hidden_TD[t])
      wanted.append(row[t + 2:t + 2 + DEPTH])
  hidden_BTD, wanted_BK = jnp.asarray(hidden)[:, None], jnp.asarray(wanted)
  heads = MedusaHeads(OWN, nnx.Rngs(0))
  optimizer = optax.adam(1e-2)

  def loss(heads: MedusaHeads) -> Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(heads(hidden_BTD)[:, 0], wanted_BK))

  @jax.jit
  def fit(heads: MedusaHeads) -> MedusaHeads:
    def update(_, carry):
      heads, state = carry
      change, state = optimizer.update(jax.grad(loss)(heads), state)
      return optax.apply_updates(heads, change), state
    return jax.lax.fori_loop(0, 500, update, (heads, optimizer.init(heads)))[0]

  heads = fit(heads)
  right = jnp.mean(jnp.argmax(heads(hidden_BTD)[:, 0], axis=-1) == wanted_BK)
  assert right > 0.99, f'the heads learned {right:.3f} of the text'
  return MedusaParams(heads)


def expected_text() -> list[list[int]]:
  return [row[:NEW] for row in greedy_text(NEW + DEPTH)]


@functools.cache
def plain(rule: str, sampled: bool) -> list[list[int]]:
  return decode(engine(Empty(), 0, rule), Params(target()), request(NEW, SAMPLED if sampled else GREEDY))[0].tokens


@pytest.mark.parametrize(('rule', 'config'), [
    pytest.param('multiround', SHARED, id='multiround-shared'),
    pytest.param('multiround', OWN, id='multiround-own', marks=pytest.mark.slow),
    pytest.param('coupled', SHARED, id='coupled-shared'),
    pytest.param('coupled', OWN, id='coupled-own', marks=pytest.mark.slow),
    pytest.param('typical', SHARED, id='typical-shared', marks=pytest.mark.slow),
    pytest.param('typical', OWN, id='typical-own')])
def test_greedy_text_with_random_heads(rule, config):
  """Three rows; the prompt of a single token begins with a plain step; the cache is as after a fresh prefill."""
  eng = medusa_engine(rule)
  result, state = decode(eng, Params(target(), random_params(config)), request(NEW))
  assert result.tokens == expected_text()
  assert [origins[0] is Origin.PLAIN for origins in result.origins] == [True, False, False]
  assert all(metrics.drafted for metrics in result.metrics)
  assert_same_live_slots(state.cache, fresh_cache(target(), state.tokens_BL, state.cache.length_B, eng.slots))


@pytest.mark.parametrize('rule', ['multiround', pytest.param('coupled', marks=pytest.mark.slow), 'typical'])
def test_overfitted_heads(rule):
  """Fault 41: who knows the text has nearly everything accepted: heads, vectors and nodes are paired as in training."""
  result, _ = decode(medusa_engine(rule), Params(target(), overfitted()), request(NEW))
  assert result.tokens == expected_text()
  assert result.total.mean_accepted >= 0.9 * DEPTH


@pytest.mark.parametrize(('make', 'rule'), [
    (random_params, 'multiround'), (random_params, 'coupled'), (overfitted, 'multiround'),
    pytest.param(overfitted, 'coupled', marks=pytest.mark.slow)])
def test_sampled_text(rule, make):
  """The text that plain decoding draws with the same seeds."""
  result, _ = decode(medusa_engine(rule), Params(target(), make()), request(NEW, SAMPLED))
  assert result.tokens == plain(rule, sampled=True)
  assert result.total.accepted > 0


def test_vectors_after_every_step():
  """What the heads read is the target's vector at the newest token but one, in rows that ended as well."""
  text = greedy_text(NEW + DEPTH)
  eng, params = medusa_engine(), Params(target(), overfitted())
  late = next(token for token in text[1][30:] if token not in text[1][:30] and token not in text[0] + text[2])
  state = eng.start(params, request(NEW, eos_ids=[late]))
  while bool(jnp.any(state.live_B)):
    state = step_once(eng, params, state)
    length_B = np.asarray(state.length_B)
    np.testing.assert_array_equal(state.draft_state.length_B, length_B)
    hidden_BTD = np.asarray(vectors(state.tokens_BL[:, :128]))
    expected_BD = hidden_BTD[np.arange(3), length_B - 2]
    np.testing.assert_allclose(state.draft_state.hidden_BD, expected_BD, rtol=0, atol=1e-4)
  assert state.reason_B.tolist() == [Reason.MAX_TOKENS, Reason.EOS, Reason.MAX_TOKENS]


def test_vectors_after_the_prompts():
  state = medusa_engine().start(Params(target(), random_params()), request(NEW))
  for row, prompt in enumerate(PROMPTS[1:], 1):
    expected_D = vectors(jnp.asarray([prompt]))[0, -2]
    np.testing.assert_allclose(state.draft_state.hidden_BD[row], expected_D, rtol=0, atol=1e-4)


def context(length_B, gamma_B) -> Context:
  length_B, gamma_B = jnp.asarray(length_B), jnp.asarray(gamma_B)
  return Context(
      tokens_BL=jnp.zeros((len(length_B), 64), jnp.int32), length_B=length_B, gamma_B=gamma_B, live_B=gamma_B >= 0,
      row_key_B=rng.row_keys(jnp.arange(len(length_B), dtype=jnp.uint32)), sampling=SAMPLED,
      purpose=rng.Purpose.DRAFT)


@pytest.mark.parametrize('num_tokens', [VOCAB, 7])
def test_nodes_have_the_choices_of_their_head(num_tokens):
  """Depth and rank; padding ids are no choices."""
  params, gamma = random_params(), SPEC.num_nodes
  hidden_BD = jnp.asarray(np.random.default_rng(1).standard_normal((4, WIDTH)), jnp.float32)
  length_B = jnp.asarray([9, 2, 1, 5])
  draft, _ = Medusa(SPEC, num_tokens).propose(
      params, MedusaState(hidden_BD, length_B), context(length_B, [gamma, 1, gamma, 0]), gamma)
  logits_BKV = np.asarray(params.heads(hidden_BD[:, None], params.lm_head_UD)[:, 0, :, :num_tokens])
  for node, path in enumerate(SPEC.paths):
    ranked_BV = np.argsort(-logits_BKV[:, len(path) - 1], axis=-1)
    np.testing.assert_array_equal(draft.tokens_BM[:, node], ranked_BV[:, path[-1]])
  assert draft.count_B.tolist() == [gamma, gamma, 0, 0]  # a text of one token has no vector, the last wants none
  assert draft.laws_BRV is None and (draft.levels, draft.branching) == (3, 3)
  np.testing.assert_array_equal(draft.parents_BM, np.tile(SPEC.parents, (4, 1)))


def test_few_tokens_can_be_guessed(tmp_path):
  """Fault 40: heads that choose among U tokens name them by the target's ids, also once read from a file."""
  ids, gamma = np.array([3, 7, 9, 20, 41, 60]), SPEC.num_nodes
  heads = MedusaHeads(dataclasses.replace(SHARED, draft_vocab=len(ids)), nnx.Rngs(0))
  heads.draft_ids[...] = jnp.asarray(ids, jnp.int32)
  save_medusa(heads, tmp_path)
  heads = load_medusa(tmp_path, WIDTH, VOCAB)
  params = MedusaParams(heads, target().lm_head[ids])
  hidden_BD = jnp.asarray(np.random.default_rng(1).standard_normal((2, WIDTH)), jnp.float32)
  for num_tokens, known in ((VOCAB, ids), (50, ids[:5])):
    draft, _ = Medusa(SPEC, num_tokens).propose(
        params, MedusaState(hidden_BD, jnp.array([9, 5])), context([9, 5], [gamma, gamma]), gamma)
    ranked_BU = known[np.argsort(-np.asarray(hidden_BD @ target().lm_head[known].T), axis=-1)]
    expected_BM = np.stack([ranked_BU[:, path[-1]] for path in SPEC.paths], axis=1)  # new heads are all alike
    np.testing.assert_array_equal(draft.tokens_BM, expected_BM)
  with pytest.raises(InputError, match=r'node \(1,\) of the tree wants choice 1 of a head, .* among 1 tokens'):
    Medusa(SPEC, VOCAB).check(4, draft_vocab=1)
  with pytest.raises(InputError, match=r'draft_vocab=6 must lie in 1\.\.64'):
    dataclasses.replace(OWN, draft_vocab=6)


def test_new_heads_guess_the_next_token_over_again():
  """Untrained heads with the target's LM head propose what the target says of the token before."""
  heads = MedusaHeads(SHARED, nnx.Rngs(0))
  result, _ = decode(medusa_engine(), Params(target(), MedusaParams(heads, target().lm_head)), request(NEW))
  assert result.tokens == expected_text()


def test_a_lookup_branch_besides():
  drafter = Hybrid(Medusa(SPEC, VOCAB), Lookup(1, 2, partial=True), SPEC.num_nodes, 4)
  result, _ = decode(engine(drafter, SPEC.num_nodes + 4, 'multiround'), Params(target(), overfitted()), request(NEW))
  assert result.tokens == expected_text()
  assert result.total.mean_accepted >= 0.9 * DEPTH


@pytest.mark.parametrize('kind', [pytest.param('own', marks=pytest.mark.slow), 'shared'])
def test_text_on_a_mesh_from_files(tmp_path, kind):
  """Target and heads saved, read onto eight devices, and decoding there: the text is the same."""
  params = overfitted() if kind == 'own' else random_params()
  export_hf(target(), tmp_path / 'target')
  save_medusa(params.heads, tmp_path / 'heads')
  mesh = make_mesh(2, 4)
  with jax.set_mesh(mesh):
    model, _ = load_decoder(tmp_path / 'target', mesh=mesh, attention_block=None)
    heads = load_medusa(tmp_path / 'heads', WIDTH, VOCAB, mesh=mesh)
    borrowed = None if kind == 'own' else model.lm_head
    result, _ = decode(medusa_engine(), Params(model, MedusaParams(heads, borrowed)), request(NEW))
  assert result.tokens == expected_text()
  assert result.total.mean_accepted >= (0.9 * DEPTH if kind == 'own' else 0)


def test_tree_deeper_than_the_heads():
  """Fault 36: three heads and a tree of five levels are refused by name and number, not clamped."""
  deep = TreeSpec.chain(5)
  params = Params(target(), random_params(OWN))
  with pytest.raises(InputError) as caught:
    medusa_engine(spec=deep).start(params, request(NEW))
  assert str(caught.value).startswith('the tree has depth 5 at node (0, 0, 0, 0), and there are 3 medusa heads')
  Medusa(deep, VOCAB).check(5)


def test_refusals():
  """Fault 36: ranks beyond the vocabulary, trees without a node or without a parent, and a γ that is not the tree's."""
  with pytest.raises(InputError, match=r'node \(4,\) of the tree wants choice 4 of a head, .* among 4 tokens'):
    Medusa(TreeSpec.branches(6, 1), 4)
  with pytest.raises(InputError, match='has no nodes'):
    Medusa(TreeSpec(()), VOCAB)
  with pytest.raises(ValueError, match='hangs in the air'):
    TreeSpec.from_paths([(0,), (1, 0)])
  with pytest.raises(InputError, match='gamma=4 must be the 10 nodes of the tree'):
    engine(Medusa(SPEC, VOCAB), 4, 'multiround').start(Params(target(), random_params()), request(NEW))
