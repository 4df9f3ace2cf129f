"""The pages of docs/: every command in them is run, toys in the place of large models; every link leads somewhere."""

import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

from models.config import DecoderConfig
from models.loading import export_hf
from tests.forked import statuses
from tests.models.random_decoder import random_decoder

ROOT = pathlib.Path(__file__).parents[1]
DOCS = sorted((ROOT / 'docs').glob('*.md'))
MODEL = DecoderConfig.tiny(vocab_size=480, max_positions=2048)

# What is added so that a command is quick.
SHORT = {'launch.generate': ['--config.sampling.max_new_tokens=4'],
         'launch.bench': ['--config.sampling.max_new_tokens=4', '--config.data.limit=1', '--repeats=1'],
         'experiments.trace': ['--config.sampling.max_new_tokens=4'],
         'experiments.advise': ['--config.sampling.max_new_tokens=4', '--config.data.limit=2', '--repeats=1',
                                '--most_batch=2'],
         'experiments.exactness': ['--config.sampling.max_new_tokens=4', '--config.data.limit=1']}


def commands(path: pathlib.Path) -> list[list[str]]:
  """The words of each command in the fenced blocks of a page."""
  blocks = re.findall(r'^```sh\n(.*?)^```$', path.read_text(), re.DOTALL | re.MULTILINE)
  return [shlex.split(line) for block in blocks for line in block.replace('\\\n', ' ').splitlines() if line.strip()]


COMMANDS = [(path.stem, number, words) for path in DOCS for number, words in enumerate(commands(path))]


def with_toys(words: list[str], folder: pathlib.Path) -> tuple[str, list[str]]:
  """Module and arguments of a `python -m` command: a toy with files for a model with files, the toy pair for the model
  that ships, GPUs, which are planned by roofline, for a slice."""
  module, arguments = words[2], words[3:]
  own = any(word.startswith('--config.target.source=') for word in arguments)
  if not own and module != 'launch.slices.jobset':
    arguments = [word.replace('configs/smollm2.py', 'configs/tiny.py') for word in arguments]
  replaced = {'=PATH': f'={folder}/model', '=DRAFT': f'={folder}/draft', 'sweep_batch.py': 'sweep_batch.py:tiny'}
  if module == 'launch.plan':
    replaced['v4-32'] = '8xH100'
  for old, new in replaced.items():
    arguments = [word.replace(old, new) if not word.startswith('--out=') else word for word in arguments]
  return module, arguments + (SHORT[module] if '--rungs=three_tokens' not in arguments and module in SHORT else [])


@pytest.fixture(scope='module')
def places(tmp_path_factory) -> dict[str, pathlib.Path]:
  """A directory for each page, in which the project's paths lead into the checkout."""
  found = {path.stem: tmp_path_factory.mktemp(path.stem) for path in DOCS}
  for place in found.values():
    for name in ('configs', 'launch', 'experiments', 'specdec', 'models'):
      (place / name).symlink_to(ROOT / name)
  return found


@pytest.fixture(scope='module')
def ended(places, tmp_path_factory) -> dict[tuple[str, int], int]:
  """The status of each Python command."""
  folder = tmp_path_factory.mktemp('models')
  export_hf(random_decoder(MODEL), folder / 'model')
  export_hf(random_decoder(dataclasses.replace(MODEL, num_layers=1)), folder / 'draft')
  for name in ('model', 'draft'):
    shutil.copy(ROOT / 'tests' / 'fixtures' / 'tokenizers' / 'tokenizer.model', folder / name)
  ours = [(page, number, words) for page, number, words in COMMANDS if words[:2] == ['python', '-m']]
  found = statuses([(str(places[page]), str(places[page] / str(number)), *with_toys(words, folder))
                    for page, number, words in ours])
  return {(page, number): status for (page, number, _), status in zip(ours, found, strict=True)}


def test_there_are_pages():
  assert [path.stem for path in DOCS] == ['lossless', 'own_model', 'slices', 'slower']
  assert all(len(path.read_text().splitlines()) < 100 for path in DOCS)


@pytest.mark.slow
@pytest.mark.parametrize('page, number, words', COMMANDS, ids=[f'{page}-{number}' for page, number, _ in COMMANDS])
def test_command(page, number, words, ended, places):
  place = places[page]
  if words[:2] == ['python', '-m']:
    assert ended[page, number] == 0, (place / f'{number}.stderr').read_text()
    for word in words:
      if word.startswith(('--out=', '--json_out=')):
        assert (place / word.partition('=')[2]).exists()
    return
  stub = place / 'bin' / 'sbatch'
  stub.parent.mkdir(exist_ok=True)
  stub.write_text('#!/bin/sh\ntest -x "$2" && bash -n "$2"\n')
  stub.chmod(0o755)
  done = subprocess.run(words, cwd=place, capture_output=True, text=True,
                        env=os.environ | {'PATH': f'{stub.parent}:{os.environ["PATH"]}'})
  assert done.returncode == 0, done.stderr
  assert words[0] == 'sbatch' or 'gcloud' in done.stdout  # what --dry_run prints


@pytest.mark.slow
def test_coupled_texts_are_equal(ended, places):
  """What docs/lossless.md has its reader compare by eye."""
  texts = {(places['lossless'] / f'{number}.stdout').read_text().partition('\n[')[0]
           for page, number, words in COMMANDS if page == 'lossless' and 'launch.generate' in words}
  assert len(texts) == 1 and texts != {''}


@pytest.mark.parametrize('path', DOCS, ids=lambda path: path.stem)
def test_links(path):
  for target in re.findall(r'\]\(([^)]+)\)', path.read_text()):
    assert (path.parent / target).exists(), target
