"""Tokens per pass by one accept rule against another, on the same prompts and draft, with its interval.

    python -m experiments.rule_gain --config=configs/smollm2.py:self --config.drafter.num_layers=26 \\
        --config.sampling.temperature=1 --config.engine.batch=12 --out=rows.jsonl

Block verification (Sun et al., 2024) should never keep fewer tokens than the token rule. Each rule decodes every prompt
with the same seeds, `--samples` times. Fields of a row, all measured:

    target, draft, seed                                 as the config has them; of the draft the whole section
    gamma, temperature, top_p, drafter, prompts, samples     as asked for
    tokens_per_pass                                     by rule
    gain                                                second rule over the first, less 1
    gain_interval                                       95 % bootstrap over prompts, all samples of one together
    jax_version, backend, ...                           where it ran
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from absl import flags
from ml_collections import ConfigDict
import numpy as np

from launch import cli, results
from launch.build import given_by
from launch.progress import track
from launch.prompts import load_prompts
from launch.session import Session, check_finite
from launch.table import Column, print_table
from launch.work_units import seeds_for
from models.errors import InputError
from specdec.accept import RULES

RESAMPLES, LEVEL = 10_000, 0.95
COLUMNS = (Column('gamma', 'γ'), Column('temperature', 'T', '.1f'), Column('first', format='.3f'),
           Column('second', format='.3f'), Column('gain', format='+.1%'), Column('low', format='+.1%'),
           Column('high', format='+.1%'))


def check_rules(rules: Sequence[str]) -> None:
  """Raises InputError unless these are two."""
  if len(rules) != 2 or len(set(rules)) != 2 or not set(rules) <= RULES.keys():
    raise InputError(f'--rules={",".join(rules)}: name two of {", ".join(RULES)}')


def check_lenience(config: ConfigDict) -> None:
  """Refuses what a comparison of rules by name would pass over.

  Raises:
    InputError: see above.
  """
  if config.accept.get('lenience', 1.0) != 1:
    raise InputError(f'accept.lenience={config.accept.lenience}: rules are compared without lenience: set it to 1')


def by_rule(session: Session, name: str) -> Session:
  """The same with another rule.

  Raises:
    InputError: a rule that cannot judge these drafts.
  """
  with given_by('accept'):
    engine = dataclasses.replace(session.engine, rule=RULES[name])
  return Session(session.config, session.tokenizer, engine, session.params)


def counts(session: Session, samples: int) -> np.ndarray:
  """[prompts, 2]: tokens emitted and passes, over all samples of a prompt.

  Raises:
    RunError: texts ended in numbers that are not finite.
  """
  prompts = load_prompts(session.config.data)
  texts = session.generate(prompts * samples, seeds_for(session.config.sampling.seed, prompts * samples))
  check_finite(session.engine.rule.name, texts)
  emitted_and_passes = [(text.metrics.emitted, text.metrics.passes) for text in texts]
  return np.reshape(emitted_and_passes, (samples, len(prompts), 2)).sum(axis=0)


def gain(first: np.ndarray, second: np.ndarray) -> tuple[float, tuple[float, float]]:
  """How many more tokens per pass the second has, and the interval of that.

  Args:
    first, second: see `counts`; the same prompts.
  """
  index = np.random.default_rng(0).integers(0, len(first), (RESAMPLES, len(first)))
  ratio = lambda counts: counts[..., 0] / counts[..., 1]
  drawn = ratio(second[index].sum(axis=1)) / ratio(first[index].sum(axis=1)) - 1
  low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
  return float(ratio(second.sum(axis=0)) / ratio(first.sum(axis=0)) - 1), (float(low), float(high))


def sessions_of(config: ConfigDict, rules: Sequence[str], gammas: Sequence[int]) -> dict[int, list[Session]]:
  """For each γ one session for each rule; all there before anything is decoded.

  Raises:
    InputError: whatever is wrong with the config, or a rule that cannot judge its drafts.
  """
  check_lenience(config)
  found, target = {}, None
  for gamma in gammas:
    point = config.copy_and_resolve_references()
    point.engine.gamma, point.accept.rule = gamma, rules[0]
    session = Session.from_config(point, target)
    target = session.params.target, session.tokenizer
    found[gamma] = [by_rule(session, rule) for rule in rules]
  return found


def row_of(sessions: Sequence[Session], samples: int) -> dict[str, Any]:
  """The fields that the module names, of the sessions of one γ."""
  config, found = sessions[0].config, [counts(session, samples) for session in sessions]
  mean, interval = gain(*found)
  return {
      'target': config.target.source, 'draft': config.drafter, 'seed': config.sampling.seed,
      'gamma': config.engine.gamma, 'drafter': config.drafter.name, 'temperature': config.sampling.temperature,
      'top_p': config.sampling.top_p, 'prompts': len(found[0]), 'samples': samples,
      'tokens_per_pass': {session.engine.rule.name: float(one[:, 0].sum() / one[:, 1].sum())
                          for session, one in zip(sessions, found, strict=True)},
      'gain': mean, 'gain_interval': interval, **results.environment()}


def rows_of(config: ConfigDict, rules: Sequence[str], gammas: Sequence[int], samples: int,
            out: str | None = None) -> list[dict[str, Any]]:
  """A row for each γ, appended to `out` as soon as it is there."""
  rows = []
  for sessions in track(sessions_of(config, rules, gammas).values(), len(gammas), 'γ'):
    rows.append(row_of(sessions, samples))
    if out is not None:
      results.append_row(out, rows[-1])
  return rows


def main() -> None:
  config, rules = cli.config_of(CONFIG), RULES_COMPARED.value
  results.check_rows(OUT.value)
  check_rules(rules)
  try:
    gammas = [int(gamma) for gamma in GAMMAS.value]
  except ValueError:
    raise InputError(f'--gammas={",".join(GAMMAS.value)}: give numbers, such as 4,8') from None
  rows = rows_of(config, rules, gammas, SAMPLES.value, OUT.value)
  cli.say(f'tokens per pass: first {rules[0]}, second {rules[1]}')
  print_table([row | dict(zip(('first', 'second'), row['tokens_per_pass'].values(), strict=True),
                          low=row['gain_interval'][0], high=row['gain_interval'][1]) for row in rows],
              COLUMNS, file=cli.output())
  cli.write_json({'rows': rows})


if __name__ == '__main__':
  CONFIG = cli.define_config('configs/smollm2.py:self')
  RULES_COMPARED = flags.DEFINE_list('rules', ['rejection', 'block'], 'The two accept rules.')
  GAMMAS = flags.DEFINE_list('gammas', ['4', '8'], 'Drafted tokens per step.')
  SAMPLES = flags.DEFINE_integer('samples', 2, 'Texts of each prompt.', lower_bound=1)
  OUT = flags.DEFINE_string('out', None, 'JSON lines to append rows to.')
  cli.run(main)
