"""The engine: prefill, then one step = propose, verify, accept, commit, until every row has ended.

`generate` runs the steps in one jitted `lax.while_loop`; `stream` runs the same step from the host. Plain decoding is
the same engine with the `Empty` drafter.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any

from flax import struct
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from models.errors import InputError
from models.kv_cache import KVCache
from models.protocol import LanguageModel, empty_cache
from models.sharding import put_whole, whole
from models.source import Source
from specdec import rng
from specdec.accept.protocol import AcceptRule
from specdec.adaptive import AcceptanceEstimate, AdaptiveGamma
from specdec.commit import Limits, Origin, Reason, commit
from specdec.draft import TreeDraft, overlap
from specdec.drafters.model import CATCH_UP
from specdec.drafters.protocol import Context, Drafter
from specdec.features import Reads, features_of
from specdec.metrics import Counters, Metrics
from specdec.path import path_overlap, straighten
from specdec.state import DecodeState
from specdec.verify import verify
from specdec.warp import Sampling

SLOT_MULTIPLE = 128
SMALLEST_BUCKET = 32


@struct.dataclass
class Params:
  """What the device holds besides the state: the target, and whatever the drafter needs (None for lookup)."""

  target: LanguageModel
  draft: Any = None


@dataclasses.dataclass(frozen=True)
class Request:
  """One batch.

  Attributes:
    prompts: token ids per row, none empty.
    seeds: one per row; a row's text depends on its own seed only.
    sampling: filters of the law.
    max_new_tokens: per row.
    eos_ids: ids that end a row (and are emitted).
    stop_table: `specdec.stops.stop_table`; None is no stop strings.
    sources: token ids per row that an encoder reads, none empty; None for a target without one.
  """

  prompts: Sequence[Sequence[int]]
  seeds: Sequence[int]
  sampling: Sampling
  max_new_tokens: int
  eos_ids: Sequence[int] = ()
  stop_table: np.ndarray | None = None
  sources: Sequence[Sequence[int]] | None = None


@dataclasses.dataclass(frozen=True)
class Result:
  """What a batch came to, on the host.

  Attributes:
    tokens: emitted ids per row.
    origins: `Origin` of each.
    logprobs: target log-probability of each (raw logits); None unless the engine records them.
    reasons: why each row ended.
    metrics: per row.
  """

  tokens: list[list[int]]
  origins: list[list[Origin]]
  logprobs: list[list[float]] | None
  reasons: list[Reason]
  metrics: list[Metrics]

  @property
  def total(self) -> Metrics:
    return Metrics.total(self.metrics)


@dataclasses.dataclass(frozen=True)
class Engine:
  """The static part of decoding: hashable, and a static argument of every jitted function.

  Attributes:
    drafter, rule: where drafted tokens come from, and how they are judged.
    gamma: drafted tokens per step, at most; in a tree, its nodes.
    capacity: prompt plus output tokens per row, at most.
    num_tokens: real tokens of the vocabulary; padding ids beyond are never emitted.
    widths: widths of verify passes besides γ + 1, e.g. (1,): a step whose drafts are all short runs a narrow pass.
    rows: query rows per verify pass, at least.
    logprobs: record the target's log-probability of each emitted token.
    adaptive: choose γ per row and step; None is always `gamma`.
    source_capacity: tokens that an encoder reads per row, at most; 0 for a target without one.
  """

  drafter: Drafter
  rule: AcceptRule
  gamma: int
  capacity: int
  num_tokens: int
  widths: tuple[int, ...] = (1,)
  rows: int = 1
  logprobs: bool = False
  adaptive: AdaptiveGamma | None = None
  source_capacity: int = 0

  def __post_init__(self):
    if self.gamma < 0:
      raise ValueError(f'gamma must be 0 or more, got {self.gamma}')
    if self.rows < 1:
      raise ValueError(f'rows must be 1 or more, got {self.rows}')
    if self.adaptive and len(self.adaptive.verify_cost) != self.gamma + 1:
      raise ValueError(f'adaptive gamma needs verify costs for widths 1..{self.gamma + 1}, '
                       f'got {len(self.adaptive.verify_cost)}')
    if self.drafter.is_tree and not self.rule.trees:
      raise ValueError(f"the rule {self.rule.name!r} judges chains, {self.drafter.name!r} drafts trees: use "
                       "'multiround' or 'coupled'")
    if self.drafter.draws and not self.rule.laws:
      raise ValueError(f"the rule {self.rule.name!r} judges point masses, {self.drafter.name!r} draws its tokens: use "
                       "'rejection', 'block', 'multiround' or 'coupled'")
    if self.adaptive and self.levels != self.gamma:
      raise ValueError('adaptive gamma is for chains: a tree has its shape')

  @property
  def levels(self) -> int:
    """Drafted tokens on one path, at most."""
    return self.drafter.levels(self.gamma)

  @property
  def slots(self) -> int:
    """Allocated slots per row: the capacity and the slack of one step, which may write past it."""
    return slots_for(self.capacity, self.gamma, self.rows)

  @property
  def verify_widths(self) -> tuple[int, ...]:
    return tuple(sorted({w for w in self.widths if 0 < w <= self.gamma} | {self.gamma + 1}))

  def generate(self, params: Params, request: Request) -> Result:
    """Decodes a batch: one device program for the prompts, one for everything else.

    Raises:
      InputError: an empty prompt or source, one that leaves no room for a token, or ids that are no tokens.
    """
    state = self.start(params, request)
    return to_result(run(self, params, state))

  def stream(self, params: Params, request: Request) -> Iterator[DecodeState]:
    """Yields the state after the prompts and after each step, until all rows have ended.

    A yielded state is donated to the next step: read from it, do not keep it.

    Raises:
      InputError: see `generate`.
    """
    state = self.start(params, request)
    yield state
    while bool(jax.device_get(jnp.any(state.live_B))):
      state = step_once(self, params, state)
      yield state

  def start(self, params: Params, request: Request) -> DecodeState:
    """The state after the prompts, which share one prefill pass padded to a bucket.

    Raises:
      InputError: see `generate`.
    """
    lengths = self._check(request)
    source = self._source(params, request)
    tokens_BL = np.zeros((len(lengths), self.slots), np.int32)
    for row, prompt in enumerate(request.prompts):
      tokens_BL[row, :len(prompt)] = prompt
    length_B = np.asarray(lengths, np.int32)
    room_B, wanted = self.capacity - length_B, min(request.max_new_tokens, self.capacity)
    eos_E = np.full(max(4, len(request.eos_ids)), -1, np.int32)
    eos_E[:len(request.eos_ids)] = list(request.eos_ids)
    stop_ZV = np.zeros((1, 1), np.int32) if request.stop_table is None else request.stop_table
    limits = Limits(eos_E, stop_ZV, length_B + np.minimum(room_B, wanted), room_B < wanted)
    seeds_B = np.asarray([seed & 0xFFFFFFFF for seed in request.seeds], np.uint32)
    *arrays, source = put_whole((tokens_BL, length_B, seeds_B, limits, source))
    return prefill(self, params, *arrays, request.sampling, bucket_for(self, request), source)

  def _source(self, params: Params, request: Request) -> Source | None:
    """What the encoder reads, padded to a bucket."""
    sources = request.sources
    if not params.target.has_encoder:
      if sources is not None:
        raise InputError('the target has no encoder to read sources: leave them out')
      return None
    if sources is None or len(sources) != len(request.prompts):
      raise InputError(f'the target reads a source for each text: {len(request.prompts)} texts have '
                       f'{len(sources or ())} sources')
    lengths = [len(source) for source in sources]
    if min(lengths) == 0:
      raise InputError(f'source {lengths.index(0)} is empty: give it at least one token')
    if max(lengths) > self.source_capacity:
      raise InputError(f'source {lengths.index(max(lengths))} has {max(lengths)} tokens, more than '
                       f'engine.source_capacity={self.source_capacity}: raise it or shorten the source')
    self._check_ids('source', sources)
    tokens_BS = np.zeros((len(lengths), source_bucket_for(self, request)), np.int32)
    for row, source in enumerate(sources):
      tokens_BS[row, :len(source)] = source
    return Source(tokens_BS, np.asarray(lengths, np.int32))

  def _check(self, request: Request) -> list[int]:
    lengths = [len(prompt) for prompt in request.prompts]
    if not lengths:
      raise InputError('no prompts: give at least one')
    if min(lengths) == 0:
      raise InputError(f'prompt {lengths.index(0)} is empty: give it at least one token')
    if max(lengths) >= self.capacity:
      raise InputError(f'prompt {lengths.index(max(lengths))} has {max(lengths)} tokens, which leaves no room in '
                       f'engine.capacity={self.capacity}: raise engine.capacity or shorten the prompt')
    if len(request.seeds) != len(lengths):
      raise InputError(f'{len(lengths)} prompts have {len(request.seeds)} seeds: give one each')
    self._check_ids('prompt', request.prompts)
    if request.max_new_tokens < 1:
      raise InputError(f'max_new_tokens must be 1 or more, got {request.max_new_tokens}')
    return lengths

  def _check_ids(self, what: str, texts: Sequence[Sequence[int]]) -> None:
    for row, text in enumerate(texts):
      if min(text) < 0 or max(text) >= self.num_tokens:
        raise InputError(f'{what} {row} holds ids outside of 0..{self.num_tokens - 1}, the tokens of the model')


def bucket_for(engine: Engine, request: Request) -> int:
  """Width of the prefill pass."""
  return bucket_of(max(len(prompt) for prompt in request.prompts), engine.slots)


def source_bucket_for(engine: Engine, request: Request) -> int:
  """Width of what an encoder reads; 0 without one."""
  return bucket_of(max(map(len, request.sources)), engine.source_capacity) if request.sources else 0


def bucket_of(longest: int, most: int) -> int:
  """A power of two, or `most`, so that few programs serve all prompts."""
  return min(most, max(SMALLEST_BUCKET, 1 << (longest - 1).bit_length()))


def slots_for(capacity: int, gamma: int, rows: int) -> int:
  """Slots to allocate for `capacity` tokens and what a step may write past them: γ tokens and padding rows."""
  needed = capacity + max(gamma + rows, CATCH_UP)
  return -(-needed // SLOT_MULTIPLE) * SLOT_MULTIPLE


@functools.partial(jax.jit, static_argnames=('engine', 'bucket'))
def prefill(engine: Engine, params: Params, tokens_BL: Array, length_B: Array, seeds_B: Array, limits: Limits,
            sampling: Sampling, bucket: int, source: Source | None = None) -> DecodeState:
  """Runs all prompt tokens but the newest through the target: no logits, so no vocabulary-wide array.

  Encoders, of target and draft, run here and nowhere else.
  """
  batch = tokens_BL.shape[0]
  with jax.named_scope('prefill'):
    cache = empty_cache(params.target, batch, engine.slots, source)
    position_BT = jnp.broadcast_to(jnp.arange(bucket), (batch, bucket))
    none_BR = jnp.zeros((batch, 0), jnp.int32)
    output = params.target(tokens_BL[:, :bucket], position_BT, cache.causal_mask(bucket), cache, none_BR)
    reads = engine.drafter.reads
    features_BTF = None if reads is Reads.NOTHING else features_of(output, reads)
    draft_state = engine.drafter.init(params.draft, tokens_BL, length_B, bucket, features_BTF, source)
  zeros_B = jnp.zeros((batch,), jnp.int32)
  return laid_out(DecodeState(
      tokens_BL=tokens_BL, length_B=length_B, prompt_length_B=length_B, reason_B=zeros_B, stop_state_B=zeros_B,
      origin_BL=jnp.zeros(tokens_BL.shape, jnp.int8),
      logprob_BL=jnp.zeros(tokens_BL.shape, jnp.float32) if engine.logprobs else None,
      row_key_B=rng.row_keys(seeds_B), cache=output.cache.with_length(length_B - 1), draft_state=draft_state,
      estimate=AcceptanceEstimate.zeros(batch) if engine.adaptive else None,
      counters=Counters.zeros(batch, engine.levels, len(engine.verify_widths)), sampling=sampling, limits=limits,
      source=source))


def step(engine: Engine, params: Params, state: DecodeState) -> DecodeState:
  """One round: every live row gains between 1 and γ + 1 tokens, or ends because its next law is not finite.

  A law that is not finite counts only where plain decoding would draw from it: not behind a rejected token.
  """
  live_B = state.live_B
  with jax.named_scope('draft'):
    draft, draft_state = engine.drafter.propose(
        params.draft, state.draft_state, context_of(engine, state), engine.gamma)
  with jax.named_scope('verify'):
    scores, cache = verify(
        params.target, state.cache, state.newest_B, draft, state.sampling, num_tokens=engine.num_tokens,
        widths=engine.verify_widths, rows=engine.rows, logprobs=engine.logprobs, reads=engine.drafter.reads)
  with jax.named_scope('accept'):
    verdict = engine.rule(_row_keys(engine, state), state.length_B, draft, scores.probs_BTV)
    if isinstance(draft, TreeDraft):
      overlap_BP = path_overlap(draft, scores.probs_BTV, verdict)
    else:
      overlap_BP = overlap(draft, scores.probs_BTV)
  with jax.named_scope('commit'):
    draft, scores, cache = straighten(draft, verdict, scores, cache)
    finite_BT = ~jnp.isnan(scores.probs_BTV[..., 0])
    num_finite_B = jnp.sum(jnp.cumprod(finite_BT.astype(jnp.int32), axis=1), axis=1)
    added = commit(draft, verdict, num_finite_B, state.limits, state.length_B, state.reason_B, state.stop_state_B)
    counters = state.counters.add_round(
        live_B & (added.count_B > 0), draft.count_B, verdict.num_accepted_B, added.count_B,
        overlap_BP, scores.width_index)
    state = state.add(added, scores.logprobs_BTV)
    estimate = state.estimate
    if estimate is not None:
      updated = estimate.update(
          counters.accepted_B - state.counters.accepted_B,
          jnp.sum(counters.tested_BM - state.counters.tested_BM, axis=1))
      estimate = jax.tree.map(lambda new_B, old_B: jnp.where(live_B, new_B, old_B), updated, estimate)
    return laid_out(state.replace(
        cache=cache.with_length(state.length_B - 1),
        draft_state=engine.drafter.observe(draft_state, state.length_B, scores.features_BTF),
        estimate=estimate, counters=counters))


def _row_keys(engine: Engine, state: DecodeState) -> Array:
  """Keys by position, or by step for rules that look past the first rejected token."""
  return rng.step_keys(state.row_key_B, state.length_B) if engine.rule.by_step else state.row_key_B


def laid_out(state: DecodeState) -> DecodeState:
  """On a mesh, all of the state but the caches lies on every device, before a step as after it."""
  is_cache = lambda x: isinstance(x, KVCache)
  return jax.tree.map(lambda x: x.laid_out() if is_cache(x) else whole(x), state, is_leaf=is_cache)


def context_of(engine: Engine, state: DecodeState) -> Context:
  """γ never exceeds what the row can still emit besides its correction or bonus token."""
  gamma_B = jnp.full_like(state.length_B, engine.gamma)
  if engine.adaptive is not None:
    gamma_B = engine.adaptive.choose(state.estimate, engine.verify_widths)
  gamma_B = jnp.minimum(gamma_B, state.limits.max_length_B - state.length_B - 1)
  return Context(
      tokens_BL=state.tokens_BL, length_B=state.length_B, gamma_B=jnp.where(state.live_B, gamma_B, 0),
      live_B=state.live_B, row_key_B=_row_keys(engine, state), sampling=state.sampling,
      purpose=engine.rule.draft_purpose, source=state.source)


@functools.partial(jax.jit, static_argnames=('engine',), donate_argnames=('state',))
def run(engine: Engine, params: Params, state: DecodeState) -> DecodeState:
  """All steps, in one device loop."""
  return laid_out(
      jax.lax.while_loop(lambda s: jnp.any(s.live_B), lambda s: step(engine, params, s), state))


@functools.partial(jax.jit, static_argnames=('engine',), donate_argnames=('state',))
def step_once(engine: Engine, params: Params, state: DecodeState) -> DecodeState:
  """The step of `run`, called from the host."""
  return step(engine, params, state)


def to_result(state: DecodeState) -> Result:
  """Reads the outputs back to the host, in one transfer."""
  wanted = (state.tokens_BL, state.origin_BL, state.logprob_BL, state.prompt_length_B, state.length_B,
            state.reason_B, state.counters)
  tokens, origins, logprobs, starts, ends, reasons, counters = jax.device_get(wanted)
  rows = range(len(starts))
  cut = lambda x, row: x[row, starts[row]:ends[row]].tolist()
  return Result(
      tokens=[cut(tokens, row) for row in rows],
      origins=[[Origin(o) for o in cut(origins, row)] for row in rows],
      logprobs=None if logprobs is None else [cut(logprobs, row) for row in rows],
      reasons=[Reason(int(reason)) for reason in reasons],
      metrics=[Metrics.from_counters(jax.tree.map(lambda x, row=row: x[row:row + 1], counters)) for row in rows])
