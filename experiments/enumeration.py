"""The exact law of speculative text, by enumeration in float64 through the accept rules themselves.

Every path a drafter can draw is taken with every outcome of the accept tests, round after round, until γ + 1 tokens
are out. Nothing of the rule is written twice: how probable it is to keep n tokens comes from asking `num_accepted` at
which uniforms it changes its mind, and the token after the kept ones from `next_law`. What plain decoding would draw is
the product of the target's laws, so the two must agree to rounding.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import itertools

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from experiments.draft_paths import Drafter, Law, NoisyDrafter, Path, Text
from specdec.accept import block, coupled, rejection
from specdec.adaptive import AcceptanceEstimate, AdaptiveGamma
from specdec.draft import Draft, Verdict
from specdec.warp import Sampling, warp

GRID_BITS = 53  # a uniform is k / 2**53, all a float64 can tell apart
LARGEST_UNIFORM = 1 - 2.0**-GRID_BITS

_warp = jax.jit(warp)


def table_law(table: np.ndarray) -> Law:
  """The law of a [V], [V, V] or [V, V, V] table: the last axis is the next token, the one before it the newest."""
  table = np.asarray(table, np.float64)
  order = table.ndim - 1
  return lambda text: table[text[len(text) - order:]]


def warped(table: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
           num_tokens: int | None = None) -> np.ndarray:
  """The table that `warp` makes of another, after cutting padding ids; rounding of float32 is normalised away."""
  logits = jnp.log(jnp.asarray(np.asarray(table)[..., :num_tokens], jnp.float32))
  law = np.asarray(_warp(logits, Sampling.create(temperature, top_k, top_p)), np.float64)
  return law / law.sum(axis=-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Rule:
  """The parts of a rule, the token rule's unless others are given; mutations put wrong ones in their place."""

  num_accepted: Callable[[Array, Draft, Array], Array] = dataclasses.field(
      default_factory=lambda: rejection.num_accepted)
  next_law: Callable[[Draft, Array, Array], Array] = dataclasses.field(default_factory=lambda: rejection.next_law)

  @classmethod
  def block(cls) -> 'Rule':
    """The parts of block verification."""
    return cls(block.num_accepted, block.next_law)


@dataclasses.dataclass(frozen=True)
class Case:
  """A target, a drafter and how they meet.

  Attributes:
    name: for reports.
    target: the law that plain decoding draws from.
    drafter: where drafted tokens come from.
    gamma: drafted tokens per round, at most; the law of gamma + 1 tokens is computed.
    vocab: real tokens.
    prompt: the text before.
    scored: the laws that the rule is given; the target's in anything correct.
    adaptive: chooses γ of each round from what earlier rounds accepted; None is always `gamma`.
  """

  name: str
  target: Law
  drafter: Drafter
  gamma: int
  vocab: int
  prompt: Text = (0, 1)
  scored: Law | None = None
  adaptive: AdaptiveGamma | None = None


def law_of_length(target: Law, prompt: Text, length: int, vocab: int) -> np.ndarray:
  """[V, ..., V]: the law of the `length` tokens after a prompt, one after the other from `target`."""
  law = np.zeros((vocab,) * length)
  for text in np.ndindex(law.shape):
    law[text] = np.prod([target(prompt + text[:i])[token] for i, token in enumerate(text)])
  return law


def plain_law(case: Case) -> np.ndarray:
  """[V, ..., V]: the law of the first γ + 1 tokens of plain decoding."""
  return law_of_length(case.target, case.prompt, case.gamma + 1, case.vocab)


def speculative_law(case: Case, rule: Rule | None = None) -> np.ndarray:
  """[V, ..., V]: the law of the first γ + 1 tokens of speculative decoding."""
  length = case.gamma + 1
  law = np.zeros((case.vocab,) * length)
  pending = [defaultdict(float) for _ in range(length)]  # by tokens out: mass of (text, accepted, tested)
  pending[0][(), 0.0, 0.0] = 1.0
  for out in range(length):
    for (text, *counts), mass in pending[out].items():
      for emitted, accepted, tested, prob in _round(case, rule or Rule(), text, gamma_of_round(case, counts)):
        longer = (text + emitted)[:length]
        if len(longer) == length:
          law[longer] += mass * prob
        else:
          pending[len(longer)][longer, *_updated(case, counts, accepted, tested)] += mass * prob
  return law


def gamma_of_round(case: Case, counts: Sequence[float]) -> int:
  """γ after rounds with these (discounted) counts of accepted and tested tokens."""
  if case.adaptive is None:
    return case.gamma
  estimate = AcceptanceEstimate(*(jnp.asarray([count], jnp.float32) for count in counts))
  return int(case.adaptive.choose(estimate, range(1, case.gamma + 2))[0])


