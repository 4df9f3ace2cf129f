"""Known-wrong decoders of trees. Each must fail the enumeration."""

from collections.abc import Callable, Iterator
import dataclasses

from jax import Array
import jax.numpy as jnp
import numpy as np

from experiments import exact_cases, tree_cases
from experiments import tree_paths as trees
from experiments.draft_paths import Text
from experiments.enumeration import compare, plain_law, table_law
from experiments.mutations import DRAFT_TABLE, TARGET_TABLE, Outcome
from experiments.tree_enumeration import TreeCase, TreeRule, tree_law
from experiments.tree_paths import TreeDrafter, TreePath
from specdec.accept import multiround
from specdec.accept.multiround import Walk
from specdec.draft import TreeDraft, Verdict, law_at
from specdec.tree import TreeSpec

RIGHT_WALK, RIGHT_TURNS, RIGHT_MATCH = multiround.walk, multiround.turns, multiround.match_drawn  # nothing planted yet
FOUR = np.array([0.4, 0.3, 0.2, 0.1])  # children 1 and 2: .224 .468 .252 .056 if a refused one may come again


@dataclasses.dataclass(frozen=True)
class TreeMutation:
  """One wrong decoder.

  Attributes:
    name: what is wrong.
    case: with a wrong drafter, or a right one.
    rule: with a wrong part, or the right one.
    known: total variation of the first token's law where a figure is known from elsewhere.
  """

  name: str
  case: TreeCase
  rule: TreeRule = dataclasses.field(default_factory=TreeRule)
  known: float | None = None


def measure(mutation: TreeMutation) -> Outcome:
  laws = tree_law(mutation.case, mutation.rule), plain_law(mutation.case)
  first = [law.reshape(len(law), -1).sum(axis=1) for law in laws]
  return Outcome(compare(*laws), compare(*first))


def law_before_elders(drawn_BV: Array, is_child_BV: Array) -> Array:
  """Siblings drawn without replacement, all judged by the law that the first came from, which is not normalised."""
  return drawn_BV


def turned_round(parents_BM: Array) -> Array:
  """Siblings are tried last first."""
  siblings_BMM = parents_BM[:, :, None] == parents_BM[:, None]
  return jnp.sum(siblings_BMM, axis=-1) - 1 - RIGHT_TURNS(parents_BM)


def refused_child_stays(law_BV: Array, child_BV: Array) -> Array:
  """The target's law is left as it is when a child is refused."""
  return law_BV


def residual_not_normalised(law_BV: Array, child_BV: Array) -> Array:
  return jnp.maximum(law_BV - child_BV, 0)


def walk_then_full_target(uniform_BPK: Array, draft: TreeDraft, target_probs_BTV: Array) -> Walk:
  """The token after the path from the target's own law, whatever was refused."""
  end = RIGHT_WALK(uniform_BPK, draft, target_probs_BTV)
  return dataclasses.replace(end, law_BV=law_at(target_probs_BTV, end.row_B))


def walk_of_drawn(uniform_BPK: Array, draft: TreeDraft, target_probs_BTV: Array) -> Walk:
  """Point masses are judged as children drawn from their row's law."""
  return RIGHT_WALK(uniform_BPK, dataclasses.replace(draft, num_drawn=draft.width), target_probs_BTV)


def matched_then_root(uniform_BL: Array, draft: TreeDraft, target_probs_BTV: Array) -> Verdict:
  """After the path comes what the target drew at the root."""
  verdict = RIGHT_MATCH(uniform_BL, draft, target_probs_BTV)
  nothing = dataclasses.replace(draft, count_B=jnp.zeros_like(draft.count_B))
  return dataclasses.replace(verdict, next_token_B=RIGHT_MATCH(uniform_BL, nothing, target_probs_BTV).next_token_B)


def matched_then_refused(uniform_BL: Array, draft: TreeDraft, target_probs_BTV: Array) -> Verdict:
  """After the path comes its first child, refused or not, where it has one."""
  verdict = RIGHT_MATCH(uniform_BL, draft, target_probs_BTV)
  last_B = jnp.where(verdict.num_accepted_B > 0, verdict.path_BP[:, -1], 0)
  is_child_BM = draft.parents_BM == last_B[:, None]
  child_B = jnp.take_along_axis(draft.tokens_BM, jnp.argmax(is_child_BM, axis=1)[:, None], axis=1)[:, 0]
  next_B = jnp.where(jnp.any(is_child_BM, axis=1), child_B, verdict.next_token_B)
  return dataclasses.replace(verdict, next_token_B=next_B)


