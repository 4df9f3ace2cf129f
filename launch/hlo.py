"""Reads the text of a program that the TPU compiler has scheduled (`compiled.as_text()`): instructions, loops, costs.

Of each instruction it keeps what a plan asks for: result shapes with their memory space, the compiler's estimate of
cycles, and the JAX name stack ("scope") that it comes from.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
import dataclasses
import math
import re

HBM = 0  # memory space; the others lie on the chip
BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's16': 2, 'u16': 2, 'f32': 4, 's32': 4, 'u32': 4, 'f64': 8,
         's64': 8, 'u64': 8}
COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{$')
INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%([\w.\-]+) = (.*)$')
SHAPE = re.compile(r'(\w+)\[([\d,]*)\](?:\{([^}]*)\})?')
CALLED = re.compile(r'\b(calls|body|to_apply|condition)=%?([\w.\-]+)')
BRANCHES = re.compile(r'\bbranch_computations=\{([^}]*)\}')
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
SCOPE = re.compile(r'\bop_name="([^"]*)"')
OPERAND = re.compile(r'%([\w.\-]+)')

COLLECTIVES = ('all-reduce', 'all-reduce-start', 'all-gather', 'all-gather-start', 'reduce-scatter', 'all-to-all',
               'collective-permute', 'collective-permute-start')
STARTS, DONES = ('copy-start', 'slice-start', 'async-start'), ('copy-done', 'slice-done', 'async-done')
PRODUCTS = ('convolution', 'dot')  # what the matrix unit does, inside fusions too
COPIES = ('copy', 'transpose', 'concatenate', 'pad', 'reshape')  # a reshape that is free is a bitcast
PREFETCH_BYTES = 1 << 20  # smaller copies in flight hide nothing


@dataclasses.dataclass(frozen=True)
class Shape:
  """One array on one device."""

  dtype: str
  dims: tuple[int, ...]
  space: int

  @property
  def size(self) -> int:
    return math.prod(self.dims)

  @property
  def num_bytes(self) -> int:
    return self.size * BYTES.get(self.dtype, 1)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a program.

  Attributes:
    name, op: as in the text.
    shapes: of the results, tuples flattened.
    operands: names.
    called: attribute (`calls`, `body`, `to_apply`, ...) -> computation.
    branches: computations of a conditional.
    cycles: the compiler's estimate; 0 where it has none (collectives, prefetches, sorts, gathers).
    scope: the JAX name stack; empty for what the compiler added.
  """

  name: str
  op: str
  shapes: tuple[Shape, ...]
  operands: tuple[str, ...]
  called: Mapping[str, str]
  branches: tuple[str, ...]
  cycles: int
  scope: str

  @classmethod
  def parse(cls, name: str, text: str) -> 'Instruction':
    """Of what stands behind `name = `."""
    end = _end_of_shape(text)
    rest = text[end + 1:]
    op, _, arguments = rest.partition('(')
    arguments = arguments.partition(')')[0]
    branches, cycles, scope = BRANCHES.search(rest), CYCLES.search(rest), SCOPE.search(rest)
    return cls(
        name=name, op=op, shapes=tuple(_shapes(text[:end])), operands=tuple(OPERAND.findall(arguments)),
        called=dict(CALLED.findall(rest)), branches=tuple(OPERAND.findall(branches[1])) if branches else (),
        cycles=int(cycles[1]) if cycles else 0, scope=scope[1] if scope else '')

  def __str__(self) -> str:
    shapes = ', '.join(f'{shape.dtype}{list(shape.dims)}' for shape in self.shapes)
    return f'{self.op} {self.name}: {shapes} ({self.scope or "no scope"})'


def _end_of_shape(text: str) -> int:
  """Where the shape ends that `text` begins with: a tuple holds spaces, an array none."""
  if not text.startswith('('):
    return text.index(' ')
  depth = 0
  for index, character in enumerate(text):
    depth += {'(': 1, ')': -1}.get(character, 0)
    if depth == 0:
      return index + 1
  raise ValueError(f'unbalanced shape: {text[:80]}')


def _shapes(text: str) -> Iterator[Shape]:
  for dtype, dims, layout in SHAPE.findall(text):
    space = re.search(r'S\((\d+)\)', layout)
    yield Shape(dtype, tuple(int(size) for size in dims.split(',') if size), int(space[1]) if space else HBM)


