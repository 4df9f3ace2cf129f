"""Shows that speculative text is what plain decoding would have said, rung by rung.

    python -m experiments.exactness --config=configs/tiny.py
    python -m experiments.exactness --config=configs/smollm2.py:lookup --rungs=equality,audit --json_out=verdicts.json

    three_tokens   a table draft against a table target in the real loop, 200,000 draws
    enumeration    the exact law of gamma + 1 tokens in float64, every draft path and every outcome
    mutations      known-wrong decoders, which the enumeration must refuse
    chi_square     joint law of several tokens from the real loop, every drafter, by the config's rule
    equality       on the config's model: greedy, and sampled with the coupled rule, token for token
    own_draft      on the config's model: as its own draft it is never refused
    caches         on the config's model: after accepting and refusing, as after a fresh prefill
    audit          on the config's model: greedy text scored again in one pass

Exit status 1 if a verdict fails.
"""

from collections.abc import Callable
import functools
import sys

from absl import flags
from ml_collections import ConfigDict
import numpy as np

from experiments import audits, enumeration, exact_cases, mutations
from experiments import chi_square as chi
from experiments.verdict import Verdict, at_least, at_most, print_verdicts
from launch import cli
from launch.prompts import Prompt, load_prompts
from launch.session import Session
from models.errors import InputError
from specdec.accept import RULES
from specdec.warp import Sampling

CONFIG = cli.define_config()
RUNG_NAMES = flags.DEFINE_list('rungs', None, 'Which rungs to climb, comma separated; all without it.')

THREE_TOKEN_DRAWS, LOOP_DRAWS, LOOP_BATCH = 200_000, 50_000, 12_500
NUM_NOISES = 4  # the coupled rule is enumerated over all assignments of so many noise vectors to positions
LEAST_P_VALUE = 1e-3  # seeds are fixed: a machine that passes once passes always
SAMPLED = Sampling.create(1.0)


