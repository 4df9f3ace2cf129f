"""Known-wrong decoders. Each must fail the enumeration: a check that passes them checks nothing."""

from collections.abc import Callable
import dataclasses

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from experiments import draft_paths as drafts
from experiments import enumeration, exact_cases
from experiments.enumeration import Case, Comparison, CoupledRule, Rule, compare, coupled_texts, table_law, warped
from specdec.draft import Draft, Verdict, law_at, prob_of

TARGET_TABLE, DRAFT_TABLE = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])  # residual [1, 0, 0]
TARGET, DRAFT = table_law(TARGET_TABLE), table_law(DRAFT_TABLE)
RIGHT, RIGHT_BLOCK, RIGHT_COUPLED = Rule(), Rule.block(), CoupledRule()  # nothing planted yet (`experiments.planting`)


@dataclasses.dataclass(frozen=True)
class Mutation:
  """One wrong decoder.

  Attributes:
    name: what is wrong.
    case: with a wrong drafter or wrong laws for the rule, or a right one.
    rule: with a wrong part, or the right one.
    known: total variation of the first token's law where a figure is known from elsewhere.
  """

  name: str
  case: Case
  rule: Rule = dataclasses.field(default_factory=Rule)
  known: float | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How wrong it is: the law of all γ + 1 tokens, and of the first alone."""

  joint: Comparison
  first: Comparison


def measure(mutation: Mutation) -> Outcome:
  laws = enumeration.speculative_law(mutation.case, mutation.rule), enumeration.plain_law(mutation.case)
  first = [law.reshape(len(law), -1).sum(axis=1) for law in laws]
  return Outcome(compare(*laws), compare(*first))


def keep_all(uniform_BM: Array, draft: Draft, target_probs_BTV: Array) -> Array:
  """Keeps every drafted token."""
  return draft.count_B


def ratio_with_epsilon(epsilon: float) -> Callable[[Array, Draft, Array], Array]:
  """u < target / (draft + epsilon)."""

  def num_accepted(uniform_BM: Array, draft: Draft, target_probs_BTV: Array) -> Array:
    target_BM = prob_of(target_probs_BTV[:, :draft.width], draft.tokens_BM)
    return _leading(uniform_BM * (draft.prob_of_tokens() + epsilon) < target_BM, draft)

  return num_accepted


def not_strict(uniform_BM: Array, draft: Draft, target_probs_BTV: Array) -> Array:
  """u <= target / draft: at u = 0 keeps what the target forbids."""
  target_BM = prob_of(target_probs_BTV[:, :draft.width], draft.tokens_BM)
  return _leading(uniform_BM * draft.prob_of_tokens() <= target_BM, draft)


def ratio_upside_down(uniform_BM: Array, draft: Draft, target_probs_BTV: Array) -> Array:
  target_BM = prob_of(target_probs_BTV[:, :draft.width], draft.tokens_BM)
  return _leading(uniform_BM * target_BM < draft.prob_of_tokens(), draft)


def ratio_one_late(uniform_BM: Array, draft: Draft, target_probs_BTV: Array) -> Array:
  """Tests each token against the target's law of the position after it."""
  return RIGHT.num_accepted(uniform_BM, draft, jnp.roll(target_probs_BTV, -1, axis=1))


def behind_rejections(uniform_BM: Array, draft: Draft, target_probs_BTV: Array) -> Array:
  """Counts passed tests, those behind a failed one as well."""
  target_BM = prob_of(target_probs_BTV[:, :draft.width], draft.tokens_BM)
  return jnp.sum(uniform_BM * draft.prob_of_tokens() < target_BM, axis=1)


def count_ignored(uniform_BM: Array, draft: Draft, target_probs_BTV: Array) -> Array:
  """Tests what was never drafted."""
  return jnp.minimum(RIGHT.num_accepted(uniform_BM, _full(draft), target_probs_BTV), draft.width)


