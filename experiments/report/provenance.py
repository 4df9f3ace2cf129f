"""What a field of a row is: chosen, measured, predicted, published, read off a compiled program, or where it ran.

The groups never share a column: a table of the report has one head for each.
"""

from collections.abc import Mapping
import enum
from typing import Any


class Group(enum.Enum):
  """In the order of a table, by the words of its heads."""

  SETTING = 'setting'
  MEASURED = 'measured'
  PREDICTED = 'predicted'
  PUBLISHED = 'published'
  COMPILED = 'read off the compiled program'
  RECORDED = 'as recorded'
  WHERE = 'where it ran'


WHERE = frozenset(('jax_version', 'backend', 'device_kind', 'num_devices', 'cpu_model', 'cpu_cores', 'commit'))
SETTINGS = frozenset((
    'task', 'name', 'id', 'prompt', 'target', 'dtype', 'drafter', 'draft', 'rule', 'gamma', 'temperature', 'top_k',
    'top_p', 'batch', 'most_batch', 'capacity', 'rows', 'prompts', 'samples', 'base', 'config', 'variant', 'topology',
    'chips', 'hosts', 'compiled_gamma', 'assumptions', 'software', 'version', 'setting', 'settings', 'planted', 'rung',
    'check', 'limit', 'phase', 'sampling', 'metric', 'method', 'width', 'seed', 'shots'))
# Of rows that do not say where they ran, those that a measurement names nevertheless.
MEASURED = frozenset((
    'speedup', 'ms_per_token', 'ms_per_token_p10', 'ms_per_token_p90', 'tokens_per_second', 'ms_per_round',
    'draft_cost', 'verify_cost', 'step_cost', 'plain_pass_ms', 'bandwidth_utilisation'))
FORMULAS = frozenset(('floor_ms', 'lowest', 'highest'))  # predicted, though their names do not say so
UNSHOWN = frozenset(('config_hash', 'settings'))  # said by other fields
LONG = frozenset(('assumptions', 'derivation'))  # tell no rows apart
PREFIXES = {'predicted': Group.PREDICTED, 'published': Group.PUBLISHED, 'measured': Group.MEASURED}


def group_of(key: str, row: Mapping[str, Any]) -> Group:
  """The group of a field of `row`."""
  if (group := PREFIXES.get(key.partition('_')[0])) is not None:
    return group
  if key in WHERE:
    return Group.WHERE
  if key in FORMULAS:
    return Group.PREDICTED
  if key in SETTINGS or '.' in key:  # a dotted name is a field of a config
    return Group.SETTING
  if 'topology' in row:  # a plan: what it assumes is chosen
    return Group.SETTING if key in ('alpha', 'tokens_per_pass') else Group.COMPILED
  if 'backend' in row or key in MEASURED or ('speedup' in row and key == 'alpha'):
    return Group.MEASURED
  return Group.RECORDED
