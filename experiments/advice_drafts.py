"""The drafts that `experiments.advise` judges, and what each gets accepted: decoded here, or counted before."""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
from typing import Any

from ml_collections import ConfigDict

from experiments.advice import Acceptance
from experiments.sweep import load_config, numbered
from launch.progress import track
from launch.prompts import Prompt
from launch.session import Completion, Session, check_finite
from models.errors import InputError
from specdec.drafters import Lookup
from specdec.drafters.protocol import Drafter

ACCEPTED_BY = ('rule', 'temperature', 'top_k', 'top_p')  # the fields of a row that acceptance depends on


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A draft and what is known of it.

  Attributes:
    name: of the draft.
    config: to decode with it.
    acceptance: by prompt.
    session: at batch 1; None where nothing was decoded here.
    prompts, completions: what it was asked, and said.
  """

  name: str
  config: ConfigDict
  acceptance: Acceptance
  session: Session | None = None
  prompts: Sequence[Prompt] = ()
  completions: Sequence[Completion] = ()

  @property
  def by_token(self) -> bool:
    """Whether a shorter draft takes less time, in proportion."""
    return not self.acceptance.whole and self.session.engine.drafter.name in ('model', 'eagle')


def draft_configs(config: ConfigDict, others: Sequence[str]) -> dict[str, ConfigDict]:
  """A config for each draft, by its name; one without a draft adds none.

  Raises:
    InputError: no draft at all, or an adaptive γ.
  """
  configs: dict[str, ConfigDict] = {}
  for given in [config, *map(load_config, others)]:
    if not given.engine.gamma:
      continue
    point = config.copy_and_resolve_references()
    with point.unlocked():
      point.drafter, point.accept = given.drafter, given.accept
      point.engine.gamma, point.engine.widths = given.engine.gamma, given.engine.widths
    if point.engine.adaptive.enabled:
      raise InputError('advice is about one γ for all steps: set engine.adaptive.enabled to False')
    configs[numbered(given.drafter.name, configs)] = point
  if not configs:
    raise InputError('no draft to judge: pass a --config with one (engine.gamma above 0), or --drafts')
  return configs


def candidates_of(configs: dict[str, ConfigDict], prompts: Sequence[Prompt], here: bool) -> list[Candidate]:
  """Decodes the prompts with every draft, one at a time; with `here` False on one device, whatever the mesh.

  Raises:
    InputError: whatever is wrong with a config.
    RunError: a text ended in numbers that are not finite.
  """
  if here and any(config.mesh.data > 1 for config in configs.values()):
    raise InputError('advice is for the rows of one part of the mesh: set mesh.data=1, and engine.batch to its rows')
  found: list[Candidate] = []
  for name, config in track(configs.items(), len(configs), 'decoding'):
    alone = config.copy_and_resolve_references()
    alone.engine.batch = 1
    if not here:
      alone.mesh.data = alone.mesh.model = 1
    shared = (found[0].session.params.target, found[0].session.tokenizer) if found else None
    session = Session.from_config(alone, shared if not config.drafter.get('taps') else None)
    texts, engine = session.generate(prompts), session.engine
    check_finite(name, texts)
    acceptance = Acceptance.of([text.metrics for text in texts], engine.verify_widths, drafts_whole(engine.drafter))
    found.append(Candidate(name, config, acceptance, session, prompts, texts))
  return found


def drafts_whole(drafter: Drafter) -> bool:
  """Whether a shorter draft is no part of a longer one: a tree, or a copy that must have its full length."""
  return drafter.is_tree or (isinstance(drafter, Lookup) and not drafter.partial)


def counted(configs: dict[str, ConfigDict], path: str) -> list[Candidate]:
  """The same from the file of an earlier run, by the names of the drafts.

  Raises:
    InputError: a file that is none, that lacks one of the drafts, or counted it at another γ, rule or sampling.
  """
  try:
    found = json.loads(pathlib.Path(path).read_text())['rows']
    rows = {row['draft']: Acceptance.from_counts(row['measured_counts']) for row in found}
    judged = {row['draft']: {name: row[name] for name in ACCEPTED_BY} for row in found}
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise InputError(f'--counts={path} holds no counts ({error}): name what --json_out wrote') from error
  for name, config in configs.items():
    if name not in rows or rows[name].gamma != config.engine.gamma:
      known = ', '.join(f'{draft} with engine.gamma={one.gamma}' for draft, one in rows.items())
      raise InputError(f'--counts={path} is not about {name} with engine.gamma={config.engine.gamma}: it counted '
                       f'{known}')
    for field, value in judged_by(config).items():
      if judged[name][field] != value:
        raise InputError(f'--counts={path} counted {name} at {field}={judged[name][field]}, not {value}: ask for that, '
                         'or count again')
  return [Candidate(name, config, rows[name]) for name, config in configs.items()]


def judged_by(config: ConfigDict) -> dict[str, Any]:
  sampling = config.sampling
  return dict(zip(ACCEPTED_BY, (config.accept.rule, sampling.temperature, sampling.top_k, sampling.top_p), strict=True))
