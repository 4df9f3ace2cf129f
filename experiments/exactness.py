"""Shows that speculative text is what plain decoding would have said, rung by rung.

    python -m experiments.exactness --config=configs/tiny.py
    python -m experiments.exactness --config=configs/smollm2.py:lookup --rungs=equality,audit --json_out=verdicts.json

    three_tokens   a table draft against a table target in the real loop, 200,000 draws
    enumeration    the exact law of gamma + 1 tokens in float64, every draft path and every outcome
    mutations      known-wrong decoders, which the enumeration must refuse
    chi_square     joint law of several tokens from the real loop, every drafter and rule
    equality       on the config's model: greedy, and sampled with the coupled rule, token for token
    own_draft      on the config's model: as its own draft it is never refused
    caches         on the config's model: after accepting and refusing, as after a fresh prefill
    audit          on the config's model: greedy text scored again in one pass

What runs on the config's model runs with each lossless rule and each drafter that needs no model of its own, and with
the config's drafter. Exit status 1 if a verdict fails.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from typing import Any

from absl import flags
from ml_collections import ConfigDict
import numpy as np

from experiments import audits, enumeration, exact_cases, mutations, tree_cases, tree_mutations
from experiments import chi_square as chi
from experiments.enumeration import Rule
from experiments.tree_enumeration import coupled_tree_texts, enumerate_tree
from experiments.verdict import Verdict, at_least, at_most, print_verdicts
from launch import cli
from launch.build import build_rule
from launch.prompts import Prompt, load_prompts
from launch.session import Completion, Session
from models.errors import InputError
from specdec.accept import RULES
from specdec.warp import Sampling

CONFIG = cli.define_config()
RUNG_NAMES = flags.DEFINE_list('rungs', None, 'Which rungs to climb, comma separated; all without it.')

THREE_TOKEN_DRAWS, LOOP_DRAWS, LOOP_BATCH = 200_000, 50_000, 12_500
NUM_NOISES = 4  # the coupled rule is enumerated over all assignments of so many noise vectors to positions
LEAST_P_VALUE = 1e-3  # seeds are fixed: a machine that passes once passes always
DRAFTERS = {  # as sections of a config
    'lookup': {'name': 'lookup', 'min_ngram': 1, 'max_ngram': 3, 'match': 'earliest', 'partial': True},
    'self': {'name': 'self', 'num_layers': 1, 'draft_vocab': ''},
    'simulated': {'name': 'simulated', 'alpha': 0.5},
}
PLAIN, GREEDY = 'none', 0.0
DEFAULT_GAMMA = 4  # where the config drafts nothing


def lossless_rules() -> list[str]:
  return [name for name, rule in RULES.items() if rule.lossless]


def three_tokens() -> list[Verdict]:
  """Draft .1 .6 .3, target .5 .2 .3: six tested tokens in ten are kept, and the text follows the target."""
  loop = chi.three_tokens(RULES['rejection'], THREE_TOKEN_DRAWS // 4)
  sample = chi.sample(loop, THREE_TOKEN_DRAWS, 2, Sampling.create(1.0))
  first = chi.chi_square(sample.counts(3).sum(axis=1), loop.law(1))
  frequencies = sample.counts(3).sum(axis=1) / first.draws
  accepted = sample.metrics.alpha
  return [
      at_most('acceptance .6', '|measured - .6|', abs(accepted - 0.6), 0.005, f'{accepted:.4f}'),
      at_most('law .5 .2 .3', 'largest deviation', first.max_deviation, 0.005,
              ' '.join(f'{frequency:.4f}' for frequency in frequencies)),
      _p_value('law .5 .2 .3', first)]


def _p_value(check: str, test: chi.ChiSquare) -> Verdict:
  note = f'chi-square {test.statistic:.1f} on {test.freedom}, {test.draws} draws'
  return at_least(check, 'p-value', test.p_value, LEAST_P_VALUE, note)


def noises(vocab: int, number: int = NUM_NOISES) -> np.ndarray:
  return np.random.default_rng(3).gumbel(size=(number, vocab))


def enumerated() -> list[Verdict]:
  """Plain and speculative laws agree to rounding, under every lossless rule."""
  chains, tree = exact_cases.all_cases(largest=True), tree_cases.all_cases()
  found = {
      'token rule': {case.name: enumeration.enumerate_case(case) for case in chains},
      'block rule': {case.name: enumeration.enumerate_case(case, Rule.block()) for case in chains},
      'multi-round rule on trees': {case.name: enumerate_tree(case) for case in tree},
  }
  verdicts = []
  for rule, outcomes in found.items():
    worst = max(outcomes, key=lambda name: outcomes[name].max_error)
    check, forbidden = f'{rule}, {len(outcomes)} cases', sum(one.forbidden for one in outcomes.values())
    verdicts += [at_most(check, 'largest error', outcomes[worst].max_error, 1e-12, worst),
                 at_most(check, 'mass on forbidden texts', forbidden, 0)]
  coupled = 'coupled rule', enumeration.coupled_texts, exact_cases.coupled_cases(), NUM_NOISES
  coupled_trees = 'coupled rule on trees', coupled_tree_texts, tree_cases.coupled_cases(), NUM_NOISES - 1
  return verdicts + [_same_texts(*one) for one in (coupled, coupled_trees)]


def _same_texts(rule: str, texts_of: Callable, cases: Sequence[tuple[Any, Callable]], num_noises: int) -> Verdict:
  differing, total = 0, 0
  for case, propose in cases:
    plain, drafted = (texts_of(case, drafter, noises(case.vocab, num_noises)) for drafter in (None, propose))
    differing += int(np.any(plain != drafted, axis=1).sum())
    total += len(plain)
  return at_most(f'{rule}, {len(cases)} cases', 'texts that differ', differing, 0, f'of {total}')


def mutated() -> list[Verdict]:
  """The enumeration tells each wrong decoder from a right one."""
  verdicts = [_refused(mutation.name, mutations.measure(mutation), mutation.known)
              for mutation in mutations.all_mutations()]
  verdicts += [_refused(f'block: {mutation.name}', mutations.measure(mutation), mutation.known)
               for mutation in mutations.block_mutations()]
  verdicts += [_refused(f'tree: {mutation.name}', tree_mutations.measure(mutation), mutation.known)
               for mutation in tree_mutations.all_mutations()]
  for name, rule in mutations.COUPLED.items():
    differing, law = mutations.coupled_differences(rule, noises(3))
    verdicts.append(Verdict(f'coupled: {name}', 'total variation', law.total_variation, 'not exact',
                            differing > 0, f'{differing} texts differ'))
  return verdicts


def _refused(name: str, outcome: mutations.Outcome, known: float | None) -> Verdict:
  note = f'first token {outcome.first.total_variation:.3g}'
  note += f', known {known:g}' if known is not None else ''
  note += f', forbidden texts {outcome.joint.forbidden:.2g}' if outcome.joint.forbidden else ''
  return Verdict(name, 'total variation', outcome.joint.total_variation, 'not exact', not outcome.joint.exact, note)


def chi_squares() -> list[Verdict]:
  """Three tokens at full gamma, and all six of a text whose last drafts are cut to fit."""
  verdicts = []
  for rule in lossless_rules():
    for drafter, loop in (chi.loops(RULES[rule], LOOP_BATCH) | chi.tree_loops(RULES[rule], LOOP_BATCH)).items():
      sample = chi.sample(loop, LOOP_DRAWS, 6, Sampling.create(1.0))
      counts = sample.counts(loop.engine.num_tokens)
      test = chi.chi_square(counts.sum(axis=(3, 4, 5)), loop.law(3))
      verdicts.append(_p_value(f'{rule}, {drafter}: first 3 tokens', test))
      verdicts.append(_p_value(f'{rule}, {drafter}: 6 tokens', chi.chi_square(counts, loop.law(6))))
  return verdicts


class ModelRungs:
  """The rungs on the config's model. It is loaded once and when first needed, and no text is decoded twice.

  Attributes:
    drafters: sections by name: the config's own and what every config can run.
    warm: a temperature above 0: the config's, 1 if that is greedy.
  """

  def __init__(self, config: ConfigDict):
    self._config = config
    self._texts: dict[tuple[str, str, float], list[Completion]] = {}
    self.drafters = {config.drafter.name: config.drafter.to_dict()}
    self.drafters |= {name: section for name, section in DRAFTERS.items() if name not in self.drafters}
    self.drafters.pop(PLAIN, None)
    self.warm = config.sampling.temperature or 1.0

  @functools.cached_property
  def prompts(self) -> list[Prompt]:
    return load_prompts(self._config.data)

  @functools.cached_property
  def _sessions(self) -> dict[str, Session]:
    """By drafter; rule and temperature are the config's."""
    sessions, target = {}, None
    for name, section in self.drafters.items():
      sessions[name] = Session.from_config(drafting(self._config, section), target)
      target = sessions[name].params.target, sessions[name].tokenizer
    return sessions | {PLAIN: sessions[name].plain()}

  def session(self, drafter: str, rule: str, temperature: float) -> Session:
    session = self._sessions[drafter]
    engine = dataclasses.replace(session.engine, rule=RULES[rule])
    return Session(changed(session.config, temperature, rule), session.tokenizer, engine, session.params)

  def texts(self, drafter: str, rule: str, temperature: float) -> list[Completion]:
    """What is said after the prompts."""
    key = drafter, rule, temperature
    if key not in self._texts:
      self._texts[key] = self.session(*key).generate(self.prompts)
    return self._texts[key]

  def equality(self) -> list[Verdict]:
    cases = [*itertools.product(lossless_rules(), [GREEDY]), ('coupled', self.warm)]
    return [audits.equality(
                self.session(drafter, rule, temperature), self.prompts, f'{_label(rule, temperature)}, {drafter}',
                self.texts(PLAIN, rule, temperature), self.texts(drafter, rule, temperature))
            for rule, temperature in cases for drafter in self.drafters]

  def own_draft(self) -> list[Verdict]:
    drafter = next(iter(self.drafters))
    return [audits.own_draft(self.session(drafter, rule, temperature), self.prompts, _label(rule, temperature))
            for rule, temperature in itertools.product(lossless_rules(), (GREEDY, self.warm))]

  def caches(self) -> list[Verdict]:
    cases = itertools.product(lossless_rules(), (GREEDY, self.warm), self.drafters)
    return [verdict for rule, temperature, drafter in cases for verdict in audits.caches(
        self.session(drafter, rule, temperature), self.prompts, f'{_label(rule, temperature)}, {drafter}')]

  def audit(self) -> list[Verdict]:
    return [verdict for rule, drafter in itertools.product(lossless_rules(), self.drafters)
            for verdict in audits.teacher_forced(
                self.session(drafter, rule, GREEDY), self.prompts, f'{rule}, {drafter}',
                self.texts(drafter, rule, GREEDY))]