def likeliest_of(drafter: TreeDrafter, spec: TreeSpec) -> TreeDrafter:
  """Of drawn children those of the largest probability are kept: chosen by what was drawn. Biased.

  The drafter's tree is one level, `spec` as well, with fewer nodes.
  """

  def paths(text: Text) -> Iterator[TreePath]:
    for path in drafter.paths(text):
      order = sorted(range(len(path.tokens)), key=lambda node: -path.laws[0][path.tokens[node]])
      kept = sorted(order[:spec.num_nodes])
      yield dataclasses.replace(path, tokens=tuple(path.tokens[node] for node in kept), parents=spec.parents)

  return dataclasses.replace(drafter, paths=paths, branching=spec.branching, num_drawn=spec.num_nodes)


def all_mutations() -> list[TreeMutation]:
  return [*_wrong_drafters(), *_wrong_tests(), *_wrong_point_masses()]


def _swapped(**parts: Callable) -> TreeRule:
  return TreeRule(tuple(parts.items()))


def _wrong_drafters() -> list[TreeMutation]:
  one, two = TreeSpec.chain(1), TreeSpec((0, 0))
  target, draft = map(table_law, exact_cases.pair(4, seed=13))
  softmax = table_law(DRAFT_TABLE)
  flat = trees.drawn(draft, tree_cases.FLAT)
  return [
      TreeMutation('one argmax child judged by its softmax',
                   tree_cases.single(TARGET_TABLE, trees.ranked(softmax, one, softmax), 3), known=0.3),
      TreeMutation('argmax children judged by their softmax',
                   TreeCase('', target, trees.ranked(draft, tree_cases.WIDE, draft), 4)),
      TreeMutation('siblings sorted after they were drawn', TreeCase('', target, trees.siblings_by_token(flat), 4)),
      TreeMutation('drawn children chosen by their probability', TreeCase('', target, likeliest_of(flat, two), 4)),
  ]


def _wrong_tests() -> list[TreeMutation]:
  target, draft = map(table_law, exact_cases.pair(4, seed=13))
  without = TreeCase('', target, trees.drawn(draft, tree_cases.WIDE), 4)
  single = tree_cases.single(TARGET_TABLE, trees.drawn(table_law(DRAFT_TABLE), TreeSpec.chain(1)), 3)
  return [
      TreeMutation('siblings judged by the law before their elders', without, _swapped(left_over=law_before_elders)),
      TreeMutation('siblings tried in another order', without, _swapped(turns=turned_round)),
      TreeMutation('refused child stays in the law', without, _swapped(residual=refused_child_stays)),
      TreeMutation('residual not normalised', without, _swapped(residual=residual_not_normalised)),
      TreeMutation('correction from the target', single, _swapped(walk=walk_then_full_target), known=0.15),
  ]


def _wrong_point_masses() -> list[TreeMutation]:
  target, draft = map(table_law, exact_cases.pair(3, seed=3))
  one, two = TreeSpec.chain(1), TreeSpec((0, 0))
  second_and_third = table_law(np.array([0, 0.6, 0.4, 0]))
  copies = trees.with_copy(trees.drawn(draft, one), 2)
  mixed = TreeCase('', target, copies, 3, exact_cases.REPEATING, order=None)
  matched = TreeCase('', target, trees.ranked(draft, tree_cases.SMALL), 3)
  return [
      TreeMutation('refused point mass stays in the law',
                   tree_cases.single(FOUR, trees.ranked(second_and_third, two, walked=True), 4),
                   _swapped(residual=refused_child_stays), known=0.22),
      TreeMutation('point mass resampled from the full target',
                   tree_cases.single(TARGET_TABLE, trees.ranked(table_law(TARGET_TABLE), one, walked=True), 3),
                   _swapped(walk=walk_then_full_target), known=0.25),
      TreeMutation('point mass judged as a drawn sibling', mixed, _swapped(walk=walk_of_drawn)),
      TreeMutation('matched: next token of the root', matched, _swapped(match_drawn=matched_then_root)),
      TreeMutation('matched: refused child emitted', matched, _swapped(match_drawn=matched_then_refused)),
  ]
