"""What `launch.bench` measures, shows and names."""

import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys

from absl import flags
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import pytest

from configs import tiny
from launch import bench, results, timed
from launch.errors import RunError
from launch.prompts import Prompt
from launch.session import Session
from specdec.metrics import Metrics

PROMPTS = [Prompt(name, text, False) for name, text in (('a', 'abcabc'), ('b', 'to be or not to be'), ('c', 'x'))]
REQUIRED = (
    'drafter', 'rule', 'gamma', 'temperature', 'top_p', 'batch', 'prompts', 'new_tokens', 'ms_per_token',
    'tokens_per_second', 'speedup', 'tokens_per_pass', 'accepted_per_position', 'overlap', 'draft_cost', 'verify_cost',
    'predicted_speedup', 'bandwidth_utilisation', 'compile_seconds')


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
  flags.FLAGS.mark_as_parsed()
  monkeypatch.setattr(bench, 'memory_bandwidth', lambda: 1e10)


def config_of(variant: str, batch: int = 1) -> ConfigDict:
  config = tiny.get_config(variant)
  config.engine.batch, config.engine.capacity, config.sampling.max_new_tokens = batch, 128, 12
  return config


@functools.cache
def decoded() -> tuple[list[dict], list[timed.Timed]]:
  """Three prompts in batches of two."""
  session = Session.from_config(config_of('lookup', batch=2))
  ways = {timed.PLAIN: session.plain(), 'lookup': session}
  both = timed.time_all(ways, PROMPTS, repeats=1)
  return [bench.row_of(one, both[0]) for one in both], both


def test_every_way_decodes_every_prompt_once():
  """The copies that fill up the last batch are in no figure."""
  rows, (plain, lookup) = decoded()
  session = lookup.session
  expected = session.generate(PROMPTS)
  assert plain.tokens == lookup.tokens == [completion.token_ids for completion in expected]
  assert plain.texts == lookup.texts == [completion.text for completion in expected]
  assert lookup.metrics == Metrics.total([completion.metrics for completion in expected])
  assert [row['prompts'] for row in rows] == [3, 3]
  assert [row['new_tokens'] for row in rows] == [sum(map(len, plain.tokens))] * 2


def test_rows_are_named_by_the_help():
  """Each field of a row, and no other, is in what --help prints."""
  rows, _ = decoded()
  fields = bench.__doc__.partition('Fields of a row')[2]
  named = {name.strip() for names in re.findall(r'^    (\S.*?)  ', fields, re.MULTILINE) for name in names.split(',')}
  assert named == set(rows[0]) == set(rows[1])


def test_parts_make_the_prediction():
  """By hand: two batches, of the second of which one prompt counts; a pass takes 10 ms, one over γ + 1 tokens 20."""
  _, (plain, lookup) = decoded()

  def batch(seconds, draft_seconds, *passes_by_width):
    rows = [dataclasses.replace(lookup.metrics, passes=sum(by_width), emitted=10, passes_by_width=by_width)
            for by_width in passes_by_width]
    return timed.Batch(seconds, {1: .01, 5: .02}, draft_seconds, 0.0, [[]] * len(rows), [], [], rows)

  lookup = dataclasses.replace(lookup, batches=[batch(.2, .001, (2, 4), (2, 6)), batch(.1, .001, (1, 3))])
  plain = dataclasses.replace(plain, batches=[batch(.3, 0.0, (10,), (10,)), batch(.1, 0.0, (10,))])
  row = bench.row_of(lookup, plain)
  assert row['prompts'] == 3 and row['new_tokens'] == 30
  assert row['ms_per_token'] == pytest.approx(1e3 * (.2 * 2 + .1) / 30)
  assert [row['ms_per_token_p10'], row['ms_per_token_p90']] == pytest.approx([11, 19])  # of 10 and 20
  assert row['speedup'] == pytest.approx((.3 * 2 + .1) / (.2 * 2 + .1))
  assert row['tokens_per_second'] == pytest.approx(2 / (.5 / 30))
  assert row['ms_per_round'] == pytest.approx(1e3 * .3 / (8 + 4))
  assert (row['plain_pass_ms'], row['verify_cost'], row['draft_cost']) == pytest.approx((10, 2, .1 / 4))
  parts = 2 * .01 + 6 * .02 + 8 * .001, .01 + 3 * .02 + 4 * .001  # of the rows with most passes
  assert row['step_cost'] == pytest.approx(.3 / sum(parts))
  assert row['predicted_speedup'] == pytest.approx((.1 * 2 + .1) / (parts[0] * 2 + parts[1]))
  assert bench.row_of(plain, plain)['predicted_speedup'] == bench.row_of(plain, plain)['speedup'] == 1


