"""Plans over slices and γ: what is compiled, what is reused, the best γ, and the plot."""

import pytest

from configs import chinchilla, sweep_plan
from experiments import plan_sweep
from experiments.plan_sweep import draw, loops, marked, run_sweep
from launch import results
from models.errors import InputError


def facts(made, gamma: int) -> dict:
  return {
      'topology': made.name, 'gamma': gamma, 'fits': True, 'predicted_ms_plain': 8.0, 'predicted_ms_draft': 0.5,
      'predicted_ms_draft_first': 0.6, 'predicted_ms_verify': 8.0 if gamma < 8 else 20.0, 'assumptions': {}}


@pytest.fixture
def compiled(monkeypatch):
  """What was compiled, without compiling it."""
  points = []

  def plan(config, made, assume, wanted):
    points.append((made.name, config.engine.gamma))
    return facts(made, config.engine.gamma)

  monkeypatch.setattr(plan_sweep, 'plan', plan)
  return points


def test_one_loop_tells_of_all_gammas_below_its_rows():
  assert loops((1, 2, 4, 7, 8, 9), 8) == {7: [1, 2, 4, 7], 8: [8], 9: [9]}
  assert loops((3, 4), 1) == {3: [3], 4: [4]}
  assert loops((2,), 8) == {2: [2]}


def test_rows_and_the_best_gamma(compiled):
  rows = run_sweep(sweep_plan.get_config('v4'))
  assert compiled == [('v4-32', 7), ('v4-32', 8)]
  assert [(row['name'], row['gamma']) for row in rows] == [
      (name, gamma) for name in ('humaneval', 'xsum greedy', 'xsum nucleus') for gamma in range(1, 9)]
  four = rows[3]
  assert four['predicted_ms_per_token'] == pytest.approx((0.6 + 3 * 0.5 + 8.0) / four['tokens_per_pass'])
  assert [row['gamma'] for row in rows if row['published_ms_per_token']] == [4, 4, 4]
  for name in ('humaneval', 'xsum greedy', 'xsum nucleus'):
    mine = [row for row in rows if row['name'] == name]
    assert [row['best'] for row in mine].count(True) == 1
    assert min(mine, key=lambda row: row['predicted_ms_per_token'])['best']
  assert next(row['gamma'] for row in rows if row['best']) == 7, 'at γ = 8 the pass costs more'


def test_what_is_there_is_not_compiled_again(compiled, tmp_path):
  out = str(tmp_path / 'rows.jsonl')
  first = run_sweep(sweep_plan.get_config('v4'), out)
  del compiled[:]
  assert run_sweep(sweep_plan.get_config('v4'), out) == results.plain(first)
  assert compiled == []
  run_sweep(sweep_plan.get_config(), out)
  assert ('v5e-16'.replace('v5e', 'v5litepod'), 7) in compiled and ('v4-32', 7) not in compiled


def test_half_a_loop_is_done_again(compiled, tmp_path):
  """Killed between two rows: none of it is missing or there twice."""
  out = tmp_path / 'rows.jsonl'
  first = run_sweep(sweep_plan.get_config('v4'), str(out))
  out.write_text('\n'.join(out.read_text().splitlines()[:5]))
  assert results.plain(run_sweep(sweep_plan.get_config('v4'), str(out))) == results.plain(first)
  assert compiled == [('v4-32', 7), ('v4-32', 8)] * 2


def test_other_assumptions_and_configs_are_other_rows(compiled, tmp_path, monkeypatch):
  out, config = str(tmp_path / 'rows.jsonl'), sweep_plan.get_config('v4')
  first = run_sweep(config, out)
  with config.unlocked():
    config.assume = ('hop_us=2.7',)
  assert len(run_sweep(config, out)) == len(first) and len(compiled) == 4
  base = chinchilla.get_config()
  base.engine.capacity = 1000
  monkeypatch.setattr(plan_sweep, 'load_config', lambda _: base)
  assert len(run_sweep(config, out)) == len(first) and len(compiled) == 6


def test_only_what_is_asked_for_comes_back(compiled, tmp_path):
  out, config = str(tmp_path / 'rows.jsonl'), sweep_plan.get_config('v4')
  run_sweep(config, out)
  config.gammas = (2, 3)
  assert [row['gamma'] for row in run_sweep(config, out)] == [2, 3] * 3
  assert len(compiled) == 2


def test_a_slice_that_is_too_small(monkeypatch):
  monkeypatch.setattr(plan_sweep, 'plan', lambda *_, **__: {'fits': False, 'problem': 'does not fit on v4-32: at all'})
  with pytest.raises(InputError, match='does not fit on v4-32'):
    run_sweep(sweep_plan.get_config('v4'))


def test_gammas_are_checked():
  config = sweep_plan.get_config('v4')
  config.gammas = (0, 1)
  with pytest.raises(InputError, match='from 1 on'):
    run_sweep(config)


def test_plot(compiled, tmp_path):
  path = tmp_path / 'plan.png'
  draw(run_sweep(sweep_plan.get_config()), str(path))
  assert path.read_bytes().startswith(b'\x89PNG')


def test_ties_are_all_marked():
  rows = [{'topology': 'a', 'name': 'b', 'predicted_ms_per_token': ms} for ms in (2.0, 1.0, 1.0)]
  assert [row['best'] for row in marked(rows)] == [False, True, True]


def test_base_is_planned_as_it_is_run():
  assert sweep_plan.get_config().base.startswith('configs/chinchilla.py')
  assert max(sweep_plan.get_config().gammas) > chinchilla.get_config().engine.rows - 1, 'both kinds of loop'
