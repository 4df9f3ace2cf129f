"""Plain and speculative decoding of the same prompts in one process, in turns: what the benchmark commands time."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from ml_collections import ConfigDict

from experiments.errors import RunError
from launch.progress import track
from launch.prompts import Prompt
from launch.session import Completion, Session
from launch.table import Column
from specdec.metrics import Metrics

PLAIN, SPECULATIVE = 'plain', 'speculative'
TIMING_COLUMNS = [
    Column('drafter'), Column('gamma', 'γ'), Column('ms_per_token', 'ms/token', '.2f'),
    Column('speedup', 'speed-up', '.2f'), Column('tokens_per_pass', 'tokens/pass', '.2f'),
    Column('same_as_plain', 'as plain', '.0%')]


@dataclasses.dataclass(frozen=True)
class Run:
  """All prompts decoded in one way.

  Attributes:
    decoder: 'plain' or 'speculative'.
    completions: one for each prompt, in order.
    session: what decoded them.
  """

  decoder: str
  completions: list[Completion]
  session: Session

  @property
  def metrics(self) -> Metrics:
    return Metrics.total([completion.metrics for completion in self.completions])

  @property
  def ms_per_token(self) -> float:
    """Decode time per emitted token of a row; prompts and compilation are not in it."""
    return 1e3 * sum(completion.seconds for completion in self.completions) / self.metrics.emitted

  def check(self) -> None:
    """Raises RunError where numbers broke down."""
    failed = sum(completion.reason == 'error' for completion in self.completions)
    if failed:
      raise RunError(f'{failed} of {len(self.completions)} texts ({self.decoder}) ended in numbers that are not '
                     'finite: they mean nothing')


def decode_both(session: Session, prompts: Sequence[Prompt]) -> list[Run]:
  """Decodes batch by batch, plain and speculative in turns, with the same seeds; only plain where nothing drafts.

  In turns, because a machine that slows down for a while should slow both.
  """
  sessions = {PLAIN: session.plain()}
  if session.engine.drafter.name != 'none':
    sessions[SPECULATIVE] = session
  completions: dict[str, list[Completion]] = {name: [] for name in sessions}
  size, seed = session.config.engine.batch, session.config.sampling.seed
  starts = range(0, len(prompts), size)
  for turn, start in enumerate(track(starts, len(starts), 'decoding')):
    chunk = prompts[start:start + size]
    seeds = range(seed + start, seed + start + len(chunk))
    for name in list(sessions)[::-1 if turn % 2 else 1]:
      completions[name] += sessions[name].generate(chunk, seeds)
  return [Run(name, completions[name], sessions[name]) for name in sessions]


def facts(run: Run, baseline: Run, config: ConfigDict) -> dict[str, Any]:
  """What a row of results says about speed, in the words of `launch.bench`; `baseline` is the plain run."""
  metrics = run.metrics
  return {
      'decoder': run.decoder, 'target': config.target.source, 'dtype': config.target.dtype, 'form': config.data.form,
      'drafter': config.drafter.name if run.decoder == SPECULATIVE else 'none',
      'rule': config.accept.rule, 'gamma': run.session.engine.gamma, 'temperature': config.sampling.temperature,
      'top_k': config.sampling.top_k, 'top_p': config.sampling.top_p, 'batch': config.engine.batch,
      'prompts': len(run.completions), 'new_tokens': metrics.emitted,
      'max_new_tokens': config.sampling.max_new_tokens, 'ms_per_token': run.ms_per_token,
      'tokens_per_second': 1e3 * config.engine.batch / run.ms_per_token,
      'speedup': baseline.ms_per_token / run.ms_per_token,
      'tokens_per_pass': metrics.tokens_per_pass, 'accepted_per_position': metrics.accepted_per_position,
      'overlap': metrics.overlap, 'same_as_plain': _same_as_plain(run, baseline, config),
      'compile_seconds': run.session.compile_seconds}


def _same_as_plain(run: Run, baseline: Run, config: ConfigDict) -> float | None:
  """The share of prompts with the same tokens as plain decoding, where the seed or greed alone decides them."""
  if run is baseline or (config.sampling.temperature > 0 and config.accept.rule != 'coupled'):
    return None
  pairs = list(zip(run.completions, baseline.completions, strict=True))
  return sum(one.token_ids == other.token_ids for one, other in pairs) / len(pairs)