def test_bandwidth_is_of_all_devices(monkeypatch):
  config = config_of('none')
  config.mesh.data, config.mesh.model = 2, 4
  assert bench._bandwidth(config) == 1e10, 'devices of a CPU share its memory'
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  assert bench._bandwidth(config) == 8e10


def test_each_device_reads_its_copy():
  mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  sharding = jax.sharding.NamedSharding(mesh, jax.P('model'))
  split, whole = jax.device_put(jnp.ones((8, 3)), sharding), jnp.ones((8, 3))
  assert bench._weight_bytes({'split': split, 'whole': whole}) == 2 * 96 + 96


def test_tables_hold_every_field_and_fit_a_terminal(capsys):
  rows, _ = decoded()
  wide = {'task': 'humaneval sampled', 'drafter': 'simulated', 'gamma': 10, 'accepted_per_position': [1.0] + [.29] * 9,
          'tokens_per_second': 1234.5, 'ms_per_token': 123.45, 'ms_per_round': 1234.56, 'new_tokens': 10000}
  bench.show([row | wide for row in rows])
  lines = capsys.readouterr().out.splitlines()
  assert max(map(len, lines)) <= 140
  headings = ' '.join(lines)
  for name in REQUIRED:
    assert bench.COLUMNS[name].heading in headings
  assert '100 29 29 29 29 29 29 29 29 29' in headings


@pytest.mark.parametrize('cost, cell', [(0.0, '0.000'), (0.3124, '0.312'), (5e-4, '0.001'), (4.2e-5, '4e-05')])
def test_a_small_cost_is_not_shown_as_none(cost, cell):
  assert bench.COLUMNS['draft_cost'].cell({'draft_cost': cost}) == cell


def test_batches_that_are_not_full_are_said(capsys):
  session = Session.from_config(config_of('none', batch=2))
  rows = bench.compare({'none': session}, PROMPTS, repeats=1)
  said = '3 prompts do not fill batches of 2: copies of the last one fill up and do not count\n'
  assert capsys.readouterr().out == said
  assert [row['drafter'] for row in rows] == ['none']
  bench.compare({'none': session}, PROMPTS[:2], repeats=1)
  assert not capsys.readouterr().out


def test_broken_weights_are_no_benchmark():
  session = Session.from_config(config_of('lookup', batch=2))
  session.params = dataclasses.replace(
      session.params, target=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), session.params.target))
  with pytest.raises(RunError, match=r'3 of 3 texts \(plain\) ended in numbers that are not finite'):
    bench.compare({'lookup': session}, PROMPTS, repeats=1)


BROKEN = '''
import runpy, sys
from launch import errors, timed
def time_all(ways, prompts, repeats):
  raise errors.RunError('numbers broke down')
timed.time_all = time_all
sys.argv[0] = {module!r}
runpy.run_module({module!r}, run_name='__main__', alter_sys=True)
'''


@pytest.mark.parametrize('module, config', [
    pytest.param('launch.bench', 'tiny.py:lookup', marks=pytest.mark.slow),
    ('experiments.sweep', 'sweep_gamma.py:tiny')])
def test_a_failed_run_is_one_line_and_status_1(module, config):
  done = subprocess.run([sys.executable, '-c', BROKEN.format(module=module), f'--config=configs/{config}'],
                        capture_output=True, text=True, cwd=pathlib.Path(bench.__file__).parent.parent)
  assert done.returncode == 1 and done.stderr.count('\n') == 1 and not done.stdout
  assert done.stderr.startswith('error: ') and done.stderr.endswith('numbers broke down\n')


def test_rows_become_json():
  rows, _ = decoded()
  assert json.loads(results.dumps(rows))[1]['speedup'] == rows[1]['speedup']