def correction_from_target(draft: Draft, target_probs_BTV: Array, num_accepted_B: Array) -> Array:
  """The target's own law after a rejection, not the residual."""
  return law_at(target_probs_BTV, num_accepted_B)


def point_mass_from_target(draft: Draft, target_probs_BTV: Array, num_accepted_B: Array) -> Array:
  """The same for a point mass only: the refused token may come again."""
  next_law = correction_from_target if draft.probs_BMV is None else RIGHT.next_law
  return next_law(draft, target_probs_BTV, num_accepted_B)


def residual_one_early(draft: Draft, target_probs_BTV: Array, num_accepted_B: Array) -> Array:
  """The residual of the last kept position."""
  before_B = jnp.where(num_accepted_B < draft.count_B, jnp.maximum(num_accepted_B - 1, 0), num_accepted_B)
  return RIGHT.next_law(draft, target_probs_BTV, before_B)


def bonus_one_early(draft: Draft, target_probs_BTV: Array, num_accepted_B: Array) -> Array:
  """The bonus token from the law of the last drafted position."""
  full_B1 = (num_accepted_B == draft.count_B)[:, None]
  early_BV = law_at(target_probs_BTV, jnp.maximum(num_accepted_B - 1, 0))
  return jnp.where(full_B1, early_BV, RIGHT.next_law(draft, target_probs_BTV, num_accepted_B))


def bonus_without_temperature(temperature: float) -> Callable[[Draft, Array, Array], Array]:
  """The bonus token from the law before temperature."""

  def next_law(draft: Draft, target_probs_BTV: Array, num_accepted_B: Array) -> Array:
    raw_BTV = target_probs_BTV**temperature
    raw_BV = law_at(raw_BTV / jnp.sum(raw_BTV, axis=-1, keepdims=True), num_accepted_B)
    full_B1 = (num_accepted_B == draft.count_B)[:, None]
    return jnp.where(full_B1, raw_BV, RIGHT.next_law(draft, target_probs_BTV, num_accepted_B))

  return next_law


def residual_after_short_draft(draft: Draft, target_probs_BTV: Array, num_accepted_B: Array) -> Array:
  """Takes a draft shorter than γ for a rejection."""
  return RIGHT.next_law(_full(draft), target_probs_BTV, num_accepted_B)


def _leading(kept_BM: Array, draft: Draft) -> Array:
  kept_BM &= jnp.arange(draft.width) < draft.count_B[:, None]
  return jnp.sum(jnp.cumprod(kept_BM.astype(jnp.int32), axis=1), axis=1)


def _full(draft: Draft) -> Draft:
  return dataclasses.replace(draft, count_B=jnp.full_like(draft.count_B, draft.width))


def all_mutations() -> list[Mutation]:
  return [*_wrong_drafters(), *_wrong_tests(), *_wrong_next_tokens()]


def _wrong_drafters() -> list[Mutation]:
  base = np.array([0.45, 0.25, 0.15, 0.1, 0.05])
  right, swapped = table_law(warped(base, 0.5, top_p=0.8)), table_law(warped(warped(base, top_p=0.8), 0.5))
  cooler, likeliest = table_law(warped(DRAFT_TABLE, 0.5)), table_law(warped(DRAFT_TABLE, top_k=2))
  target, looked = map(table_law, exact_cases.pair(3, seed=6))
  shortened = lambda keep: Case('', target, drafts.shortened(drafts.sampled(looked), keep), 2, 3)
  against_target = lambda drafter: Case('', TARGET, drafter, 1, 3)
  return [
      Mutation('argmax draft with its softmax as draft law', against_target(drafts.argmax(DRAFT, DRAFT)), known=0.3),
      Mutation('draft law before temperature', against_target(drafts.sampled(cooler, DRAFT)), known=0.095),
      Mutation('draft law before top-k', against_target(drafts.sampled(likeliest, DRAFT))),
      Mutation('top-p before temperature', Case('', right, drafts.sampled(right), 1, 5, scored=swapped), known=0.078),
      Mutation('sampled token dropped after looking', shortened(drafts.drop_unlikely(looked, 0.3))),
      Mutation('token kept or dropped by the law behind it', shortened(drafts.drop_before_flat(looked, 0.9))),
  ]


