"""Which fields a `drafter` section has, by the drafter's name."""

from ml_collections import ConfigDict

from models.errors import InputError

LOOKUP = ('min_ngram', 'max_ngram', 'match', 'partial')
FIELDS = {
    'none': (), 'lookup': LOOKUP, 'lookup_tree': (*LOOKUP, 'branches'), 'self': ('num_layers', 'draft_vocab'),
    'model': ('source', 'dtype', 'draft_vocab'), 'medusa': ('source', 'dtype', 'tree', 'num_heads', 'own_head'),
    'eagle': ('source', 'dtype', 'tree', 'children', 'version', 'taps'), 'hybrid': ('of', 'lookup', 'copied'),
    'unigram': ('counts',), 'bigram': ('counts', 'followers'), 'simulated': ('alpha',)}
UNTRAINED = 'untrained'  # as a source of heads


def check_drafter(section: ConfigDict) -> None:
  """Refuses names and fields that are wrong whatever the model.

  Raises:
    InputError: an unknown drafter, or one whose fields are not all there.
  """
  if section.get('name') not in FIELDS:
    raise InputError(f"drafter.name={section.get('name')!r} is unknown: use one of {', '.join(FIELDS)}")
  for field in FIELDS[section.name]:
    if field not in section:
      raise InputError(f'drafter.name={section.name!r} needs drafter.{field}, which is not in this config: choose the '
                       'variant of the config that has it')
  if 'match' in FIELDS[section.name] and section.match not in ('earliest', 'latest'):
    raise InputError(f"drafter.match={section.match!r} is unknown: use 'earliest' or 'latest'")
  if section.name == 'bigram' and section.followers < 1:
    raise InputError(f'drafter.followers={section.followers} must be 1 or more: ids kept of what follows each token')
  if section.name == 'eagle' and (section.version == 3) != bool(section.taps):
    raise InputError(f'drafter.version={section.version} and drafter.taps={tuple(section.taps)}: a head of version 3 '
                     'reads layers of the target, name them as taps; others read none')
  if section.name == 'hybrid':
    check_drafter(section.of)
    check_drafter(ConfigDict(section.lookup.to_dict() | {'name': 'lookup'}))


def taps_of(section: ConfigDict) -> tuple[int, ...]:
  """The layers of the target that the drafter reads besides its last."""
  return tuple(section.get('taps', ())) if section.name != 'hybrid' else taps_of(section.of)
