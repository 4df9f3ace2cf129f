"""What typical acceptance costs in law and buys in tokens: Medusa's lossy rule against an exact one.

    python -m experiments.typical_bias --config=configs/smollm2.py:lookup --config.sampling.temperature=1
    python -m experiments.typical_bias --config=configs/smollm2.py:medusa --config.sampling.temperature=0.7 \\
        --config.drafter.source=results/train_medusa/model --config.data.kind=news --json_out=rows.json

Both rules judge the same drafts of the same prompts. Of point masses the text of typical acceptance (Cai et al., 2024,
section 2.3.1) is the same for every seed: at each position it emits one token x with certainty where the target draws
from a law, so the two are 1 - target(x) apart in total variation. The texts of both rules are scored again by one pass
over each, under the law of the config's sampling. Of an exact rule the distance is 0 by construction: its tokens are
drawn. Fields of a row, one for each rule, all measured:

    rule, lossless, drafter, gamma, temperature, top_p, prompts
    tokens_per_pass, passes, emitted        over all prompts
    tokens_per_pass_gain                    over the exact rule's, less 1
    total_variation, _interval              mean over tokens, 95 % bootstrap over prompts; 0 for an exact rule
    total_variation_of_greedy               of always taking the likeliest token, at the same positions
    likelihood                              mean of the target's probability of the tokens that were emitted
"""

from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict
import numpy as np

from experiments import rouge
from experiments.audits import scores
from experiments.rule_gain import by_rule, check_lenience
from launch import cli, results
from launch.progress import track
from launch.prompts import Prompt, load_prompts
from launch.session import Completion, Session, check_finite
from launch.table import Column, print_table
from models.errors import InputError
from specdec.accept import RULES
from specdec.metrics import Metrics
from specdec.warp import warp

TYPICAL = 'typical'
COLUMNS = (
    Column('rule'), Column('lossless'), Column('drafter'), Column('gamma', 'γ'), Column('temperature', 'T', '.1f'),
    Column('top_p', 'top-p', '.2f'), Column('tokens_per_pass', 'tokens/pass', '.2f'),
    Column('tokens_per_pass_gain', 'gain', '+.1%'), Column('total_variation', 'TV from the target', '.3f'),
    Column('total_variation_interval', '95 %', lambda pair: f'{pair[0]:.3f}-{pair[1]:.3f}'),
    Column('total_variation_of_greedy', 'TV of greedy', '.3f'), Column('likelihood', format='.3f'))


def emitted_probs(session: Session, prompt: Prompt, completion: Completion) -> tuple[np.ndarray, np.ndarray]:
  """[T]: of each emitted token its probability under the processed law, and that of the likeliest one."""
  logits_TV = scores(session, session.encode(prompt), completion.token_ids)
  law_TV = np.asarray(warp(logits_TV, session.request([prompt]).sampling))
  return law_TV[np.arange(len(law_TV)), completion.token_ids], law_TV.max(axis=1)


def distances(probs: Sequence[np.ndarray]) -> tuple[float, tuple[float, float]]:
  """Mean over all tokens of 1 - target(x), and its interval over prompts: tokens of one stay together."""
  missed, counts = (np.array([reduce(some) for some in probs], float) for reduce in (lambda p: np.sum(1 - p), len))
  index = np.random.default_rng(rouge.SEED).integers(len(probs), size=(rouge.RESAMPLES, len(probs)))
  low, high = np.quantile(missed[index].sum(axis=1) / counts[index].sum(axis=1), [0.025, 0.975])
  return float(missed.sum() / counts.sum()), (float(low), float(high))


def rows_of(config: ConfigDict) -> list[dict[str, Any]]:
  """The exact rule that the config names, then typical acceptance.

  Raises:
    InputError: a lossy rule, drafts that are drawn, which typical acceptance cannot judge, or a target with an encoder.
    RunError: texts ended in numbers that are not finite.
  """
  exact = RULES.get(config.accept.rule)
  if exact is None or not exact.lossless:
    raise InputError(f'accept.rule={config.accept.rule!r} is not exact: typical acceptance is compared with a lossless '
                     'rule, such as rejection (chains) or multiround (trees)')
  check_lenience(config)
  session = Session.from_config(config)
  if session.engine.drafter.draws:
    raise InputError(f'drafter.name={config.drafter.name!r} draws its tokens, and typical acceptance judges point '
                     'masses only: use lookup, medusa, or eagle with children top')
  if session.params.target.has_encoder:
    raise InputError('texts are scored again by targets without an encoder: choose such a target')
  prompts, rows = load_prompts(config.data), []
  for one in track([by_rule(session, name) for name in (config.accept.rule, TYPICAL)], 2, 'rules'):
    completions = one.generate(prompts)
    check_finite(one.engine.rule.name, completions)
    rows.append(_row(one, prompts, completions))
  for row in rows:
    row['tokens_per_pass_gain'] = row['tokens_per_pass'] / rows[0]['tokens_per_pass'] - 1
  return rows


def _row(session: Session, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> dict[str, Any]:
  config, rule = session.config, session.engine.rule
  metrics = Metrics.total([completion.metrics for completion in completions])
  emitted, likeliest = zip(*(emitted_probs(session, prompt, completion)
                             for prompt, completion in zip(prompts, completions, strict=True)), strict=True)
  distance, interval = (0.0, (0.0, 0.0)) if rule.lossless else distances(emitted)
  return {
      'rule': rule.name, 'lossless': rule.lossless, 'drafter': config.drafter.name, 'gamma': session.engine.gamma,
      'temperature': config.sampling.temperature, 'top_p': config.sampling.top_p, 'prompts': len(prompts),
      'tokens_per_pass': metrics.tokens_per_pass, 'passes': metrics.passes, 'emitted': metrics.emitted,
      'total_variation': distance, 'total_variation_interval': interval,
      'total_variation_of_greedy': distances(likeliest)[0], 'likelihood': float(np.concatenate(emitted).mean()),
      **results.environment()}


def main() -> None:
  cli.refuse_job()
  rows = rows_of(cli.config_of(CONFIG))
  print_table(rows, COLUMNS, file=cli.output())
  cli.write_json({'rows': rows})


if __name__ == '__main__':
  CONFIG = cli.define_config('configs/smollm2.py:lookup')
  cli.run(main)
