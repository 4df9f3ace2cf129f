"""The exact law of text that was drafted in trees, by enumeration in float64 through the accept rules themselves.

As `experiments.enumeration` does it for chains: every tree that a drafter can draw is taken with every outcome of the
tests, round after round, until one token more than the tree has levels is out. The rules are asked, never written down.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import itertools

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from experiments.draft_paths import Law, Text
from experiments.enumeration import LARGEST_UNIFORM, Comparison, bisect, compare, plain_law
from experiments.tree_paths import NoisyTreeDrafter, TreeDrafter, TreePath
from specdec.accept import coupled, multiround
from specdec.accept.matching import match, row_depths
from specdec.draft import TreeDraft, Verdict
from specdec.tree import ancestors
from specdec.wide import invert_cdf

ROWS, CELLS = 512, 4096  # of a program: compiling one takes longer than running it many times
Round = dict[Text, float]  # the law of what one round emits


@dataclasses.dataclass(frozen=True)
class TreeCase:
  """A target, a drafter of trees and how they meet.

  Attributes:
    name: for reports.
    target: the law that plain decoding draws from.
    drafter: where drafted tokens come from.
    vocab: real tokens.
    prompt: the text before.
    order: how many of the newest tokens target and drafter look at; None is all of them.
  """

  name: str
  target: Law
  drafter: TreeDrafter
  vocab: int
  prompt: Text = (0, 1)
  order: int | None = 2

  @property
  def gamma(self) -> int:
    """Drafted tokens on one path, at most; the law of one more is computed."""
    return self.drafter.levels

  def state(self, text: Text) -> Text:
    """What matters of the prompt and a text."""
    whole = self.prompt + text
    return whole if self.order is None else whole[len(whole) - self.order:]


@dataclasses.dataclass(frozen=True)
class TreeRule:
  """Multi-round rejection as it is, or with other functions in the place of some of its own.

  Attributes:
    swapped: names in `specdec.accept.multiround` and what is put there.
  """

  swapped: tuple[tuple[str, Callable], ...] = ()

  @contextlib.contextmanager
  def in_place(self) -> Iterator[None]:
    """While a program is traced."""
    right = [(name, getattr(multiround, name)) for name, _ in self.swapped]
    try:
      for name, function in self.swapped:
        setattr(multiround, name, function)
      yield
    finally:
      for name, function in right:
        setattr(multiround, name, function)


def enumerate_tree(case: TreeCase, rule: TreeRule | None = None) -> Comparison:
  """Speculative against plain."""
  return compare(tree_law(case, rule), plain_law(case))


def tree_law(case: TreeCase, rule: TreeRule | None = None) -> np.ndarray:
  """[V, ..., V]: the law of the first levels + 1 tokens of speculative decoding."""
  length = case.gamma + 1
  rounds = rounds_of(case, rule or TreeRule())
  law = np.zeros((case.vocab,) * length)
  pending = [defaultdict(float) for _ in range(length)]  # by tokens out: mass of texts
  pending[0][()] = 1.0
  for out in range(length):
    for text, mass in pending[out].items():
      for emitted, prob in rounds[case.state(text)].items():
        longer = (text + emitted)[:length]
        if len(longer) == length:
          law[longer] += mass * prob
        else:
          pending[len(longer)][longer] += mass * prob
  return law


def tree_tokens(case: TreeCase, rule: TreeRule | None = None) -> float:
  """Expected tokens of the first round, correction or bonus included."""
  first = rounds_of(case, rule or TreeRule())[case.state(())]
  return sum(prob * len(emitted) for emitted, prob in first.items())


def rounds_of(case: TreeCase, rule: TreeRule) -> dict[Text, Round]:
  """The rounds that may begin before the text is out, by what matters of the text before them."""
  texts = (text for out in range(case.gamma + 1) for text in itertools.product(range(case.vocab), repeat=out))
  states = list(dict.fromkeys(case.state(text) for text in texts))
  found: dict[Text, Round] = {state: defaultdict(float) for state in states}
  for (state, path), row, prob, law_V in outcomes(case, rule, states):
    for token in np.flatnonzero(law_V):
      found[state][*path.text_to(row), int(token)] += path.prob * prob * law_V[token]
  return found


Outcome = tuple[tuple[Text, TreePath], int, float, np.ndarray]  # text and draft, last row, probability, next law


def outcomes(case: TreeCase, rule: TreeRule, states: Sequence[Text]) -> list[Outcome]:
  """Everything that can happen in a round after each of these texts."""
  drawn = [(state, path) for state in states for path in case.drafter.paths(state)]
  judge = _matched if case.drafter.matched else _walked
  with jax.enable_x64(True):
    return [one for start in range(0, len(drawn), ROWS) for one in judge(case, rule, drawn[start:start + ROWS])]


def _arrays(case: TreeCase, drawn: Sequence[tuple[Text, TreePath]]) -> tuple[TreeDraft, np.ndarray]:
  """The drafts side by side and [P, T, V] the target's laws; padded, so that few programs serve all cases."""
  drafter, num_nodes = case.drafter, len(drawn[0][1].tokens)
  rows, num_laws = -(-len(drawn) // ROWS) * ROWS, max(1, len(drawn[0][1].laws))
  tokens, parents = np.zeros((2, rows, num_nodes), np.int32)
  target = np.full((rows, num_nodes + 1, case.vocab), 1 / case.vocab)
  laws = np.zeros((rows, num_laws, case.vocab))
  for index, (state, path) in enumerate(drawn):
    tokens[index], parents[index] = path.tokens, path.parents
    laws[index, :len(path.laws)] = path.laws or 0
    target[index] = [case.target(state + path.text_to(row)) for row in range(num_nodes + 1)]
  draft = TreeDraft(
      tokens, parents, None if drafter.matched else laws, np.full(rows, num_nodes, np.int32), drafter.levels,
      drafter.branching, () if drafter.matched else tuple(range(num_laws)), drafter.num_drawn, drafter.replacement)
  return draft, target


def _walked(case: TreeCase, rule: TreeRule, drawn: Sequence[tuple[Text, TreePath]]) -> Iterator[Outcome]:
  prob_PT, row_PT, law_PTV = jax.device_get(_ends(rule, *_arrays(case, drawn)))
  for one, prob_T, row_T, law_TV in zip(drawn, prob_PT, row_PT, law_PTV, strict=False):
    for end in np.flatnonzero(prob_T):
      yield one, int(row_T[end]), float(prob_T[end]), law_TV[end]


@functools.partial(jax.jit, static_argnames=('rule',))
def _ends(rule: TreeRule, draft: TreeDraft, target_PTV: Array) -> tuple[Array, Array, Array]:
  """Probability of each row to be the last one kept, where the test then is, and the law of the token after it.

  The test ends at a row iff all nodes down to it are kept, all siblings tried before them refused, and its children
  too. For this the uniforms of the kept ones are as small, all others as large as can be.
  """
  with rule.in_place():
    above_PTT = ancestors(draft.parents_BM, draft.levels)
    turn_PM, depth_PM = multiround.turns(draft.parents_BM), jnp.sum(above_PTT, axis=-1)[:, 1:] - 2
    own_PMLK = ((jnp.arange(draft.levels)[:, None] == depth_PM[..., None, None])
                & (jnp.arange(draft.branching) == turn_PM[..., None, None]))
    path_PTLK = jnp.any(above_PTT[:, :, 1:, None, None] & own_PMLK[:, None], axis=2)
    ask = lambda uniform_PLK: multiround.walk(uniform_PLK, draft, target_PTV)

    def kept(uniform_PM):
      kept_PMLK = path_PTLK[:, 1:] & ~own_PMLK
      uniform_PMLK = jnp.where(own_PMLK, uniform_PM[..., None, None], jnp.where(kept_PMLK, 0.0, LARGEST_UNIFORM))
      row_PM = jax.vmap(ask, in_axes=1, out_axes=0)(uniform_PMLK).row_B.T
      reached_PMT = jnp.take_along_axis(above_PTT, row_PM[..., None], axis=1)
      return jnp.diagonal(reached_PMT[..., 1:], axis1=1, axis2=2)

    share_PM = bisect(kept, draft.tokens_BM.shape)
    end = jax.vmap(ask, in_axes=1, out_axes=0)(jnp.where(path_PTLK, 0.0, LARGEST_UNIFORM))
    elder_PMM = ((draft.parents_BM[:, :, None] == draft.parents_BM[:, None])
                 & (turn_PM[:, None] < turn_PM[:, :, None]))
    refused_PM = 1 - share_PM
    arrive_PM = share_PM * jnp.prod(jnp.where(elder_PMM, refused_PM[:, None], 1), axis=-1)
    reach_PT = jnp.prod(jnp.where(above_PTT[:, :, 1:], arrive_PM[:, None], 1), axis=-1)
    child_PTM = draft.parents_BM[:, None] == jnp.arange(above_PTT.shape[1])[:, None]
    stay_PT = jnp.prod(jnp.where(child_PTM, refused_PM[:, None], 1), axis=-1)
    return reach_PT * stay_PT, end.row_B.T, jnp.moveaxis(end.law_BV, 0, 1)


def _matched(case: TreeCase, rule: TreeRule, drawn: Sequence[tuple[Text, TreePath]]) -> Iterator[Outcome]:
  """Point masses: what the target draws at each row turns at some values of the uniform of its depth.

  So the rule is asked once between any two such values, for each depth.
  """
  draft, target_PTV = _arrays(case, drawn)
  turn_PTV, depth_PT = (x[:len(drawn)] for x in jax.device_get(_turning_points(draft, target_PTV)))
  cells = list(_cells(turn_PTV, depth_PT, draft.levels))
  padded = np.resize(np.array([index for index, _, _ in cells]), -(-len(cells) // CELLS) * CELLS)
  uniform_NL = np.resize(np.array([uniform_L for _, uniform_L, _ in cells]), (len(padded), draft.levels + 1))
  verdict = jax.device_get(_match_drawn(rule, uniform_NL, draft, target_PTV, padded))
  for (index, _, prob), row, token in zip(cells, _last_rows(verdict), verdict.next_token_B, strict=False):
    yield drawn[index], int(row), prob, np.eye(case.vocab)[token]


def _cells(turn_PTV: np.ndarray, depth_PT: np.ndarray, levels: int) -> Iterator[tuple[int, tuple[float, ...], float]]:
  """Draft, smallest uniform of each depth, and share."""
  for index, (turn_TV, depth_T) in enumerate(zip(turn_PTV, depth_PT, strict=True)):
    edges = [np.unique(np.concatenate([[0.0, 1.0], turn_TV[depth_T == depth].ravel()])) for depth in range(levels + 1)]
    for cell in itertools.product(*(zip(edge[:-1], np.diff(edge), strict=True) for edge in edges)):
      yield index, tuple(low for low, _ in cell), float(np.prod([share for _, share in cell]))


@jax.jit
def _turning_points(draft: TreeDraft, target_PTV: Array) -> tuple[Array, Array]:
  """[P, T, V]: the share of the uniforms with which the target draws a token up to v; and [P, T] the depths."""
  token_V = jnp.arange(target_PTV.shape[-1])
  drawn = jax.vmap(invert_cdf, in_axes=(None, -1), out_axes=-1)
  turn_PTV = bisect(lambda uniform_PTV: drawn(target_PTV, uniform_PTV) <= token_V, target_PTV.shape)
  return turn_PTV, row_depths(draft)


@functools.partial(jax.jit, static_argnames=('rule',))
def _match_drawn(rule: TreeRule, uniform_NL: Array, draft: TreeDraft, target_PTV: Array, index_N: Array) -> Verdict:
  with rule.in_place():
    return multiround.match_drawn(uniform_NL, jax.tree.map(lambda x: x[index_N], draft), target_PTV[index_N])


def _last_rows(verdict: Verdict) -> np.ndarray:
  """[P]: the last row that is kept; 0 is the root."""
  if not verdict.path_BP.shape[1]:
    return np.zeros(len(verdict.path_BP), int)
  return np.where(verdict.num_accepted_B > 0, verdict.path_BP[:, -1], 0)


def coupled_tree_texts(case: TreeCase, propose: NoisyTreeDrafter | None, noise_KV: np.ndarray) -> np.ndarray:
  """[R, levels + 1]: the text of the coupled rule under each of the assignments of the K noises to its positions.

  Without a drafter, plain decoding. Positions past the text, which a draft may reach, get the first noise.
  """
  length = case.gamma + 1
  all_noises = noise_KV[np.array(list(itertools.product(range(len(noise_KV)), repeat=length)))]
  all_noises = np.concatenate([all_noises, np.broadcast_to(noise_KV[0], all_noises.shape)], axis=1)
  texts: list[Text] = [()] * len(all_noises)
  while min(map(len, texts)) < length:
    noises = np.stack([noise_LV[len(text):][:length] for text, noise_LV in zip(texts, all_noises, strict=True)])
    paths = [propose(case.prompt + text, noise_LV) if propose else TreePath((), 1.0, ())
             for text, noise_LV in zip(texts, noises, strict=True)]
    drawn = [(case.prompt + text, path) for text, path in zip(texts, paths, strict=True)]
    with jax.enable_x64(True):
      draft, target_RTV = _arrays(case, drawn)
      noise_RLV = np.resize(noises, (len(target_RTV), *noises.shape[1:]))
      verdict = jax.device_get(_coupled_verdict(noise_RLV, draft, target_RTV))
    texts = [(text + path.text_to(int(row)) + (int(token),))[:length] for text, path, row, token
             in zip(texts, paths, _last_rows(verdict), verdict.next_token_B, strict=False)]
  return np.array(texts)


@jax.jit
def _coupled_verdict(noise_RLV: Array, draft: TreeDraft, target_RTV: Array) -> Verdict:
  return match(coupled.choices(coupled.noise_of_rows(noise_RLV, draft), target_RTV), draft)