def _wrong_tests() -> list[Mutation]:
  table, draft_table = exact_cases.pair(3, seed=8)
  chain = Case('', table_law(table), drafts.sampled(table_law(draft_table)), 3, 3)
  short = dataclasses.replace(chain, drafter=drafts.shortened(chain.drafter, drafts.by_length))
  forbids = dataclasses.replace(chain, target=table_law(exact_cases.without(table, 1)))
  disjoint = Case('', table_law(np.eye(2)[0]), drafts.sampled(table_law(np.eye(2)[1])), 4, 2)
  return [
      Mutation('every draft kept', disjoint, Rule(num_accepted=keep_all), known=1.0),
      Mutation('ratio upside down', chain, Rule(num_accepted=ratio_upside_down)),
      Mutation('ratio one position late', chain, Rule(num_accepted=ratio_one_late)),
      Mutation('epsilon .01 in the ratio', chain, Rule(num_accepted=ratio_with_epsilon(1e-2))),
      Mutation('epsilon 1e-9 in the ratio', chain, Rule(num_accepted=ratio_with_epsilon(1e-9))),
      Mutation('test not strict at u = 0', forbids, Rule(num_accepted=not_strict)),
      Mutation('tokens behind a rejection counted', chain, Rule(num_accepted=behind_rejections)),
      Mutation('drafted count ignored', short, Rule(num_accepted=count_ignored)),
  ]


def _wrong_next_tokens() -> list[Mutation]:
  table, draft_table = exact_cases.pair(3, seed=8)
  chain = Case('', table_law(table), drafts.sampled(table_law(draft_table)), 3, 3)
  short = dataclasses.replace(chain, drafter=drafts.shortened(chain.drafter, drafts.by_length))
  cold = dataclasses.replace(chain, target=table_law(warped(table, 0.5)))
  one_token = Case('', TARGET, drafts.sampled(DRAFT), 1, 3)
  point_mass = dataclasses.replace(one_token, drafter=drafts.argmax(TARGET))
  return [
      Mutation('correction from the target', one_token, Rule(next_law=correction_from_target), known=0.15),
      Mutation('point mass resampled from the full target', point_mass, Rule(next_law=point_mass_from_target),
               known=0.25),
      Mutation('residual one position early', chain, Rule(next_law=residual_one_early)),
      Mutation('bonus one position early', chain, Rule(next_law=bonus_one_early)),
      Mutation('bonus without temperature', cold, Rule(next_law=bonus_without_temperature(0.5))),
      Mutation('short draft taken for a rejection', short, Rule(next_law=residual_after_short_draft)),
  ]


def first_failure(uniform_BM: Array, draft: Draft, target_probs_BTV: Array) -> Array:
  """Block verification that goes token by token and stops where one fails."""
  return _leading(_block_passes(uniform_BM, draft, target_probs_BTV), draft)


def first_success(uniform_BM: Array, draft: Draft, target_probs_BTV: Array) -> Array:
  """Block verification that does not look beyond the first token that passes."""
  passes_BM = _block_passes(uniform_BM, draft, target_probs_BTV)
  return jnp.where(jnp.any(passes_BM, axis=1), jnp.argmax(passes_BM, axis=1) + 1, 0)


def _block_passes(uniform_BM: Array, draft: Draft, target_probs_BTV: Array) -> Array:
  """[B, M]: whether each token passes its own test; a uniform of 1 never passes."""
  own_MM = jnp.eye(draft.width, dtype=bool)[:, None]
  ask = lambda uniform_BM: RIGHT_BLOCK.num_accepted(uniform_BM, draft, target_probs_BTV)
  return (jax.vmap(ask)(jnp.where(own_MM, uniform_BM, 1.0)) > 0).T


