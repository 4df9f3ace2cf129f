"""Trees in the loop: text as without them, whatever is drafted; each row of the batch goes down its own branch."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from specdec.accept import RULES
from specdec.draft import TreeDraft
from specdec.drafters import Empty, Hybrid, Lookup, LookupTree, Model
from specdec.engine import Params
from specdec.features import Reads
from specdec.tree import TreeSpec
from tests.toys import (
  CONFIG,
  GREEDY,
  SAMPLED,
  VOCAB,
  assert_same_live_slots,
  decode,
  draft,
  engine,
  fresh_cache,
  greedy_text,
  random_toy,
  recorded,
  request,
  target,
)

SPEC = TreeSpec.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 0, 0), (1, 1, 0)])
NEW = 40


@dataclasses.dataclass(frozen=True)
class Recorded:
  """At each position one sibling of the tree has the recorded token, by turns another one; the others are wrong."""

  spec: TreeSpec

  name, reads = 'recorded', Reads.HIDDEN
  is_tree, draws = True, False

  def levels(self, gamma):
    return self.spec.levels

  def init(self, params, tokens_BL, length_B, bucket, features_BTF, source):
    assert features_BTF.shape[1] == bucket
    return ()

  def propose(self, params, state, context, gamma):
    depth_M, rank_M = np.array(self.spec.depths[1:]), np.array(self.spec.ranks)
    slots_BM = jnp.minimum(context.length_B[:, None] + depth_M - 1, params.shape[1] - 1)
    right_BM = jnp.take_along_axis(params, slots_BM, axis=1)
    is_right_BM = (rank_M + context.length_B[:, None]) % 3 == 0
    tokens_BM = jnp.where(is_right_BM, right_BM, (right_BM + 1 + rank_M) % VOCAB)
    parents_BM = jnp.broadcast_to(jnp.asarray(self.spec.parents), tokens_BM.shape)
    count_B = jnp.where(context.gamma_B > 0, gamma, 0)
    return TreeDraft(tokens_BM, parents_BM, None, count_B, self.spec.levels, self.spec.branching), state

  def observe(self, state, length_B, features_BEF):
    assert features_BEF.shape[1] == self.spec.levels + 1
    return state


@functools.cache
def plain(rule: str, sampled: bool):
  return decode(engine(Empty(), 0, rule), Params(target()), request(NEW, SAMPLED if sampled else GREEDY))[0].tokens


@pytest.mark.parametrize('rule', ('multiround', 'coupled', 'typical'))
def test_greedy_text(rule):
  """Faults 34 and 35: three rows of the batch accept different branches; the caches are as after a fresh prefill."""
  text = greedy_text(NEW)
  eng = engine(Recorded(SPEC), SPEC.num_nodes, rule)
  result, state = decode(eng, Params(target(), recorded(text, slots=eng.slots)), request(NEW))
  assert result.tokens == text == plain('coupled', sampled=False)
  assert result.total.tokens_per_pass > 2.5 and len({metrics.accepted_at for metrics in result.metrics}) > 1
  fresh = fresh_cache(target(), state.tokens_BL, state.cache.length_B, eng.slots)
  assert_same_live_slots(state.cache, fresh)


@pytest.mark.parametrize('rule', ('multiround', 'coupled'))
@pytest.mark.parametrize('rows', (1, 16))
def test_sampled_text(rule, rows):
  """Point masses leave the text as plain decoding draws it with the same seeds, also where a pass is padded."""
  text = plain(rule, sampled=True)
  eng = engine(Recorded(SPEC), SPEC.num_nodes, rule, rows=rows)
  result, _ = decode(eng, Params(target(), recorded(text, slots=eng.slots)), request(NEW, SAMPLED))
  assert result.tokens == text and result.total.tokens_per_pass > 2.5


def test_sliding_windows():
  """A window reaches back in positions, not in slots, of which a tree takes more."""
  model = random_toy(dataclasses.replace(CONFIG, windows=(6, None)))
  text = decode(engine(Empty(), 0, 'multiround'), Params(model), request(NEW))[0].tokens
  eng = engine(Recorded(SPEC), SPEC.num_nodes, 'multiround')
  result, _ = decode(eng, Params(model, recorded(text, slots=eng.slots)), request(NEW))
  assert result.tokens == text and result.total.tokens_per_pass > 2.5


def test_relative_positions_are_refused():
  model = random_toy(dataclasses.replace(CONFIG, positions='relative', num_kv_heads=CONFIG.num_heads))
  eng = engine(Recorded(SPEC), SPEC.num_nodes, 'multiround')
  with pytest.raises(ValueError, match='takes chains only'):
    eng.generate(Params(model, recorded(greedy_text(NEW), slots=eng.slots)), request(NEW))


DRAFTERS = {
    'lookup tree': (LookupTree(1, 2, partial=True, branches=3), 9, None),
    'lookup tree of one branch': (LookupTree(1, 2, partial=True, branches=1), 3, None),
    'hybrid of lookup': (Hybrid(Lookup(2, 2, partial=True), Lookup(1, 1, latest=True, partial=True), 2, 3), 5, None),
    'hybrid of a model': (Hybrid(Model(VOCAB), Lookup(1, 2, partial=True), 3, 2), 5, draft),
    'hybrid of the target': (Hybrid(Model(VOCAB), Lookup(1, 2, partial=True), 3, 4), 7, target),
}


QUICK = (('multiround', 'lookup tree'), ('multiround', 'hybrid of a model'), ('coupled', 'hybrid of lookup'))


@pytest.mark.parametrize('rule, sampling, name', [
    pytest.param(rule, sampling, name, id=f'{rule}-sampling{number}-{name}',
                 marks=[pytest.mark.slow] * ((rule, name) not in QUICK))
    for number, (rule, sampling) in enumerate((('multiround', GREEDY), ('coupled', SAMPLED))) for name in DRAFTERS])
def test_copying_drafters(name, rule, sampling):
  drafter, gamma, params = DRAFTERS[name]
  text = plain(rule, sampled=sampling is SAMPLED)
  result, _ = decode(engine(drafter, gamma, rule), Params(target(), params and params()), request(NEW, sampling))
  assert result.tokens == text and result.total.drafted > 0


def test_one_branch_is_the_chain():
  tree = decode(engine(LookupTree(1, 2, partial=True, branches=1), 4, 'multiround'), Params(target()), request(NEW))[0]
  chain = decode(engine(Lookup(1, 2, partial=True), 4, 'multiround'), Params(target()), request(NEW))[0]
  assert tree.tokens == chain.tokens
  assert [metrics.passes for metrics in tree.metrics] == [metrics.passes for metrics in chain.metrics]


@pytest.mark.slow
def test_more_branches_accept_more():
  """On text that goes on in several ways after the same token."""
  rng = np.random.default_rng(0)
  prompts = [np.tile(rng.integers(0, 8, 24), 4).tolist() for _ in range(3)]
  accepted = {}
  for branches in (1, 3):
    eng = engine(LookupTree(1, 1, partial=True, branches=branches), 2 * branches, 'multiround')
    accepted[branches] = decode(eng, Params(target()), request(NEW, prompts=prompts))[0].total.mean_accepted
  assert accepted[3] > accepted[1]


def test_a_model_beside_copies_sees_the_text_as_it_is():
  """Where the copied branch won, what the draft model had fed of its own is fed again: as its own draft, the target is
  never refused."""
  eng = engine(Hybrid(Model(VOCAB), Lookup(1, 1, partial=True), 2, 4), 6, 'multiround')
  result, _ = decode(eng, Params(target(), target()), request(NEW))
  first_two = result.total.accepted_per_position[:2]
  assert result.tokens == plain('coupled', sampled=False) and min(first_two) > 0.9, first_two


def test_rules_know_what_they_judge():
  with pytest.raises(ValueError, match="'rejection' judges chains"):
    engine(Recorded(SPEC), SPEC.num_nodes, 'rejection')
  with pytest.raises(ValueError, match="'block' judges chains"):
    engine(LookupTree(branches=2), 4, 'block')
  with pytest.raises(ValueError, match="'typical' judges point masses"):
    engine(Model(VOCAB), 4, 'typical')
  assert {name for name, rule in RULES.items() if rule.lossless} == {'rejection', 'block', 'multiround', 'coupled'}
