"""The house: which folders and names there are, and who may import whom."""

import ast
from collections.abc import Iterator
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[1]
OURS = ('configs', 'models', 'specdec', 'launch', 'experiments')
FOLDERS = {*OURS, 'tests'}
UNIDEAS = {'utils', 'util', 'helpers', 'common', 'misc', 'lib', 'base', 'core'}  # a file is named by its one idea

ARRAYS_ONLY = ('specdec.accept', 'specdec.tree', 'specdec.warp', 'specdec.wide', 'specdec.rng', 'specdec.theory',
               'specdec.draft', 'specdec.stops', 'specdec.run_if')
NO_MODEL = ('specdec.drafters.lookup', 'specdec.drafters.empty', 'specdec.drafters.simulated',
            'specdec.drafters.protocol')
HEAD_DRAFTERS = ('specdec.drafters.medusa', 'specdec.drafters.eagle')
# What the loop sees of a model.
OF_MODELS = ('models.protocol', 'models.kv_cache', 'models.source', 'models.errors', 'models.sharding')


def modules() -> dict[str, Path]:
  """Every module of ours by its dotted name."""
  paths = (path for folder in OURS for path in sorted((ROOT / folder).rglob('*.py')))
  return {'.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__'): path for path in paths}


MODULES = modules()


def under(name: str, packages: tuple[str, ...]) -> bool:
  """Whether the module is one of these, or inside one."""
  return any(name == package or name.startswith(f'{package}.') for package in packages)


def imports(name: str) -> Iterator[str]:
  """Full names of all that a module imports, wherever in the file."""
  for node in ast.walk(ast.parse(MODULES[name].read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{name} imports relatively: write the full name'
      for alias in node.names:
        full = f'{node.module}.{alias.name}'
        yield full if full in MODULES else node.module


def allowed(name: str, imported: str) -> bool:
  """Whether `name` may import the module `imported`."""
  if under(imported, ('tests',)):
    return False
  if under(name, ARRAYS_ONLY):
    return under(imported, ARRAYS_ONLY) or not under(imported, (*OURS, 'flax', 'jax.sharding'))
  if not under(imported, OURS) or under(name, ('experiments',)):
    return True
  if under(name, ('configs',)):
    return False
  if under(name, ('models',)):
    return under(imported, ('models',))
  if under(name, ('launch',)):
    return under(imported, ('launch', 'specdec', 'models', 'configs'))
  if under(name, ('specdec.training',)):
    return under(imported, ('specdec', 'models'))
  if under(name, NO_MODEL):
    return under(imported, (*ARRAYS_ONLY, 'specdec.drafters.protocol', 'specdec.features', 'models.source'))
  if under(imported, ('specdec.training',)):
    return False
  heads = ('models.heads', 'models.eagle') if under(name, HEAD_DRAFTERS) else ()
  return under(imported, ('specdec', *OF_MODELS, *heads))


def test_there_are_modules():
  assert {'specdec.engine', 'models.decoder', 'launch.timing', 'experiments.published', 'configs'} <= set(MODULES)


@pytest.mark.parametrize('name', MODULES)
def test_imports(name):
  refused = sorted({imported for imported in imports(name) if not allowed(name, imported)})
  assert not refused, f'{name} must not import {", ".join(refused)} (CONTRIBUTING.md)'


@pytest.mark.parametrize('name, imported', [
    ('configs.tiny', 'models.config'), ('models.decoder', 'specdec.warp'), ('models.loading.load', 'launch.cli'),
    ('specdec.accept.rejection', 'flax'), ('specdec.warp', 'models.protocol'), ('specdec.rng', 'jax.sharding'),
    ('specdec.drafters.lookup', 'models.protocol'), ('specdec.drafters.empty', 'specdec.drafters.model'),
    ('specdec.engine', 'models.decoder'), ('specdec.engine', 'specdec.training.steps'),
    ('specdec.drafters.model', 'models.heads'), ('specdec.draft', 'specdec.engine'), ('specdec.verify', 'launch.cli'),
    ('launch.bench', 'experiments.published'), ('specdec.engine', 'tests.toys')])
def test_directions_that_are_refused(name, imported):
  assert not allowed(name, imported)


@pytest.mark.parametrize('name, imported', [
    ('configs.tiny', 'ml_collections'), ('models.decoder', 'models.kv_cache'), ('specdec.accept.rejection', 'jax'),
    ('specdec.accept.rejection', 'specdec.draft'), ('specdec.engine', 'models.protocol'),
    ('specdec.drafters.eagle', 'models.heads'), ('launch.bench', 'specdec.engine'),
    ('specdec.training.steps', 'models.decoder'), ('experiments.exactness', 'launch.cli')])
def test_directions_that_are_allowed(name, imported):
  assert allowed(name, imported)


def test_folders():
  """Python lives in the folders of the house only, with `setup.py` beside them."""
  mine = {path.relative_to(ROOT).parts[0] for path in ROOT.glob('*/**/*.py')}
  strangers = {name for name in mine - FOLDERS if not name.startswith('.') and name not in ('build', 'dist', 'results')}
  assert not strangers
  assert {path.name for path in ROOT.glob('*.py')} == {'setup.py'}


def test_names():
  """One idea per file, named by the idea."""
  assert not {name for name in MODULES if name.rpartition('.')[2] in UNIDEAS}
  assert all((path.parent / '__init__.py').exists() for path in MODULES.values())


def test_no_import_touches_a_device():
  """A device looked for before `launch.start_up` is on the wrong platform, and keeps a process out of its job."""
  code = '''if True:
      import importlib, sys
      from jax._src import xla_bridge
      for name in sys.argv[1:]:
        importlib.import_module(name)
        assert not xla_bridge.backends_are_initialized(), name
  '''
  names = [name for name in MODULES if not under(name, ('experiments.peers',))]  # needs packages of its own
  done = subprocess.run([sys.executable, '-c', code, *names], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr.splitlines()[-1]
