"""`experiments.advise`: its statistics by hand, and the command on the toy."""

import dataclasses
import types

from absl import flags
import numpy as np
import pytest

from configs import smollm2, tiny
from experiments import advice, advice_costs, advice_drafts, advise
from experiments.advice import Acceptance, MeasuredCosts, PlannedCosts
from launch import results
from launch.errors import RunError
from models.errors import InputError
from specdec import theory
from specdec.drafters import Lookup, LookupTree
from specdec.metrics import Metrics
from specdec.tree import TreeSpec

FREE = MeasuredCosts({1: {1: 1.0, 100: 1.0}, 16: {1: 1.0, 100: 1.0}}, {1: 0.0, 16: 0.0}, 4, True)


def metrics(rounds, gamma=4, drafted=None, overlap=0.5) -> Metrics:
  """Of one text whose rounds accept so many drafted tokens."""
  drafted = drafted or [gamma] * len(rounds)
  at = lambda counts: tuple(sum(count > place for count in counts) for place in range(gamma))
  tested = [min(kept + 1, count) for kept, count in zip(rounds, drafted, strict=True)]
  narrow = sum(count == 0 for count in drafted)
  return Metrics(
      passes=len(rounds), emitted=sum(rounds) + len(rounds), accepted=sum(rounds), drafted=sum(drafted),
      tested=sum(tested), drafted_at=at(drafted), tested_at=at(tested), accepted_at=at(rounds),
      overlap_sum=overlap * sum(tested), passes_by_width=(narrow, len(rounds) - narrow))


def acceptance(*texts: Metrics, widths=(1, 5), whole=False) -> Acceptance:
  return Acceptance.of(texts, widths, whole)


WORKED = metrics((4, 0, 2, 4, 1))  # the example of specdec/metrics.py


def test_counts_of_the_worked_example():
  counted = acceptance(WORKED)
  assert counted.conditional_M == pytest.approx([.8, .75, 2 / 3, 1])
  assert counted.overlap == pytest.approx(.5)
  assert counted.steps_P(4) == pytest.approx([5]) and counted.steps_P(0) == pytest.approx([16])
  # Of the first two drafted tokens 4 + 3 are kept in five rounds: 2.4 tokens a step.
  assert counted.steps_P(2) == pytest.approx([16 / 2.4])


def test_speedup_is_the_honest_form_of_theorem_3_8():
  costs = MeasuredCosts({1: {1: 1.0, 3: 1.2, 5: 1.4}, 2: {1: 1.1, 5: 2.4}}, {1: 0.4, 2: 0.44}, 4, True)
  counted = acceptance(WORKED)
  assert advice.speedup(counted, costs, 1, 0) == 1
  assert advice.speedup(counted, costs, 1, 4) == pytest.approx(theory.speedup_measured(3.2, 4, 0.1, 1.4))
  assert advice.speedup(counted, costs, 1, 2) == pytest.approx(theory.speedup_measured(2.4, 2, 0.1, 1.2))
  # Two rows: passes and drafts of their own.
  assert advice.speedup(counted, costs, 2, 4) == pytest.approx(3.2 * 1.1 / (2.4 + 0.4 * 1.1))


def test_a_step_without_a_draft_runs_the_narrow_pass():
  counted = acceptance(metrics((4, 0, 0, 2), drafted=[4, 0, 0, 2]))
  assert counted.width_law(4, 1) == pytest.approx({1: .5, 5: .5})
  assert counted.width_law(4, 2) == pytest.approx({1: .25, 5: .75}), 'both rows must draft nothing'
  tree = dataclasses.replace(counted, whole=True)
  assert tree.width_law(4, 2) == pytest.approx({1: .25, 5: .75}) and tree.gammas == [4]
  several = dataclasses.replace(counted, widths=(1, 3, 5))
  assert several.width_law(4, 1) == pytest.approx({1: .5, 3: .25, 5: .25})
  assert several.width_law(1, 1) == pytest.approx({1: .5, 2: .5})