def _updated(case: Case, counts: Sequence[float], accepted: int, tested: int) -> tuple[float, float]:
  if case.adaptive is None:
    return 0.0, 0.0
  estimate = AcceptanceEstimate(*(jnp.asarray([count], jnp.float32) for count in counts))
  estimate = estimate.update(jnp.asarray([accepted]), jnp.asarray([tested]))
  return float(estimate.accepted_B[0]), float(estimate.tested_B[0])


def tokens_per_round(case: Case, rule: Rule | None = None) -> float:
  """Expected tokens of the first round, correction or bonus included."""
  return sum(prob * len(emitted) for emitted, _, _, prob in _round(case, rule or Rule(), (), case.gamma))


def _round(case: Case, rule: Rule, text: Text, gamma: int) -> Iterator[tuple[Text, int, int, float]]:
  """All outcomes of one round: emitted tokens, how many were accepted and tested, probability."""
  context = case.prompt + text
  paths = list(case.drafter(context, gamma))
  accept_PT, next_PTV = _judge(case, rule, context, paths)
  for path, accept_T, next_TV in zip(paths, accept_PT, next_PTV, strict=False):
    count = len(path.tokens)
    tokens = path.tokens + (0,) * (case.gamma - count)
    for accepted in map(int, np.flatnonzero(accept_T)):
      for token in np.flatnonzero(next_TV[accepted]):
        emitted = (*tokens[:accepted], int(token))
        yield emitted, accepted, min(accepted + 1, count), path.prob * accept_T[accepted] * next_TV[accepted][token]


