"""Plain and speculative decoding of the same prompts, timed as `launch.bench` does: what the benchmark commands report.
"""

from collections.abc import Sequence
from typing import Any

from launch import bench
from launch.prompts import Prompt
from launch.session import Session
from launch.table import Column
from launch.timed import PLAIN, Timed, time_all

SPECULATIVE = 'speculative'
TIMING_COLUMNS = [
    *bench.columns(
        'drafter', 'gamma', 'ms_per_token', 'tokens_per_second', 'tokens_per_pass', 'draft_cost', 'verify_cost',
        'predicted_speedup', 'speedup', 'bandwidth_utilisation'),
    Column('same_as_plain', 'as plain', '.0%')]


def decode_both(session: Session, prompts: Sequence[Prompt], units_dir: str | None = None) -> list[Timed]:
  """Plain and speculative in turns, with the same seeds; only plain where nothing drafts."""
  ways = {PLAIN: session.plain()}
  if session.engine.drafter.name != 'none':
    ways[SPECULATIVE] = session
  return time_all(ways, prompts, repeats=1, units_dir=units_dir)


def facts(run: Timed, plain: Timed) -> dict[str, Any]:
  """A row of results: that of `launch.bench`, and what tells it apart here."""
  config = run.session.config
  return {
      'decoder': run.name, **bench.row_of(run, plain), 'form': config.data.form,
      'max_new_tokens': config.sampling.max_new_tokens, 'same_as_plain': _same_as_plain(run, plain)}


def _same_as_plain(run: Timed, plain: Timed) -> float | None:
  """The share of prompts with the same tokens as plain decoding, where the seed or greed alone decides them."""
  config = run.session.config
  if run is plain or (config.sampling.temperature > 0 and config.accept.rule != 'coupled'):
    return None
  same = [one == other for one, other in zip(run.tokens, plain.tokens, strict=True)]
  return sum(same) / len(same)