@pytest.mark.parametrize('alpha, draft_cost', [(.5, .01), (.6, .05), (.7, .1), (.8, .3), (.2, .4)])
def test_best_gamma_is_that_of_the_formula(alpha, draft_cost):
  """With passes that cost alike and acceptance alike at every position, it is Leviathan et al.'s."""
  most = 12
  kept = [round(1e6 * alpha**place) for place in range(1, most + 1)]
  text = dataclasses.replace(
      metrics((0,), most), passes=10**6, emitted=10**6 + sum(kept), accepted=sum(kept), accepted_at=tuple(kept),
      drafted_at=(10**6,) * most, passes_by_width=(0, 10**6))
  costs = MeasuredCosts({1: {1: 1.0, most + 1: 1.0}}, {1: most * draft_cost}, most, True)
  counted = acceptance(text, widths=(1, most + 1))
  best = advice.best_gamma(counted, costs, 1)
  assert best == max(theory.optimal_gamma(alpha, draft_cost, most), 1)
  assert advice.speedup(counted, costs, 1, best) == pytest.approx(
      theory.speedup_leviathan(alpha, best, draft_cost), rel=1e-4)


def test_mean_of_largest_by_enumeration():
  values = np.array([3.0, 1.0, 7.0])
  for batch in (1, 2, 3):
    drawn = np.stack(np.meshgrid(*[values] * batch), axis=-1).reshape(-1, batch)
    assert advice.mean_of_largest(values, batch) == pytest.approx(drawn.max(axis=1).mean())


def test_crossover_by_hand():
  """A pass over n tokens takes 8 + n: three tokens a step of five, so 3 (8 + B) > 8 + 5 B while B < 8."""
  costs = MeasuredCosts({batch: {1: 8.0 + batch, 5: 8.0 + 5 * batch} for batch in (1, 16)}, {1: 0.0, 16: 0.0}, 4, True)
  counted = acceptance(metrics((2, 2, 2, 2)), widths=(5,))
  assert advice.speedup(counted, costs, 7, 4) > 1 > advice.speedup(counted, costs, 9, 4)
  assert advice.stops_paying_at(counted, costs, 4) == 8
  few = MeasuredCosts({batch: {1: 8.0 + batch, 5: 8.0 + 5 * batch} for batch in (1, 7)}, {1: 0.0}, 4, True)
  assert advice.stops_paying_at(counted, few, 4) is None
  assert advice.arithmetic_bound_at(costs, 4) == 2  # 8 + 5 B >= 18
  assert advice.arithmetic_bound_at(FREE, 4) is None


