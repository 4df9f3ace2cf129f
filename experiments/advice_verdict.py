"""What `experiments.advise` found, in one sentence."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import advice


def speedup_of(row: dict[str, Any]) -> float:
  """As measured, where it was; else as predicted."""
  return row['predicted_speedup'] if row['measured_speedup'] is None else row['measured_speedup']


def verdict(rows_found: Sequence[dict[str, Any]]) -> str:
  """One sentence, which recommends no draft that is not faster than plain decoding, or expected to be."""
  best = max(rows_found, key=speedup_of)
  batch, ends, low = best['batch'], best['predicted_stops_paying_at'], best['predicted_interval'][0]
  what, few = f'{best["draft"]} with γ={best["gamma"]}', best['prompts'] < advice.FEWEST_PROMPTS
  gain = f'{_gain(best)} times the speed of plain decoding'
  if not speedup_of(best) > 1:
    return f'Speculation does not pay at batch {batch}: decode plainly; the best of these drafts, {what}: {gain}.'
  if few:
    return (f'Speculation may pay at batch {batch}: {what}: {gain}, on {best["prompts"]} of your prompts, too few to '
            f'speak for others: measure more prompts ({advice.FEWEST_PROMPTS} or more).')
  if not low > 1:
    check = ', and --check' if best['measured_speedup'] is None and 'measured_plain_ms' in best else ''
    return (f'Speculation may pay at batch {batch}: {what}: {gain}, but the interval reaches down to no gain: measure '
            f'more prompts{check}.')
  until = (f'it gains nothing from batch {ends} on' if ends is not None and ends > batch else
           f'it still pays at batch {best["most_batch"]}' if ends is None else
           f'though it gains nothing at batch {ends}')
  return f'Speculation pays at batch {batch}: {what}: {gain}, and by prediction {until}.'


def _gain(row: dict[str, Any]) -> str:
  """Predicted, with its interval if it has one, and measured."""
  low, high = row['predicted_interval']
  said = f'predicted {row["predicted_speedup"]:.2f}' + ('' if np.isnan(low) else f' ({low:.2f} to {high:.2f})')
  return said if row['measured_speedup'] is None else f'{said}, measured {row["measured_speedup"]:.2f}'
