"""Sweeps: the points of a grid, what is skipped, what is written, what is said about wrong input."""

import json
import pathlib

from absl import flags
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import smollm2
from experiments import sweep
from launch import results
from launch.errors import RunError
from launch.prompts import load_prompts
from models.errors import InputError
from specdec import theory

ROOT = pathlib.Path(__file__).parents[1]
BASE = '''
from ml_collections import ConfigDict


def get_config(variant='a'):
  return ConfigDict({
      'name': variant, 'engine': {'gamma': 4, 'widths': (1,), 'batch': 1}, 'sampling': {'temperature': 0.0},
      'data': {'kind': 'text'}}).lock()
'''


@pytest.fixture(autouse=True)
def _flags():
  flags.FLAGS.mark_as_parsed()


@pytest.fixture
def base(tmp_path):
  path = tmp_path / 'base.py'
  path.write_text(BASE)
  return str(path)


def _config(base, grid=None, zipped=None, plain=True):
  return ConfigDict({'base': base, 'grid': grid or {}, 'zip': zipped or {}, 'repeats': 2, 'plain': plain}).lock()


class _Benchmark:
  """Stands in for `launch.bench.benchmark`: rows from the theory; remembers what it was asked."""

  def __init__(self, fail_after=None):
    self.configs, self.fail_after = [], fail_after

  def __call__(self, config, repeats):
    assert repeats == 2
    if len(self.configs) == self.fail_after:
      raise KeyboardInterrupt
    self.configs.append(config)
    gamma = config.engine.gamma
    speedup = theory.speedup_leviathan(0.3, gamma, 0.2)
    return {'drafter': 'model', 'gamma': gamma, 'batch': config.engine.batch, 'speedup': speedup, 'drafted': gamma,
            'predicted_speedup': np.float32(speedup), 'ms_per_token': 10 / speedup, 'alpha': float('nan'),
            'tokens_per_pass': theory.expected_tokens(0.3, gamma), 'draft_cost': 0.2, 'verify_cost': 1.0,
            'tokens_per_second': 100 * speedup * config.engine.batch, 'ms_per_round': 10.0}


def test_grid_is_the_product_and_plain_is_in_it(base):
  config = _config(base, {'engine': {'gamma': (2, 4), 'batch': (1, 8)}})
  chosen = [(p.config.engine.gamma, p.config.engine.batch) for p in sweep.points_of(config)]
  assert chosen == [(0, 1), (2, 1), (4, 1), (0, 8), (2, 8), (4, 8)]
  config = _config(base, {'engine': {'gamma': (2, 4)}}, plain=False)
  assert [p.config.engine.gamma for p in sweep.points_of(config)] == [2, 4]


def test_any_field_can_be_swept(base):
  config = _config(base, {'sampling': {'temperature': (0.0, 1)}, 'engine': {'widths': ((1,), ())}, 'name': ('x', 'y')})
  configs = [point.config for point in sweep.points_of(config)]
  assert len({str(config) for config in configs}) == 8
  assert {config.sampling.temperature for config in configs} == {0.0, 1.0}
  assert {config.engine.widths for config in configs} == {(1,), ()}


def test_zip_goes_in_step(base):
  config = _config(base, {'sampling': {'temperature': (0.0, 1.0)}}, {'engine': {'gamma': (2, 4), 'batch': (1, 8)}})
  chosen = [(p.config.engine.gamma, p.config.engine.batch, p.config.sampling.temperature)
            for p in sweep.points_of(config)]
  assert chosen == [(2, 1, 0.0), (2, 1, 1.0), (4, 8, 0.0), (4, 8, 1.0)]


def test_several_bases_and_variants(base):
  points = sweep.points_of(_config((f'{base}:p', f'{base}:q'), {'engine': {'gamma': (0,)}}))
  assert [point.config.name for point in points] == ['p', 'q']


@pytest.mark.parametrize('grid, zipped, message', [
    ({'engine': {'gama': (1,)}}, {}, 'has no field engine.gama'),
    ({'engin': {'gamma': (1,)}}, {}, 'has no field engin.gamma'),
    ({'engine': {'gamma': ('x',)}}, {}, "engine.gamma='x' is of another type"),
    ({'engine': {'gamma': 3}}, {}, r'engine.gamma=3: a sweep needs a list of values here, such as \(3,\)'),
    ({'engine': {'gamma': ()}}, {}, 'needs a list of values'),
    ({}, {'engine': {'gamma': (1, 2), 'batch': (1,)}}, r'equally many values \(engine.batch: 1, engine.gamma: 2\)'),
    ({'engine': {'gamma': (1,)}}, {'engine': {'gamma': (1,)}}, 'engine.gamma is in grid and in zip'),
])
def test_wrong_fields_are_named_before_any_work(base, grid, zipped, message):
  benchmark = _Benchmark()
  with pytest.raises(InputError, match=message):
    sweep.run_sweep(_config(base, grid, zipped), benchmark=benchmark)
  assert not benchmark.configs


@pytest.mark.parametrize('name, text, message', [
    ('none.py', None, 'there is no file'),
    ('base.txt', BASE, 'is not a Python file'),
    ('base.py', 'x = 1 +', 'cannot be loaded'),
    ('base.py', 'x = 1', 'cannot be loaded'),
])
def test_wrong_base(tmp_path, name, text, message):
  if text is not None:
    (tmp_path / name).write_text(text)
  with pytest.raises(InputError, match=message):
    sweep.points_of(_config(str(tmp_path / name)))