def test_crossover_of_a_real_sweep():
  """From a pass and a draft alone at each batch, and what was accepted at batch 1: where the sweep itself has it."""
  rows = results.read_rows('experiments/results/sweep_batch.jsonl')
  passes = {row['batch']: {1: row['plain_pass_ms'], 8: row['plain_pass_ms'] * row['verify_cost']} for row in rows}
  drafts = {row['batch']: 7 * row['draft_cost'] * row['plain_pass_ms'] for row in rows}
  one = rows[0]
  kept = tuple(round(share * one['drafted'] / 7) for share in one['accepted_per_position'])
  text = dataclasses.replace(
      metrics((0,), 7), passes=sum(one['passes_by_width'].values()), emitted=one['new_tokens'], accepted_at=kept,
      drafted_at=(one['drafted'] // 7,) * 7, passes_by_width=tuple(one['passes_by_width'].values()))
  counted = acceptance(text, widths=(1, 8))
  costs = MeasuredCosts(passes, drafts, 7, by_token=False)
  real = next(row['batch'] for row in rows if row['speedup'] < 1)
  assert real // 2 < advice.stops_paying_at(counted, costs, 7) <= real


def test_batch_of_the_config_is_timed(monkeypatch):
  """Every pass and draft at `engine.batch` is a call of its own; at the others, powers of two, some widths are."""
  calls = []

  def timed(candidates, prompt, batch, widths, repeats):
    calls.append((batch, widths))
    return dict.fromkeys(widths, float(batch)), {one.name: batch / 10 for one in candidates}

  monkeypatch.setattr(advice_costs, '_timed', timed)
  config = tiny.get_config('lookup')
  config.engine.batch = 3
  session = types.SimpleNamespace(engine=types.SimpleNamespace(gamma=7, drafter=types.SimpleNamespace(name='lookup')),
                                  encode=list)
  one = advice_drafts.Candidate('lookup', config, acceptance(WORKED), session)
  costs, = advice_costs.measured_costs([one], ['abc', 'a', 'ab'], 6, 1)
  assert calls == [(1, [1, 2, 4, 8]), (2, [1, 2, 4, 8]), (3, [*range(1, 9)]), (4, [1, 2, 4, 8]), (6, [1, 2, 4, 8])]
  assert [costs.passes(3, 5), costs.draft(3, 4), costs.passes(5, 1)] == [3, .3, 5]


def test_interval_over_prompts():
  alike = acceptance(*[WORKED] * 5)
  assert advice.interval(alike, lambda some: advice.speedup(some, FREE, 1, 4)) == pytest.approx((3.2, 3.2))
  low, high = advice.interval(acceptance(*[metrics((4,)), metrics((0,))] * 3), lambda some: some.overlap)
  assert (low, high) == pytest.approx((.5, .5))
  two = [metrics((4,), overlap=1), metrics((3,), overlap=0)] + [metrics((0,), drafted=[0])] * 3
  low, high = advice.interval(acceptance(*two), lambda some: some.overlap)
  assert (low, high) == pytest.approx((0, 1)), 'one of the prompts alone'
  nothing = acceptance(*[metrics((0,), drafted=[0])] * 5)
  assert np.isnan(advice.interval(nothing, lambda some: some.overlap)).all()
  assert np.isnan(advice.position_intervals(nothing)).all()
  few = acceptance(*[WORKED] * 4)
  assert np.isnan([advice.interval(few, len), *advice.position_intervals(few)]).all(), 'too few for others'


def test_planned_costs():
  costs = PlannedCosts({1: .01, 4: .02}, {1: .012, 4: .03}, {1: .002, 4: .003}, {1: .001, 4: .001})
  assert (costs.batches, costs.passes(4, 1), costs.passes(4, 3)) == ([1, 4], .02, .03)
  assert costs.draft(1, 1) == .002 and costs.draft(1, 4) == pytest.approx(.005)
  assert advice.speedup(acceptance(WORKED, widths=(5,)), costs, 1, 4) == pytest.approx(3.2 * .01 / .017)


def row(speedup, low, high, ends=None, measured=None, prompts=5, draft='lookup', costs='measured'):
  return {'draft': draft, 'gamma': 5, 'batch': 1, 'most_batch': 16, 'prompts': prompts, f'{costs}_plain_ms': 1.0,
          'measured_speedup': measured, 'predicted_speedup': speedup, 'predicted_interval': (low, high),
          'predicted_stops_paying_at': ends}


NAN = float('nan')


@pytest.mark.parametrize('rows, said', [
    ([row(1.6, 1.5, 1.7, 8), row(1.2, 1.1, 1.3)], 'Speculation pays at batch 1: lookup with γ=5: predicted 1.60 (1.50 '
     'to 1.70) times the speed of plain decoding, and by prediction it gains nothing from batch 8 on.'),
    ([row(1.6, 1.5, 1.7)], 'it still pays at batch 16'),
    ([row(1.1, .9, 1.2)], 'may pay at batch 1: lookup with γ=5: predicted 1.10 (0.90 to 1.20) times the speed of plain '
     'decoding, but the interval reaches down to no gain: measure more prompts, and --check.'),
    ([row(1.1, .9, 1.2, costs='predicted')], 'measure more prompts.'),
    ([row(1.1, .9, 1.2, measured=1.1)], 'measure more prompts.'),
    ([row(.93, .9, 1.1), row(.8, .7, .9)], 'does not pay at batch 1: decode plainly; the best of these drafts, lookup '
     'with γ=5: predicted 0.93 (0.90 to 1.10)'),
    ([row(1.3, 1.2, 1.4, measured=.7)], 'does not pay at batch 1: decode plainly; the best of these drafts, lookup '
     'with γ=5: predicted 1.30 (1.20 to 1.40), measured 0.70 times the speed of plain decoding.'),
    ([row(1.3, 1.2, 1.4, measured=1.1), row(1.2, 1.1, 1.3, measured=1.25, draft='self')],
     'pays at batch 1: self with γ=5: predicted 1.20 (1.10 to 1.30), measured 1.25 times'),
    ([row(1.6, NAN, NAN, prompts=1)], 'may pay at batch 1: lookup with γ=5: predicted 1.60 times the speed of plain '
     'decoding, on 1 of your prompts, too few to speak for others: measure more prompts (5 or more).')])
def test_verdict(rows, said):
  assert said in advise.verdict(rows)


@pytest.mark.parametrize('speedup', [0.0, .5, 1.0, float('nan')])
def test_no_verdict_recommends_what_does_not_gain(speedup):
  assert 'decode plainly' in advise.verdict([row(speedup, .5, 1.5)])
  assert 'decode plainly' in advise.verdict([row(1.5, 1.4, 1.6, measured=speedup)])


@pytest.mark.slow
def test_on_the_toy():
  flags.FLAGS.mark_as_parsed()
  config = tiny.get_config('lookup')
  config.sampling.max_new_tokens, config.engine.capacity = 12, 256
  config.data.text = 'to be or not to be'
  candidates, rows = advise.advise(config, ['configs/tiny.py:self', 'configs/tiny.py:none'], 2, 1)
  advise.check_all(candidates, rows, 1)
  assert [row['draft'] for row in rows] == ['lookup', 'self']
  for row in rows:
    assert 1 <= row['gamma'] <= 4 and len(row['measured_verify_cost']) == 5 and row['measured_verify_cost'][0] == 1
    assert row['predicted_speedup'] == max(row['predicted_by_gamma'].values())
    assert np.isnan(row['predicted_interval']).all()  # of one prompt
    assert row['measured_tokens_per_pass'] >= 1 and row['measured_speedup'] > 0
    assert len(row['measured_accepted']) == len(row['measured_accepted_intervals']) == 4
  advise.show(rows)


def facts(batch, fits=True):
  """Of a plan: a plain pass takes 10 ms and 1 more a row, a draft's first token 2 ms, others 1."""
  return {'fits': fits, 'problem': 'too big', 'predicted_ms_plain': 10.0 + batch,
          'predicted_ms_verify': 10.0 + 5 * batch, 'predicted_ms_draft_first': 2.0, 'predicted_ms_draft': 1.0}


def test_a_slice_from_counts(tmp_path, monkeypatch):
  """Nothing is decoded: what an earlier run counted, and what the plan predicts."""
  file = tmp_path / 'advice.json'
  counts = acceptance(WORKED, widths=(5,))
  counted = {'draft': 'self', 'rule': 'rejection', 'temperature': 0.0, 'top_k': 0, 'top_p': 1.0}
  results.write_json(str(file), {'rows': [counted | {'measured_counts': counts}]})
  monkeypatch.setattr(advice_costs, 'plan_slice', lambda config, *_, **__: facts(config.engine.batch))
  monkeypatch.setattr(advise, 'load_prompts', None)
  config = tiny.get_config('self')
  config.engine.gamma = 4
  _, (row,) = advise.advise(config, [], 8, 1, topology='v4-32', counts=str(file))
  assert row['predicted_by_gamma'][4] == pytest.approx(3.2 * 11 / (15 + 2 + 3 * 1))
  assert row['predicted_plain_ms'] == 11 and row['measured_tokens_per_pass'] == 3.2 and 'measured_v' not in row
  assert [row['prompts'], row['predicted_stops_paying_at']] == [1, None]
  config.engine.gamma = 3
  with pytest.raises(InputError, match=r'not about self with engine.gamma=3: it counted self with engine.gamma=4'):
    advice_drafts.counted({'self': config}, str(file))
  config.engine.gamma = 4
  for field, value in {'accept.rule': 'block', 'sampling.temperature': 1.0, 'sampling.top_p': .9,
                       'sampling.top_k': 7}.items():
    other = config.copy_and_resolve_references()
    other.update_from_flattened_dict({field: value})
    with pytest.raises(InputError, match=f'counted self at {field.partition(".")[2]}=.*, not {value}: ask for that'):
      advice_drafts.counted({'self': other}, str(file))
  for text in ('{', '{"rows": [{"draft": "self", "measured_counts": {}}]}', '{"rows": 1}'):
    file.write_text(text)
    with pytest.raises(InputError, match='holds no counts'):
      advice_drafts.counted({'self': config}, str(file))


def test_batches_that_do_not_fit(monkeypatch, capsys):
  """The config's own is refused; a larger one ends the plan, with a word."""
  flags.FLAGS.mark_as_parsed()
  planned = []

  def plan(config, *_, **__):
    planned.append(config.engine.batch)
    return facts(config.engine.batch, fits=config.engine.batch < 8)

  monkeypatch.setattr(advice_costs, 'plan_slice', plan)
  config = tiny.get_config('self')
  config.engine.batch = 3
  costs = advice_costs.planned_costs(config, 'v4-32', (), 32)
  assert planned == [3, 1, 2, 4, 8] and costs.batches == [1, 2, 3, 4]
  assert 'no more than 4 rows are planned: 8 do not fit on v4-32' in capsys.readouterr().out
  config.engine.batch = 9
  with pytest.raises(InputError, match=r'engine.batch=9: too big'):
    advice_costs.planned_costs(config, 'v4-32', (), 32)


def test_a_batch_past_the_largest_is_refused_first(monkeypatch):
  monkeypatch.setattr(advise, 'load_prompts', None)
  config = tiny.get_config('lookup')
  config.engine.batch = 32
  with pytest.raises(InputError, match=r'engine\.batch=32 is beyond --most_batch=16'):
    advise.advise(config, [], 16, 1)


def test_lookup_of_whole_drafts_has_one_gamma():
  """What is found for four tokens is not what is found for two."""
  assert not advice_drafts.drafts_whole(Lookup(partial=True))
  assert advice_drafts.drafts_whole(LookupTree(partial=True, branches=2))
  assert advice_drafts.drafts_whole(Lookup(partial=False)) and acceptance(WORKED, whole=True).gammas == [4]


def test_check_times_what_was_asked_for(monkeypatch):
  """γ and the widths that it has room for, at the config's batch; of heads a chain as long."""
  seen = []
  monkeypatch.setattr(advise.Session, 'from_config', lambda config, target: seen.append(config) or config)
  monkeypatch.setattr(advise.bench, 'compare', lambda sessions, prompts, repeats: [{'speedup': 1}, {'speedup': 1.5}])
  session = types.SimpleNamespace(params=types.SimpleNamespace(target=None), tokenizer=None)
  config = tiny.get_config('lookup')
  config.engine.batch, config.engine.widths = 3, (1, 3, 5)
  assert advise.check(advice_drafts.Candidate('lookup', config, acceptance(WORKED), session), 2, 1) == 1.5
  heads = smollm2.get_config('medusa')
  advise.check(advice_drafts.Candidate('medusa', heads, acceptance(WORKED), session), 3, 1)
  assert [(one.engine.gamma, one.engine.widths, one.engine.batch) for one in seen] == [(2, (1, 3), 3), (3, (1,), 1)]
  assert seen[1].drafter.tree == ((0,), (0, 0), (0, 0, 0)) and config.engine.gamma == 4


def test_counts_outlive_a_check_that_fails(monkeypatch):
  written = []

  def check(one, gamma, repeats):
    if one == 'b':
      raise RunError('not finite')
    return 1.5

  monkeypatch.setattr(advise, 'check', check)
  monkeypatch.setattr(advise.cli, 'write_json', written.append)
  found = [row(1.6, 1.5, 1.7), row(1.2, 1.1, 1.3)]
  with pytest.raises(RunError):
    advise.check_all(['a', 'b'], found, 1)
  assert [one['measured_speedup'] for one in written[0]['rows']] == [1.5, None]


def test_planned_tree(monkeypatch):
  """Heads that are always right twice, and passes that cost alike: a chain of two; nothing for drawn children."""
  ranks_NTM = np.stack([np.zeros((2, 20), int), np.zeros((2, 20), int), np.full((2, 20), 9)], axis=-1)
  monkeypatch.setattr(advise, 'held_out_ranks', lambda *_: ranks_NTM)
  monkeypatch.setattr(advise, 'rows', lambda *_: ())
  drafter = types.SimpleNamespace(tree=TreeSpec.chain(2), draws=False)
  config = smollm2.get_config('medusa')
  config.sampling.temperature = 1.0
  session = types.SimpleNamespace(engine=types.SimpleNamespace(drafter=drafter), params=None, config=config,
                                  tokenizer=types.SimpleNamespace(num_tokens=10))
  one = advice_drafts.Candidate('medusa', config, acceptance(WORKED), session)
  found = advise._planned_tree(one, FREE, 1)
  assert found['tree'] == ((0,), (0, 0)) and found['predicted_tree_speedup'] == pytest.approx(3, rel=.1)
  drafter.draws = True
  assert advise._planned_tree(one, FREE, 1) == {}
  config.sampling.temperature = 0.0
  assert 'tree' in advise._planned_tree(one, FREE, 1)


def test_wrong_input():
  with pytest.raises(InputError, match='no draft to judge'):
    advice_drafts.draft_configs(tiny.get_config('none'), [])
  config = tiny.get_config('lookup')
  config.engine.adaptive.enabled = True
  with pytest.raises(InputError, match=r'engine\.adaptive\.enabled to False'):
    advice_drafts.draft_configs(config, [])
  assert list(advice_drafts.draft_configs(tiny.get_config('self'), ['configs/tiny.py:self'])) == ['self', 'self 2']
