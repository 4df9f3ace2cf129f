"""The reader of compiled TPU programs, on a hand-written one."""

from pathlib import Path

import pytest

from launch.hlo import HBM, Program, Shape

TEXT = (Path(__file__).parent / 'fixtures' / 'loop.hlo').read_text()
CACHE = Shape('bf16', (4, 128, 64), HBM)


def program(extra: str = '') -> Program:
  return Program.parse(TEXT.replace('  COPY\n', f'  {extra}\n' if extra else ''))


def named(name: str, **changes):
  return next(run for run in program(**changes).runs(lambda scope: 30 if 'cond' in scope else 1)
              if run.instruction.name == name)


def test_shapes_and_memory_spaces():
  state = named('state').instruction
  assert [(shape.dtype, shape.dims, shape.space) for shape in state.shapes] == [
      ('s32', (), HBM), ('bf16', (4, 128, 64), HBM)]
  assert named('all-reduce.1').instruction.shapes[0].space == 3
  assert CACHE.num_bytes == 4 * 128 * 64 * 2


def test_cycles_scopes_and_loops():
  fusion = named('fusion.1')
  assert (fusion.instruction.cycles, fusion.times, fusion.in_loop) == (700, 1, True)
  assert fusion.scope == 'jit(run)/while/body/verify/mlp/dot_general'
  assert not named('copy.0').in_loop
  assert named('write').scope == 'jit(run)/while', 'what has no scope has that of the loop around it'


def test_the_dearest_branch_runs_as_often_as_its_loop():
  halving = named('fusion.9')
  assert (halving.times, halving.instruction.cycles) == (30, 10)
  assert 'c' not in {run.instruction.name for run in program().runs(lambda scope: 30)}


def test_all_reduces_are_covered_by_large_prefetches_only():
  assert not named('all-reduce.1').covered, 'eight values in flight hide nothing'
  assert named('all-reduce.2').covered
  assert not named('all-gather.1').covered, 'the prefetch has ended'


def test_clean_loop_copies_nothing():
  """The copy before the loop, the update in place and the loop's own carry are none."""
  assert program().loop_copies([CACHE]) == []


@pytest.mark.parametrize('line', [
    '%copy.5 = bf16[4,128,64]{2,0,1:T(8,128)S(3)} copy(%cache)',
    '%transpose.5 = bf16[4,64,128]{2,1,0} transpose(%cache), dimensions={0,2,1}',
    '%scaled = bf16[4,128,64]{2,1,0} fusion(%cache), kind=kLoop, calls=%fused_scale'])
def test_copies_are_seen(line):
  copies = program(line).loop_copies([CACHE])
  assert [copy.name for copy in copies] == [line[1:].partition(' ')[0]]
  assert program(line).loop_copies([Shape('f32', CACHE.dims, HBM)]) == []


def test_vector_dots():
  assert [dot.name for dot in program().vector_dots()] == ['multiply_reduce']
  assert 'draft/next' in str(program().vector_dots()[0])