def three_tokens() -> list[Verdict]:
  """Draft .1 .6 .3, target .5 .2 .3: six tested tokens in ten are kept, and the text follows the target."""
  loop = chi.three_tokens(RULES['rejection'], THREE_TOKEN_DRAWS // 4)
  sample = chi.sample(loop, THREE_TOKEN_DRAWS, 2, SAMPLED)
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


def noises(vocab: int) -> np.ndarray:
  return np.random.default_rng(3).gumbel(size=(NUM_NOISES, vocab))


def enumerated() -> list[Verdict]:
  """Plain and speculative laws agree to rounding, under both rules."""
  cases = exact_cases.all_cases(largest=True)
  found = [enumeration.enumerate_case(case) for case in cases]
  worst = max(range(len(cases)), key=lambda i: found[i].max_error)
  differing, texts = 0, 0
  coupled = exact_cases.coupled_cases()
  for case, propose in coupled:
    plain, drafted = (enumeration.coupled_texts(case, drafter, noises(case.vocab)) for drafter in (None, propose))
    differing += int(np.any(plain != drafted, axis=1).sum())
    texts += len(plain)
  return [
      at_most(f'token rule, {len(cases)} cases', 'largest error', found[worst].max_error, 1e-12, cases[worst].name),
      at_most(f'token rule, {len(cases)} cases', 'mass on forbidden texts', sum(one.forbidden for one in found), 0),
      at_most(f'coupled rule, {len(coupled)} cases', 'texts that differ', differing, 0, f'of {texts}')]


def mutated() -> list[Verdict]:
  """The enumeration tells each wrong decoder from a right one."""
  verdicts = []
  for mutation in mutations.all_mutations():
    outcome = mutations.measure(mutation)
    note = f'first token {outcome.first.total_variation:.3g}'
    note += f', known {mutation.known:g}' if mutation.known is not None else ''
    note += f', forbidden texts {outcome.joint.forbidden:.2g}' if outcome.joint.forbidden else ''
    verdicts.append(Verdict(mutation.name, 'total variation', outcome.joint.total_variation, 'not exact',
                            not outcome.joint.exact, note))
  for name, rule in mutations.COUPLED.items():
    differing, law = mutations.coupled_differences(rule, noises(3))
    verdicts.append(Verdict(f'coupled: {name}', 'total variation', law.total_variation, 'not exact',
                            differing > 0, f'{differing} texts differ'))
  return verdicts


def chi_squares(rule_name: str) -> list[Verdict]:
  """Three tokens at full gamma, and all six of a text whose last drafts are cut to fit."""
  verdicts = []
  for name, loop in chi.loops(RULES[rule_name], LOOP_BATCH).items():
    sample = chi.sample(loop, LOOP_DRAWS, 6, SAMPLED)
    counts = sample.counts(loop.engine.num_tokens)
    test = chi.chi_square(counts.sum(axis=(3, 4, 5)), loop.law(3))
    verdicts.append(_p_value(f'{rule_name}, {name}: first 3 tokens', test))
    verdicts.append(_p_value(f'{rule_name}, {name}: 6 tokens', chi.chi_square(counts, loop.law(6))))
  return verdicts


class ModelRungs:
  """The rungs on the config's model, which is loaded once and when first needed."""

  def __init__(self, config: ConfigDict):
    self._config = config

  @functools.cached_property
  def prompts(self) -> list[Prompt]:
    return load_prompts(self._config.data)

  @functools.cached_property
  def greedy(self) -> Session:
    return Session.from_config(changed(self._config, temperature=0.0))

  def sampled(self, rule: str) -> Session:
    """At the config's temperature, 1 if that is greedy."""
    config = changed(self._config, temperature=self._config.sampling.temperature or 1.0, rule=rule)
    return Session.from_config(config, (self.greedy.params.target, self.greedy.tokenizer))

  def equality(self) -> list[Verdict]:
    sessions = {
        f'greedy, {self._config.accept.rule}': self.greedy,
        'greedy, half of the text as draft': audits.spoiled(self.greedy),
        'sampled, coupled': self.sampled('coupled')}
    return [audits.equality(session, self.prompts, check) for check, session in sessions.items()]

  def own_draft(self) -> list[Verdict]:
    sessions = self.greedy, self.sampled(self._config.accept.rule)
    return [audits.own_draft(session, self.prompts) for session in sessions]

  def caches(self) -> list[Verdict]:
    return audits.caches(self.greedy, self.prompts)

  def audit(self) -> list[Verdict]:
    return audits.teacher_forced(self.greedy, self.prompts, self.greedy.generate(self.prompts))


def changed(config: ConfigDict, temperature: float, rule: str | None = None) -> ConfigDict:
  """A copy that records logprobs, at another temperature."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.sampling.temperature = temperature
    config.engine.logprobs = True
    config.accept.rule = rule or config.accept.rule
  return config


def ladder(config: ConfigDict) -> dict[str, Callable[[], list[Verdict]]]:
  """The rungs by name, from the bottom."""
  model = ModelRungs(config)
  return {
      'three_tokens': three_tokens, 'enumeration': enumerated, 'mutations': mutated,
      'chi_square': functools.partial(chi_squares, config.accept.rule), 'equality': model.equality,
      'own_draft': model.own_draft, 'caches': model.caches, 'audit': model.audit}


def main() -> int:
  config = cli.config_of(CONFIG)
  rungs = ladder(config)
  names = RUNG_NAMES.value or list(rungs)
  for name in names:
    if name not in rungs:
      raise InputError(f'--rungs={name} is unknown: use some of {",".join(rungs)}')
  rows = []
  for name in names:
    verdicts = rungs[name]()
    print_verdicts(f'\n{name}', verdicts, file=sys.stderr if cli.JSON_OUT.value == '-' else sys.stdout)
    rows += [{'rung': name, **verdict.row} for verdict in verdicts]
  failed = [row for row in rows if not row['passed']]
  cli.say(f'\n{len(rows) - len(failed)} of {len(rows)} verdicts passed' + (
      f'; failed: {", ".join(row["rung"] + ": " + row["check"] for row in failed)}' if failed else ''))
  cli.write_json(rows)
  return 1 if failed else 0


if __name__ == '__main__':
  cli.run(main)