def _judge(case: Case, rule: Rule, context: Text, paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
  """The rule on all paths at once, padded to one shape so that one compiled function serves all texts."""
  rows = -(-len(paths) // case.vocab**case.gamma) * case.vocab**case.gamma
  point_mass = paths[0].laws is None
  tokens = np.zeros((rows, case.gamma), np.int32)
  laws = np.full((rows, case.gamma, case.vocab), 1 / case.vocab)
  count = np.zeros(rows, np.int32)
  target = np.full((rows, case.gamma + 1, case.vocab), 1 / case.vocab)
  for row, path in enumerate(paths):
    count[row] = len(path.tokens)
    tokens[row, :count[row]] = path.tokens
    if not point_mass and path.laws:
      laws[row, :count[row]] = path.laws
    for i in range(count[row] + 1):
      target[row, i] = (case.scored or case.target)(context + path.tokens[:i])
  with jax.enable_x64(True):
    draft = Draft(jnp.asarray(tokens), None if point_mass else jnp.asarray(laws), jnp.asarray(count))
    return jax.device_get(_outcomes(rule, draft, jnp.asarray(target)))


@functools.partial(jax.jit, static_argnames=('rule',))
def _outcomes(rule: Rule, draft: Draft, target_PTV: Array) -> tuple[Array, Array]:
  """[P, T] probability that n tokens are kept, and [P, T, V] the law of the token after n kept ones."""
  num_paths, width = draft.tokens_BM.shape
  after = lambda n: rule.next_law(draft, target_PTV, jnp.full((num_paths,), n, jnp.int32))
  return accept_law(rule, draft, target_PTV), jax.vmap(after, out_axes=1)(jnp.arange(width + 1))


def accept_law(rule: Rule, draft: Draft, target_PTV: Array) -> Array:
  """[P, T]: the share of the uniforms with which n tokens are kept, a uniform being k / 2**53.

  A rule compares each uniform with one value (`turns`), so that below or from it on is all that matters: each of the
  2**M cells is asked once.
  """
  width = draft.width
  turn_PM = turns(rule, draft, target_PTV)
  high_CM = np.array(list(itertools.product((False, True), repeat=width)))
  ask = lambda high_M: rule.num_accepted(
      jnp.broadcast_to(jnp.where(high_M, LARGEST_UNIFORM, 0.0), turn_PM.shape), draft, target_PTV)
  share_CP = jnp.prod(jnp.where(high_CM[:, None], 1 - turn_PM, turn_PM), axis=-1)
  return jnp.einsum('CP,CPT->PT', share_CP, jax.nn.one_hot(jax.vmap(ask)(high_CM), width + 1, dtype=jnp.float64))


def turns(rule: Rule, draft: Draft, target_PTV: Array) -> Array:
  """[P, M]: what each uniform is compared with; 1 where it decides nothing.

  Bisection, with the uniforms before as small and those behind as large as they can be. A rule that goes token by token
  then reaches the one in question, and one that takes the last that passes does not look away from it.
  """
  width = draft.width
  before_MM, own_MM = np.tri(width, k=-1, dtype=bool)[:, None], np.eye(width, dtype=bool)[:, None]

  def asked(uniform_PM):
    uniform_MPM = jnp.where(own_MM, uniform_PM, jnp.where(before_MM, 0.0, LARGEST_UNIFORM))
    return jax.vmap(lambda uniform_PM: rule.num_accepted(uniform_PM, draft, target_PTV))(uniform_MPM).T

  lowest_PM = asked(jnp.zeros(draft.tokens_BM.shape))
  return bisect(lambda uniform_PM: asked(uniform_PM) == lowest_PM, draft.tokens_BM.shape)


def bisect(holds: Callable[[Array], Array], shape: tuple[int, ...]) -> Array:
  """The share of the uniforms k / 2**53 for which `holds`, which is so for small ones and not for large ones."""

  def halve(_, bounds):
    low, high = bounds  # holds below low, does not from high on
    middle = (low + high) // 2
    held = holds(middle * 2.0**-GRID_BITS)
    return jnp.where(held, jnp.minimum(middle + 1, high), low), jnp.where(held, high, middle)

  bounds = jnp.zeros(shape, jnp.int64), jnp.full(shape, 2**GRID_BITS, jnp.int64)
  low, _ = jax.lax.fori_loop(0, GRID_BITS + 1, halve, bounds)
  return low * 2.0**-GRID_BITS


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A law against the one it must equal.

  Attributes:
    max_error: largest difference of two probabilities.
    total_variation: half the sum of the differences.
    forbidden: mass on texts that plain decoding never emits.
  """

  max_error: float
  total_variation: float
  forbidden: float

  @property
  def exact(self) -> bool:
    """To rounding, and to nothing at all where plain decoding never goes."""
    return self.max_error < 1e-12 and self.forbidden == 0


def compare(law: np.ndarray, expected: np.ndarray) -> Comparison:
  difference = np.abs(law - expected)
  return Comparison(float(difference.max()), float(difference.sum() / 2), float(law[expected == 0].sum()))


def enumerate_case(case: Case, rule: Rule | None = None) -> Comparison:
  """Speculative against plain."""
  return compare(speculative_law(case, rule), plain_law(case))


@dataclasses.dataclass(frozen=True)
class CoupledRule:
  """The parts of the coupled rule, as they are when this is made; mutations put others in their place."""

  choices: Callable[[Array, Array], Array] = dataclasses.field(default_factory=lambda: coupled.choices)
  match: Callable[[Array, Draft], Verdict] = dataclasses.field(default_factory=lambda: coupled.match)


def coupled_texts(case: Case, propose: NoisyDrafter | None, noise_KV: np.ndarray,
                  rule: CoupledRule | None = None) -> np.ndarray:
  """[R, γ + 1]: the text under each of the K**(γ + 1) assignments of noise to its positions.

  Without a drafter, plain decoding. Positions past the text, which a draft may reach, get the first noise.
  """
  rule = rule or CoupledRule()
  length = case.gamma + 1
  noise_RLV = noise_KV[np.array(list(itertools.product(range(len(noise_KV)), repeat=length)))]
  noise_RLV = np.concatenate([noise_RLV, np.repeat(noise_RLV[:1, :1], length, axis=1).repeat(len(noise_RLV), 0)], 1)
  texts: list[Text] = [()] * len(noise_RLV)
  while min(map(len, texts)) < length:
    drafts = [propose(case.prompt + text, list(noise_V[len(text):][:case.gamma])) if propose else ()
              for text, noise_V in zip(texts, noise_RLV, strict=True)]
    texts = _matched(case, rule, texts, drafts, noise_RLV)
  return np.array(texts)


def _matched(case: Case, rule: CoupledRule, texts: list[Text], drafts: list[Text], noise_RLV: np.ndarray) -> list[Text]:
  """All rows after one round, cut at γ + 1 tokens."""
  length = case.gamma + 1
  tokens = np.zeros((len(texts), case.gamma), np.int32)
  target = np.full((len(texts), length, case.vocab), 1 / case.vocab)
  for row, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
    tokens[row, :len(draft)] = draft
    for i in range(len(draft) + 1):
      target[row, i] = case.target(case.prompt + text + draft[:i])
  noise_RTV = np.stack([noise_V[len(text):][:length] for text, noise_V in zip(texts, noise_RLV, strict=True)])
  counts = np.array([len(draft) for draft in drafts], np.int32)
  with jax.enable_x64(True):
    verdict = _coupled_verdict(rule, jnp.asarray(noise_RTV), Draft(jnp.asarray(tokens), None, jnp.asarray(counts)),
                               jnp.asarray(target))
  kept, after = jax.device_get((verdict.num_accepted_B, verdict.next_token_B))
  return [(text + draft[:kept[row]] + (int(after[row]),))[:length]
          for row, (text, draft) in enumerate(zip(texts, drafts, strict=True))]


@functools.partial(jax.jit, static_argnames=('rule',))
def _coupled_verdict(rule: CoupledRule, noise_RTV: Array, draft: Draft, target_RTV: Array) -> Verdict:
  return rule.match(rule.choices(noise_RTV, target_RTV), draft)


def law_of_texts(texts: np.ndarray, vocab: int) -> np.ndarray:
  """The joint law of equally likely texts."""
  law = np.zeros((vocab,) * texts.shape[1])
  np.add.at(law, tuple(texts.T), 1 / len(texts))
  return law