def test_rows_say_what_they_are(base, tmp_path, capsys):
  out = str(tmp_path / 'rows.jsonl')
  rows = sweep.run_sweep(_config(base, {'engine': {'gamma': (2, 8)}}), out, _Benchmark())
  assert results.read_rows(out) == rows
  assert [row['overrides'] for row in rows] == [{'engine.gamma': gamma} for gamma in (0, 2, 8)]
  assert [row['slower_than_plain'] for row in rows] == [False, True, True]
  assert rows[2]['speedup'] == pytest.approx(0.549, abs=5e-4)
  assert rows[0]['task'] == 'text'
  assert rows[0]['alpha'] is None
  capsys.readouterr()
  sweep.show(rows)
  heading, _, plain, first, second = capsys.readouterr().out.splitlines()
  assert heading.split() == ['drafter', 'γ', 'ms/token', 'tokens/s', 'ms/round', 'tokens/pass', 'c', 'v', 'predicted',
                             'speed-up', 'note']
  assert 'slower than plain' not in plain
  assert first.endswith('slower than plain')
  assert second.split()[1:10] == ['8', '18.20', '54.9', '10.00', '1.43', '0.200', '1.00', '0.55', '0.55']


def test_restart_does_what_is_missing(base, tmp_path, capsys):
  out = tmp_path / 'rows.jsonl'
  config = _config(base, {'engine': {'gamma': (2, 4, 8)}})
  with pytest.raises(KeyboardInterrupt):
    sweep.run_sweep(config, str(out), _Benchmark(fail_after=2))
  out.write_bytes(out.read_bytes() + b'{"base": "torn')
  benchmark = _Benchmark()
  rows = sweep.run_sweep(config, str(out), benchmark)
  assert [c.engine.gamma for c in benchmark.configs] == [4, 8]
  assert [row['gamma'] for row in rows] == [0, 2, 4, 8]
  assert f'2 of 4 rows are in {out} already' in capsys.readouterr().out
  again = _Benchmark()
  assert sweep.run_sweep(config, str(out), again) == rows
  assert not again.configs


def test_a_changed_base_is_run_again(base, tmp_path):
  out = str(tmp_path / 'rows.jsonl')
  config = _config(base, {'engine': {'gamma': (2,)}})
  sweep.run_sweep(config, out, _Benchmark())
  # Longer by a character: else the bytecode of the old one would seem fresh.
  (tmp_path / 'base.py').write_text(BASE.replace("'temperature': 0.0", "'temperature': 1.00"))
  benchmark = _Benchmark()
  sweep.run_sweep(config, out, benchmark)
  assert len(benchmark.configs) == 2
  assert len(results.read_rows(out)) == 4


@pytest.mark.parametrize('error', [InputError, RunError])
def test_what_is_wrong_with_a_point_names_the_point(error, base):

  def benchmark(config, repeats):
    raise error('too long')

  with pytest.raises(error, match=r'base.py, engine.gamma=0: too long'):
    sweep.run_sweep(_config(base, {'engine': {'gamma': (1,)}}), benchmark=benchmark)


@pytest.mark.parametrize('name, field, answer', [('batch', 'batch', 'tokens/s'), ('capacity', 'capacity', 'ms/round')])
def test_shipped_sweeps_show_what_they_sweep(name, field, answer, capsys):
  config = sweep.load_config(f'configs/sweep_{name}.py')
  with config.unlocked():
    config.repeats = 2
  rows = sweep.run_sweep(config, benchmark=_Benchmark())
  capsys.readouterr()
  sweep.show(rows)
  heading, _, *lines = capsys.readouterr().out.splitlines()
  assert heading.split()[0] == field and answer in heading.split() and 'speed-up' in heading.split()
  assert [line.split()[0] for line in lines] == [
      str(value) for value in config.grid.engine[field] for _ in config.grid.engine.gamma]
  assert max(map(len, lines)) <= 140


@pytest.mark.slow
@pytest.mark.parametrize('name', ['batch', 'capacity', 'gamma'])  # sweep_plan is of experiments.plan_sweep
def test_shipped_sweeps_run(name, monkeypatch):
  monkeypatch.chdir(ROOT)  # base is named from there
  config = sweep.load_config(f'configs/sweep_{name}.py:tiny')
  rows = sweep.run_sweep(config)
  assert len(rows) > 1
  assert all(row['ms_per_round'] > 0 and row['tokens_per_second'] > 0 for row in rows)
  assert all(row['drafted'] > 0 for row in rows if row['gamma'])


def test_shipped_config_resolves():
  config = sweep.load_config('configs/sweep_gamma.py:tiny')
  gammas = [point.config.engine.gamma for point in sweep.points_of(config)]
  assert gammas[0] == 0
  assert len(gammas) == len(set(gammas)) > 3
  for variant in ('', ':self'):
    points = sweep.points_of(sweep.load_config(f'configs/sweep_gamma.py{variant}'))
    assert {point.overrides['data.kind'] for point in points} == {'humaneval', 'news'}
    json.dumps([point.identity for point in points])


def test_batches_of_every_drafter():
  """Of trees γ is the tree's: a grid over it would not fit them."""
  for variant, base in smollm2.DRAFTERS.items():
    points = sweep.points_of(sweep.load_config(f'configs/sweep_batch.py:{variant}'))
    assert {point.config.engine.batch for point in points} == {1, 2, 4, 8, 16}
    if 'tree' in base or 'branches' in base or 'of' in base:
      assert {point.config.engine.gamma for point in points} == {smollm2.get_config(variant).engine.gamma}


def test_copying_and_free_prompts(monkeypatch):
  monkeypatch.chdir(ROOT)
  points = sweep.points_of(sweep.load_config('configs/sweep_copying.py'))
  prompts = {point.config.data.path: load_prompts(point.config.data) for point in points}
  assert [len(texts) for texts in prompts.values()] == [6, 6]
  assert {point.config.sampling.temperature for point in points} == {0, .8}