def block_mutations() -> list[Mutation]:
  """Wrong block verification. The residual of the token rule is wrong by so little that only enumeration sees it."""
  target, draft = map(table_law, exact_cases.pair(3, seed=3))
  chain = Case('', target, drafts.sampled(draft), 2, 3)
  short = dataclasses.replace(chain, gamma=3, drafter=drafts.shortened(chain.drafter, drafts.by_length))
  wrong = lambda name, **parts: Mutation(name, chain, dataclasses.replace(RIGHT_BLOCK, **parts))
  return [
      wrong('stops at the first failure', num_accepted=first_failure),
      wrong('stops at the first success', num_accepted=first_success),
      wrong('residual of the token rule', next_law=RIGHT.next_law),
      wrong('test of the token rule', num_accepted=RIGHT.num_accepted),
      wrong('correction from the target', next_law=correction_from_target),
      dataclasses.replace(wrong('drafted count ignored', num_accepted=block_count_ignored), case=short),
  ]


def block_count_ignored(uniform_BM: Array, draft: Draft, target_probs_BTV: Array) -> Array:
  """Tests what was never drafted."""
  return RIGHT_BLOCK.num_accepted(uniform_BM, _full(draft), target_probs_BTV)


def match_all(choice_BT: Array, draft: Draft) -> Verdict:
  return Verdict(draft.count_B, jnp.take_along_axis(choice_BT, draft.count_B[:, None], axis=1)[:, 0])


def match_one_late(choice_BT: Array, draft: Draft) -> Verdict:
  """Emits the choice of the position after the first difference."""
  verdict = RIGHT_COUPLED.match(choice_BT, draft)
  late_B1 = jnp.minimum(verdict.num_accepted_B + 1, draft.width)[:, None]
  return Verdict(verdict.num_accepted_B, jnp.take_along_axis(choice_BT, late_B1, axis=1)[:, 0])


def match_drafted_next(choice_BT: Array, draft: Draft) -> Verdict:
  """Emits the refused token."""
  verdict = RIGHT_COUPLED.match(choice_BT, draft)
  refused = jnp.take_along_axis(draft.tokens_BM, jnp.minimum(verdict.num_accepted_B, draft.width - 1)[:, None], axis=1)
  return Verdict(verdict.num_accepted_B, jnp.where(
      verdict.num_accepted_B < draft.count_B, refused[:, 0], verdict.next_token_B))


def choices_of_one_noise(noise_BTV: Array, target_probs_BTV: Array) -> Array:
  """The noise of the first position for all."""
  return RIGHT_COUPLED.choices(jnp.broadcast_to(noise_BTV[:, :1], noise_BTV.shape), target_probs_BTV)


def choices_without_noise(noise_BTV: Array, target_probs_BTV: Array) -> Array:
  return RIGHT_COUPLED.choices(jnp.zeros_like(noise_BTV), target_probs_BTV)


COUPLED = {
    'every draft kept': CoupledRule(match=match_all),
    'choice one position late': CoupledRule(match=match_one_late),
    'refused token emitted': CoupledRule(match=match_drafted_next),
    'one noise for all positions': CoupledRule(choices=choices_of_one_noise),
    'no noise': CoupledRule(choices=choices_without_noise),
}


def coupled_differences(rule: CoupledRule, noise_KV: np.ndarray) -> tuple[int, Comparison]:
  """Texts that differ from plain decoding under the same noise, and the law of them all."""
  target, draft = map(table_law, exact_cases.pair(3, seed=11))
  case = Case('', target, drafts.copied, 3, 3)
  plain = coupled_texts(case, None, noise_KV)
  drafted = coupled_texts(case, drafts.shared_noise(draft), noise_KV, rule)
  laws = enumeration.law_of_texts(drafted, 3), enumeration.law_of_texts(plain, 3)
  return int(np.any(plain != drafted, axis=1).sum()), compare(*laws)
