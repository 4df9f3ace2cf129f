"""What a step should take on a described slice: memory, cycles and hops of the compiled program added up.

    memory    bytes of weights and caches that a pass reads / (bandwidth x the share of it that is reached)
    core      the compiler's cycles / clock; they hold the wait for a weight that is not prefetched
    links     all-reduces and all-gathers x hops x time of a hop: at these sizes latency is all
    pass      max(memory + exposed links, core + links)

Links are exposed where no prefetch is in flight. Nothing here is measured: every assumption is a field that is printed
and can be set.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from ml_collections import ConfigDict

from launch.chips import Chip, all_reduce_hops
from launch.hlo import COLLECTIVES, Program, Run
from launch.slices.table import Slice
from models.errors import InputError
from specdec import theory

ASSUMED = {f'alpha {alpha}': {'alpha': alpha} for alpha in (0.6, 0.8, 0.9)}  # of configs without workloads
ASSUMED_OF_TREES = {f'{tokens} tokens a pass': {'tokens_per_pass': float(tokens)} for tokens in (2, 3, 4)}
TREES = ('lookup_tree', 'hybrid', 'medusa', 'eagle')
PARTS = ('draft/catch_up', 'draft/first', 'draft/next', 'draft/heads', 'verify', 'rest')
CATCH_UP, FIRST, NEXT, HEADS, VERIFY, REST = PARTS
OF_HEADS = ('draft/heads', 'draft/candidates', 'draft/committed', 'draft/grow')  # a draft of Medusa, of EAGLE


@dataclasses.dataclass(frozen=True)
class Assumptions:
  """What the estimate takes for granted.

  Attributes:
    hop_us: microseconds from chip to chip in a collective.
    hops: in one all-reduce; an all-gather takes half.
    clock_ghz: of the TensorCore.
    hbm_gbs: peak bandwidth of one chip's memory, 1e9 bytes a second.
    hbm_share: of the peak that decoding reaches: jax-llm-examples' Llama 3.1 70B in int8 took 6.29 ms a step on v5e-16,
      of which the bytes alone are 5.34.
    halvings: trips of the bisection behind top-k and top-p; the conditionals around them count as taken.
  """

  hop_us: float
  hops: float
  clock_ghz: float
  hbm_gbs: float
  hbm_share: float = 0.85
  halvings: int = 30

  @classmethod
  def of(cls, made: Slice, chip: Chip, given: Sequence[str] = ()) -> 'Assumptions':
    """Those of a chip, changed by texts such as 'hop_us=2.7'.

    Raises:
      InputError: for a text that names no field, or gives no positive number.
    """
    fields = dict(hop_us=1.0, hops=float(all_reduce_hops(made)), clock_ghz=chip.clock_ghz, hbm_gbs=chip.hbm_gbs)
    for text in given:
      name, _, number = text.partition('=')
      known = [field.name for field in dataclasses.fields(cls)]
      if name not in known:
        raise InputError(f'--assume={text}: {name!r} is no assumption: use one of {", ".join(known)}')
      try:
        fields[name] = float(number)
      except ValueError:
        raise InputError(f'--assume={text}: {number!r} is not a number') from None
      if not 0 < fields[name] < float('inf'):
        raise InputError(f'--assume={text}: it must be positive')
    return cls(**fields)


@dataclasses.dataclass(frozen=True)
class Work:
  """What the compiled program says of one part of a step.

  Attributes:
    cycles: the compiler's.
    layer_reduces, other_reduces: all-reduces of attention and MLP outputs, and of anything else (the embedding).
    gathers: all-gathers (the logits).
    exposed_reduces: all-reduces with no prefetch in flight.
    exposed_gathers: likewise.
  """

  cycles: int = 0
  layer_reduces: int = 0
  other_reduces: int = 0
  gathers: int = 0
  exposed_reduces: int = 0
  exposed_gathers: int = 0

  @property
  def reduces(self) -> int:
    return self.layer_reduces + self.other_reduces

  def __add__(self, other: 'Work') -> 'Work':
    return Work(*(mine + theirs for mine, theirs in zip(
        dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def part_of(scope: str) -> str:
  """The part of a step that a JAX name stack belongs to."""
  holds = lambda part: f'/{part}/' in f'{scope}/'
  if any(holds(part) for part in OF_HEADS):
    return HEADS
  return next((part for part in PARTS[:-1] if holds(part)), REST)


def trips(halvings: int, scope: str) -> int:
  """How often the body of a loop runs in one pass, by the name stack of the loop.

  The bodies of optional passes and of the loop over drafted tokens count once: a part is one pass.
  """
  return halvings if '/cond/' in scope else 1


def work_of(program: Program, assumptions: Assumptions) -> dict[str, Work]:
  """One pass of each part, from the loops of a compiled `run`."""
  works = dict.fromkeys(PARTS, Work())
  for run in program.runs(lambda scope: trips(int(assumptions.halvings), scope)):
    if run.in_loop:
      works[part_of(run.scope)] += _work(run)
  return works


def _work(run: Run) -> Work:
  cycles = run.times * run.instruction.cycles
  if run.instruction.op not in COLLECTIVES:
    return Work(cycles)
  exposed = 0 if run.covered else run.times
  if 'all-gather' in run.instruction.op:
    return Work(cycles, gathers=run.times, exposed_gathers=exposed)
  in_layer = '/attention/' in run.scope or '/mlp/' in run.scope
  return Work(cycles, layer_reduces=run.times * in_layer, other_reduces=run.times * (not in_layer),
              exposed_reduces=exposed)


@dataclasses.dataclass(frozen=True)
class Pass:
  """Predicted milliseconds of one pass, with what they come from."""

  memory_ms: float
  core_ms: float
  links_ms: float
  exposed_ms: float

  @classmethod
  def of(cls, work: Work, num_bytes: int, assumptions: Assumptions) -> 'Pass':
    hop_ms = assumptions.hops * assumptions.hop_us / 1e3
    return cls(
        memory_ms=num_bytes / (assumptions.hbm_gbs * assumptions.hbm_share * 1e6),
        core_ms=work.cycles / (assumptions.clock_ghz * 1e6),
        links_ms=hop_ms * (work.reduces + work.gathers / 2),
        exposed_ms=hop_ms * (work.exposed_reduces + work.exposed_gathers / 2))

  @property
  def ms(self) -> float:
    return max(self.memory_ms + self.exposed_ms, self.core_ms + self.links_ms)

  def __str__(self) -> str:
    return (f'{self.ms:.2f} = max(memory {self.memory_ms:.2f} + exposed links {self.exposed_ms:.2f}, '
            f'core {self.core_ms:.2f} + links {self.links_ms:.2f})')


@dataclasses.dataclass(frozen=True)
class Step:
  """The passes of a speculative step and of plain decoding, in milliseconds; without a draft model 0."""

  plain_ms: float
  first_ms: float
  following_ms: float
  verify_ms: float

  def ms(self, gamma: int) -> float:
    """One step that drafts `gamma` tokens: the first pass takes two tokens, the others one each."""
    if gamma == 0:
      return self.plain_ms
    return self.first_ms + (gamma - 1) * self.following_ms + self.verify_ms


@dataclasses.dataclass(frozen=True)
class Workload:
  """A task with its acceptance.

  Attributes:
    name: of the task.
    alpha: acceptance of a tested token, of chains.
    tokens_per_pass: of trees instead, which have no one acceptance.
    published_ms, published_speedup: speculative, at `published_gamma`, on the hardware of the paper; None where nothing
      is published.
    published_gamma: drafted tokens per step of the published figures.
  """

  name: str
  alpha: float | None = None
  tokens_per_pass: float | None = None
  published_ms: float | None = None
  published_speedup: float | None = None
  published_gamma: int | None = None

  def __post_init__(self):
    if (self.alpha is None) == (self.tokens_per_pass is None):
      raise InputError(f'plan.workloads.{self.name}: give alpha (of a chain) or tokens_per_pass (of a tree)')
    if self.alpha is not None and not 0 <= self.alpha <= 1:
      raise InputError(f'plan.workloads.{self.name}.alpha={self.alpha} must lie in 0..1')
    if self.tokens_per_pass is not None and not self.tokens_per_pass >= 1:
      raise InputError(f'plan.workloads.{self.name}.tokens_per_pass={self.tokens_per_pass} must be 1 or more')

  def row(self, step: Step, gamma: int) -> dict[str, Any]:
    tokens = float(theory.expected_tokens(self.alpha, gamma)) if self.alpha is not None else self.tokens_per_pass
    ms = step.ms(gamma) / tokens
    published = gamma == self.published_gamma
    return {
        'name': self.name, 'alpha': self.alpha, 'gamma': gamma, 'tokens_per_pass': tokens,
        'measured_ms_per_token': None, 'predicted_ms_per_token': ms, 'predicted_speedup': step.plain_ms / ms,
        'published_ms_per_token': self.published_ms if published else None,
        'published_speedup': self.published_speedup if published else None}


def workloads_of(config: ConfigDict) -> list[Workload]:
  """Of the `plan.workloads` section, where the config has one.

  Raises:
    InputError: for an acceptance that cannot be.
  """
  section = ASSUMED_OF_TREES if config.drafter.name in TREES else ASSUMED
  if 'plan' in config:
    section = config.plan.workloads.to_dict()
  return [Workload(name, **fields) for name, fields in section.items()]


def published_plain_ms(config: ConfigDict) -> float | None:
  """Per token of plain decoding, by the paper that the config sets up."""
  return config.plan.published_plain_ms if 'plan' in config else None
