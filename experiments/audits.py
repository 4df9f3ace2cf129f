"""Checks of exactness that run on a config's own model."""

from collections.abc import Sequence
import dataclasses
import functools

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from experiments.verdict import Verdict, at_least, at_most
from launch.prompts import Prompt
from launch.session import Completion, Session
from models.kv_cache import KVCache
from models.protocol import LanguageModel
from specdec import rng
from specdec.drafters import Model
from specdec.engine import Params, run
from specdec.metrics import Metrics
from specdec.warp import warp

PADDING = 128  # texts are scored in multiples of this, so that few shapes occur
LOGPROB_LIMIT = 1e-4
CACHE_LIMIT = 1e-5


@dataclasses.dataclass(frozen=True)
class Tolerance:
  """What rounding may do: in float32 next to nothing, in narrower types what they resolve.

  Attributes:
    gap: of two scores that count as a tie.
    logprob: of a log-probability.
    cache: of a key or value, over the largest of its layer.
    kept: share of tokens kept when the target drafts for itself, at least.
  """

  gap: float
  logprob: float
  cache: float
  kept: float

  @classmethod
  def of(cls, session: Session) -> 'Tolerance':
    if session.params.target.config.dtype == 'float32':
      return cls(gap=2e-5, logprob=LOGPROB_LIMIT, cache=CACHE_LIMIT, kept=1.0)
    return cls(gap=0.1, logprob=0.1, cache=0.05, kept=0.9)


def equality(session: Session, prompts: Sequence[Prompt], check: str, plain: Sequence[Completion],
             drafted: Sequence[Completion]) -> Verdict:
  """Plain and speculative text, token for token; they may part at a tie of the two best scores only."""
  gaps = [gap_at_parting(session, prompt, index, a.token_ids, b.token_ids)
          for index, (prompt, a, b) in enumerate(zip(prompts, plain, drafted, strict=True))]
  parted = [gap for gap in gaps if gap is not None]
  kept = Metrics.total([completion.metrics for completion in drafted])
  note = f'{kept.emitted} tokens in {kept.passes} passes, {kept.accepted} of {kept.drafted} drafted accepted'
  if parted:
    note += f'; {len(parted)} of {len(prompts)} texts part, none at a gap wider than this'
  return at_most(check, 'gap where texts part', max(parted, default=0.0), Tolerance.of(session).gap, note)


def gap_at_parting(session: Session, prompt: Prompt, index: int, one: Sequence[int],
                   other: Sequence[int]) -> float | None:
  """How far apart the target scores the first two tokens that differ; None for equal texts."""
  if list(one) == list(other):
    return None
  common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
  if common is None:
    return float('inf')  # one text goes on where the other ends
  prompt_ids = session.encode(prompt)
  score_V = scores(session, prompt_ids, one[:common + 1])[-1]
  if session.config.sampling.temperature > 0:
    law_V = warp(score_V, session.request([prompt]).sampling)
    keys = rng.row_keys(jnp.asarray([session.config.sampling.seed + index]))
    position_B = jnp.asarray([len(prompt_ids) + common])
    score_V = np.asarray(jnp.log(law_V) + rng.gumbels(keys, position_B, len(law_V), rng.Purpose.SHARED)[0])
  return float(abs(score_V[one[common]] - score_V[other[common]]))