@dataclasses.dataclass(frozen=True)
class Run:
  """One instruction where it runs.

  Attributes:
    instruction: which.
    times: how often in one step of the outermost loop.
    scope: its own, or that of the loop around it.
    in_loop: whether any loop is around it.
    covered: whether a prefetch of at least `PREFETCH_BYTES` is in flight meanwhile.
  """

  instruction: Instruction
  times: int
  scope: str
  in_loop: bool
  covered: bool


@dataclasses.dataclass(frozen=True)
class Program:
  """All computations by name, instructions in the order of the schedule."""

  computations: Mapping[str, tuple[Instruction, ...]]
  entry: str

  @classmethod
  def parse(cls, text: str) -> 'Program':
    computations, entry, body = {}, '', []
    for line in text.splitlines():
      if found := COMPUTATION.match(line):
        body = computations.setdefault(found[2], [])
        entry = found[2] if found[1] else entry
      elif found := INSTRUCTION.match(line):
        body.append(Instruction.parse(found[1], found[2]))
    return cls({name: tuple(body) for name, body in computations.items()}, entry)

  def runs(self, trips: Callable[[str], int] = lambda scope: 1) -> Iterator[Run]:
    """Every instruction outside fusions, with how often it runs.

    Args:
      trips: scope of a loop -> how often its body runs; the text does not say. Of a conditional the dearest branch
        runs.
    """
    return self._runs(self.entry, 1, '', False, trips)

  def _runs(self, computation: str, times: int, scope: str, in_loop: bool,
            trips: Callable[[str], int]) -> Iterator[Run]:
    body = self.computations[computation]
    for instruction, covered in zip(body, _covered(body), strict=True):
      here = instruction.scope or scope
      yield Run(instruction, times, here, in_loop, covered)
      if instruction.op == 'while':
        yield from self._runs(instruction.called['body'], times * trips(here), here, True, trips)
      elif instruction.op == 'conditional' and instruction.branches:
        dearest = max(instruction.branches, key=lambda branch: self._cycles(branch, trips))
        yield from self._runs(dearest, times, here, in_loop, trips)
      elif instruction.op == 'call':
        yield from self._runs(instruction.called['to_apply'], times, here, in_loop, trips)

  def _cycles(self, computation: str, trips: Callable[[str], int]) -> int:
    return sum(run.times * run.instruction.cycles for run in self._runs(computation, 1, '', False, trips))

  def loop_copies(self, kept: Collection[Shape]) -> list[Instruction]:
    """Instructions inside loops that write something of the type and size of a kept array anew.

    Prefetches onto the chip, what is read or updated where it lies, and control flow are none.
    """
    sizes = {(shape.dtype, shape.size) for shape in kept}
    writes = lambda instruction: any((shape.dtype, shape.size) in sizes for shape in instruction.shapes)
    moves = lambda instruction: instruction.op in COPIES or (
        instruction.op == 'fusion' and not self._in_place(instruction))
    return [run.instruction for run in self.runs()
            if run.in_loop and writes(run.instruction) and moves(run.instruction)]

  def _in_place(self, fusion: Instruction) -> bool:
    """Whether the fusion updates a slice of one of its operands."""
    return any(inner.op in ('dynamic-update-slice', 'scatter') for inner in self._inside(fusion))

  def vector_dots(self) -> list[Instruction]:
    """Matrix products inside loops that the compiler made vector operations of, off the matrix unit."""
    return [run.instruction for run in self.runs()
            if run.in_loop and run.instruction.op == 'fusion' and run.instruction.scope.endswith('dot_general')
            and not any(inner.op in PRODUCTS for inner in self._inside(run.instruction))
            and any(inner.op == 'reduce' for inner in self._inside(run.instruction))]

  def _inside(self, fusion: Instruction) -> Iterator[Instruction]:
    for inner in self.computations[fusion.called['calls']]:
      yield inner
      if inner.op == 'fusion':
        yield from self._inside(inner)


def _covered(body: tuple[Instruction, ...]) -> Iterator[bool]:
  """For each instruction: whether a large prefetch has begun and not ended."""
  open_names: set[str] = set()
  for instruction in body:
    if instruction.op in DONES:
      open_names.difference_update(instruction.operands)
    yield bool(open_names)
    if instruction.op in STARTS and _is_large(instruction):
      open_names.add(instruction.name)


def _is_large(start: Instruction) -> bool:
  on_chip = [shape.num_bytes for shape in start.shapes if shape.space != HBM]
  return max(on_chip, default=0) >= PREFETCH_BYTES