def _label(rule: str, temperature: float) -> str:
  return f'{rule}, temperature {temperature:g}' if temperature else f'{rule}, greedy'


def changed(config: ConfigDict, temperature: float, rule: str | None = None) -> ConfigDict:
  """A copy that records logprobs, at another temperature."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.sampling.temperature = temperature
    config.engine.logprobs = True
    config.accept.rule = rule or config.accept.rule
  return config


def drafting(config: ConfigDict, section: dict[str, Any]) -> ConfigDict:
  """A copy that records logprobs, with another drafter, and a draft even where the config wants none."""
  config = changed(config, config.sampling.temperature)
  with config.unlocked():
    config.drafter = ConfigDict(section)
    config.engine.gamma = config.engine.gamma or DEFAULT_GAMMA
  return config


def ladder(config: ConfigDict) -> dict[str, Callable[[], list[Verdict]]]:
  """The rungs by name, from the bottom."""
  model = ModelRungs(config)
  return {
      'three_tokens': three_tokens, 'enumeration': enumerated, 'mutations': mutated, 'chi_square': chi_squares,
      'equality': model.equality, 'own_draft': model.own_draft, 'caches': model.caches, 'audit': model.audit}


def check_lossless(config: ConfigDict) -> None:
  """Refuses a rule that changes the law, since nothing of what follows is said of it.

  Raises:
    InputError: if the config's is one.
  """
  rule = build_rule(config.accept) if config.accept.rule in RULES else None
  if rule is not None and not rule.lossless:
    raise InputError(f'accept.rule={rule.name!r} is lossy, so there is nothing exact to show: '
                     f'use one of {", ".join(lossless_rules())}')


def main() -> int:
  cli.refuse_job()
  config = cli.config_of(CONFIG)
  check_lossless(config)
  rungs = ladder(config)
  names = RUNG_NAMES.value or list(rungs)
  for name in names:
    if name not in rungs:
      raise InputError(f'--rungs={name} is unknown: use some of {",".join(rungs)}')
  rows = []
  for name in names:
    verdicts = rungs[name]()
    print_verdicts(f'\n{name}', verdicts, file=cli.output())
    rows += [{'rung': name, **verdict.row} for verdict in verdicts]
  failed = [row for row in rows if not row['passed']]
  cli.say(f'\n{len(rows) - len(failed)} of {len(rows)} verdicts passed' + (
      f'; failed: {", ".join(row["rung"] + ": " + row["check"] for row in failed)}' if failed else ''))
  cli.write_json(rows)
  return 1 if failed else 0


if __name__ == '__main__':
  cli.run(main)