def scores(session: Session, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> np.ndarray:
  """[T, V]: logits that each of the tokens was drawn from, by one pass over the whole text with nothing cached."""
  text = [*prompt_ids, *token_ids]
  width = -(-len(text) // PADDING) * PADDING
  tokens_BT = np.zeros((1, width), np.int32)
  tokens_BT[0, :len(text)] = text
  rows_BR = np.full((1, -(-len(token_ids) // PADDING) * PADDING), len(text) - 1, np.int32)
  rows_BR[0, :len(token_ids)] = np.arange(len(prompt_ids), len(text)) - 1
  logits_BRV = _one_pass(session.params.target, tokens_BT, rows_BR)
  return np.asarray(logits_BRV)[0, :len(token_ids), :session.engine.num_tokens]


@jax.jit
def _one_pass(model: LanguageModel, tokens_BT: Array, rows_BR: Array) -> Array:
  batch, width = tokens_BT.shape
  cache = model.init_cache(batch, width)
  position_BT = jnp.broadcast_to(jnp.arange(width), (batch, width))
  return model(tokens_BT, position_BT, cache.causal_mask(width), cache, rows_BR).logits_BRV


def teacher_forced(session: Session, prompts: Sequence[Prompt], check: str,
                   completions: Sequence[Completion]) -> list[Verdict]:
  """Scores greedy texts again in one pass each: every token the likeliest, every logprob as recorded."""
  shortfalls, errors = [], []
  for prompt, completion in zip(prompts, completions, strict=True):
    logits_TV = scores(session, session.encode(prompt), completion.token_ids)
    chosen_T = np.take_along_axis(logits_TV, np.array(completion.token_ids)[:, None], axis=1)[:, 0]
    shortfalls.extend(logits_TV.max(axis=1) - chosen_T)
    logprob_T = chosen_T - np.asarray(jax.nn.logsumexp(logits_TV, axis=-1))
    errors.extend(np.abs(logprob_T - np.array(completion.logprobs)))
  limits = Tolerance.of(session)
  note = f'{sum(short > 0 for short in shortfalls)} of {len(shortfalls)} tokens are not the likeliest'
  return [
      at_most(f'{check}: each token is the likeliest', 'largest shortfall', float(max(shortfalls)), limits.gap, note),
      at_most(f'{check}: recorded logprobs', 'largest error', float(max(errors)), limits.logprob)]


def own_draft(session: Session, prompts: Sequence[Prompt], check: str) -> Verdict:
  """The target drafting for itself: nothing is refused."""
  engine, target = session.engine, session.params.target
  drafter = Model(engine.num_tokens)
  engine = dataclasses.replace(engine, drafter=drafter, adaptive=None)
  twin = Session(session.config, session.tokenizer, engine, Params(target, target))
  metrics = Metrics.total([completion.metrics for completion in twin.generate(prompts)])
  note = f'{metrics.accepted} of {metrics.tested}, {metrics.tokens_per_pass:.2f} tokens/pass at gamma {engine.gamma}'
  return at_least(check, 'share of tested tokens kept', metrics.alpha, Tolerance.of(session).kept, note)


def caches(session: Session, prompts: Sequence[Prompt], check: str) -> list[Verdict]:
  """Caches of a whole decode against one pass over its text."""
  request = session.request(prompts[:1])
  params = session.params_for(request)
  state = run(session.engine, params, session.engine.start(params, request))
  pattern = f'{int(state.counters.accepted_B[0])} of {int(state.counters.drafted_BM.sum())} drafted tokens kept'
  held = {'target cache': (params.target, state.cache)}
  if isinstance(session.engine.drafter, Model):
    held['draft cache'] = params.draft, state.draft_state.cache
  width = -(-int(state.length_B.max()) // PADDING) * PADDING
  return [at_most(f'{check}: {name}', 'largest difference / largest entry',
                  cache_difference(cache, _fresh_cache(model, state.tokens_BL, cache.length_B, width)),
                  Tolerance.of(session).cache, pattern) for name, (model, cache) in held.items()]


@functools.partial(jax.jit, static_argnames='width')
def _fresh_cache(model: LanguageModel, tokens_BL: Array, length_B: Array, width: int) -> KVCache:
  """The cache after one pass over the first `width` slots of each row."""
  batch, slots = tokens_BL.shape
  cache = model.init_cache(batch, slots)
  position_BT = jnp.broadcast_to(jnp.arange(width), (batch, width))
  none_BR = jnp.zeros((batch, 0), jnp.int32)
  cache = model(tokens_BL[:, :width], position_BT, cache.causal_mask(width), cache, none_BR).cache
  return cache.with_length(length_B)


def cache_difference(one: KVCache, other: KVCache) -> float:
  """The largest difference of a key or value that both caches hold, over the largest entry of its layer."""
  one, other = jax.device_get((one, other))
  live_BS = np.arange(one.capacity) < np.minimum(one.length_B, other.length_B)[:, None]
  if (one.position_BS != other.position_BS)[live_BS].any():
    return float('inf')
  layers = zip((*one.k, *one.v), (*other.k, *other.v), strict=True)
  return max(_layer_difference(a, b, live_BS) for a, b in layers)


def _layer_difference(one_BKSH: np.ndarray, other_BKSH: np.ndarray, live_BS: np.ndarray) -> float:
  live = functools.partial(np.swapaxes, axis1=1, axis2=2)
  a, b = (live(x).astype(np.float32)[live_BS] for x in (one_BKSH, other_BKSH))
  return float(np.abs(a - b).max() / np.abs(b).max())
