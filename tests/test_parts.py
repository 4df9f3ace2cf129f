"""The parts of a step, timed alone: nothing is copied, nothing is left out, nothing is done once for all repeats."""

import functools
import re

import jax
import numpy as np
import pytest

from launch import parts
from specdec.drafters import Lookup, Model, Simulated
from specdec.engine import Engine, Params
from specdec.state import DecodeState
from tests.test_compiled import IN_PLACE, instructions
from tests.test_sharding import on_mesh, placed
from tests.toys import SLOTS, VOCAB, draft, engine, recorded, request, target

pytestmark = pytest.mark.usefixtures('optimized')
DRAFTERS = {
    'lookup': (Lookup(partial=True), lambda: None),
    'simulated': (Simulated(0.7), lambda: recorded([[1] * 30] * 3)),
    'draft': (Model(VOCAB), draft),
}


def case(name: str) -> tuple[Engine, Params, DecodeState]:
  drafter, draft_params = DRAFTERS[name]
  eng, params = engine(drafter, 4), Params(target(), draft_params())
  return eng, params, eng.start(params, request(30))


@functools.cache
def programs(name: str) -> dict[str, str]:
  eng, params, state = case(name)
  lowered = {
      'passes': parts.target_passes.lower(eng, 5, params.target, state),
      'drafts': parts.drafts.lower(eng, 8, params, state)}
  return {part: program.compile().as_text() for part, program in lowered.items()}


def in_loops(program: str) -> str:
  """The text of all computations that run inside a loop of a compiled program."""
  bodies = dict(re.findall(r'^(?:ENTRY )?(%[\w.\-]+) \(.*?\{\n(.*?)^\}', program, re.MULTILINE | re.DOTALL))
  found, todo = {}, re.findall(r'body=(%[\w.\-]+)', program)
  while todo:
    name = todo.pop()
    if name not in found:
      found[name] = bodies[name]
      todo += [called for called in re.findall(r'%[\w.\-]+', bodies[name]) if called in bodies]
  return '\n'.join(found.values())


def test_no_cache_is_copied():
  """As in the loop itself: else a part alone would cost more than the same part in a step."""
  _, _, state = case('draft')
  sizes = {leaf.size for leaf in jax.tree.leaves((target(), state.cache.k, state.draft_state.cache.k)) if leaf.ndim > 1}
  for program in programs('draft').values():
    copies = [line for operation, size, line in instructions(program) if size in sizes and operation not in IN_PLACE]
    assert not copies, '\n'.join(copies)


def test_lookup_searches_in_every_repeat():
  """The text is compared with its own end, slot by slot, inside the loop."""
  assert f'pred[3,{SLOTS}]' in in_loops(programs('lookup')['drafts'])


def test_simulated_draws_in_every_repeat():
  """Threefry is made of 32-bit rotations."""
  assert re.search(r'u32\[\S+ (?:xor|shift-left)\(', in_loops(programs('simulated')['drafts']))


def test_draft_model_runs_in_every_repeat():
  program = programs('draft')['drafts']
  assert in_loops(program).count(' dot(') == program.count(' dot(') > 10


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=[pytest.mark.slow] * (name == 'draft')) for name in DRAFTERS])
def test_parts_can_be_timed_again_and_again(name):
  eng, params, state = case(name)
  alone = parts.Parts(eng, params, state)
  for _ in range(2):
    for part in (alone.drafts, lambda: alone.target_passes(5), lambda: alone.target_passes(1)):
      after = part()
      np.testing.assert_array_equal(after.tokens_BL, state.tokens_BL)
      np.testing.assert_array_equal(after.length_B, state.length_B)
      np.testing.assert_array_equal(after.cache.length_B, state.cache.length_B)
  for mine, other in zip(after.cache.k, state.cache.k, strict=True):
    for row, length in enumerate(state.cache.length_B):
      np.testing.assert_array_equal(mine[row, :, :length], other[row, :, :length])


def test_all_of_a_draft_is_timed_even_where_a_row_wants_less():
  """A row that may emit two tokens drafts one at most; the cost of a draft is that of γ tokens."""
  eng, params, _ = case('draft')
  before = eng.start(params, request(2))
  after = parts.drafts(eng, 1, params, parts.copy_of(before))
  keys = [np.asarray(state.draft_state.cache.k[0]) for state in (before, after)]
  for row, length in enumerate(before.length_B):
    changed = np.any(keys[0][row] != keys[1][row], axis=(0, 2))
    assert changed[length:length + 3].all() and not changed[length + 3:].any()


@pytest.mark.slow
def test_on_a_mesh_parts_leave_the_state_laid_out(count_compiles):
  """As before a step and after it: else the next call would compile anew, while the clock runs."""
  with on_mesh(2, 4) as mesh:
    eng, params = engine(Model(VOCAB), 4), Params(placed(target(), mesh), placed(draft(), mesh))
    state = eng.start(params, request(30, prompts=[(5, 6, 7)] * 4, seeds=range(4)))
    alone = parts.Parts(eng, params, state)
    for part in (lambda: alone.target_passes(5), alone.drafts):
      part()
      with count_compiles() as count:
        after = part()
      assert count.total == 0
  for before, now in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
    assert now.sharding.is_equivalent_to(before.sharding, before.ndim)
