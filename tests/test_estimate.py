"""The estimate: assumptions, the parts of a step, and their sums."""

import pytest

from configs import chinchilla
from experiments import published
from launch import estimate
from launch.chips import CHIPS
from launch.estimate import Assumptions, Pass, Step, Work, Workload
from launch.roofline import num_parameters, roofline, roofline_ms
from launch.slices.table import slice_of
from models.config import DecoderConfig
from models.errors import InputError
from specdec import theory
from tests.test_hlo import program

V4 = Assumptions.of(slice_of('v4-32'), CHIPS['v4'])


def test_assumptions_are_of_the_chip_and_can_be_set():
  assert (V4.hops, V4.hop_us, V4.clock_ghz, V4.hbm_gbs) == (10, 1, 1.05, 1228.8)
  assert Assumptions.of(slice_of('v5e-16'), CHIPS['v5e'], ['hop_us=2.7', 'hops=3']).hop_us == 2.7


@pytest.mark.parametrize('text, said', [
    ('hop=1', "'hop' is no assumption: use one of hop_us, hops"), ('hop_us=fast', "'fast' is not a number"),
    ('hop_us', 'is not a number'), ('hbm_share=0', 'must be positive'), ('hops=nan', 'must be positive')])
def test_wrong_assumptions(text, said):
  with pytest.raises(InputError, match=said):
    Assumptions.of(slice_of('v4-32'), CHIPS['v4'], [text])


@pytest.mark.parametrize('scope, part', [
    ('jit(run)/while/body/verify/mlp/dot_general', 'verify'), ('jit(run)/while/body/draft/next/while', 'draft/next'),
    ('jit(run)/while/body/draft/first/while/body/gather', 'draft/first'),
    ('jit(run)/while/body/draft/catch_up/while', 'draft/catch_up'), ('jit(run)/while/body/accept/cond', 'rest'),
    ('jit(run)/while', 'rest')])
def test_parts(scope, part):
  assert estimate.part_of(scope) == part


def test_work_of_a_program():
  works = estimate.work_of(program(), V4)
  assert works['verify'] == Work(
      cycles=700 + 30 * 10, layer_reduces=2, gathers=1, exposed_reduces=1, exposed_gathers=1)
  assert works['draft/next'] == Work(cycles=9000)
  assert works['rest'] == works['draft/first'] == Work()


def test_pass_is_the_longer_of_memory_and_core():
  """1 GB at 85 % of 1228.8 GB/s; 1.05 million cycles; 10 hops per all-reduce, 5 per all-gather."""
  work = Work(cycles=1_050_000, layer_reduces=160, other_reduces=1, gathers=2, exposed_reduces=3, exposed_gathers=2)
  short, long = Pass.of(work, 10**9, V4), Pass.of(work, 10**10, V4)
  assert short.memory_ms == pytest.approx(1 / 1228.8 / 0.85 * 1e3)
  assert (short.core_ms, short.links_ms) == (pytest.approx(1.0), pytest.approx(1.62))
  assert short.ms == pytest.approx(2.62)
  assert long.ms == pytest.approx(10 * short.memory_ms + 0.04)
  assert '= max(memory 0.96 + exposed links 0.04, core 1.00 + links 1.62)' in str(short)


def test_work_adds_up():
  assert Work(1, 2, 3, 4, 5, 6) + Work(10, 20, 30, 40, 50, 60) == Work(11, 22, 33, 44, 55, 66)


def step(plain=8.0, first=0.7, following=0.5, verify=8.5) -> Step:
  return Step(plain, first, following, verify)


def test_step_has_one_first_pass():
  assert step().ms(0) == 8.0
  assert step().ms(1) == pytest.approx(9.2)
  assert step().ms(4) == pytest.approx(0.7 + 3 * 0.5 + 8.5)


def test_workload_row():
  row = Workload('task', 0.8, published_ms=5.0, published_gamma=4).row(step(), 4)
  assert row['tokens_per_pass'] == pytest.approx(3.3616)
  assert row['predicted_ms_per_token'] == pytest.approx(10.7 / 3.3616)
  assert row['predicted_speedup'] == pytest.approx(8.0 * 3.3616 / 10.7)
  assert (row['measured_ms_per_token'], row['published_ms_per_token']) == (None, 5.0)
  assert Workload('task', 0.8, published_ms=5.0, published_gamma=4).row(step(), 3)['published_ms_per_token'] is None


def test_workload_of_a_tree():
  """Of a tree the tokens per pass are given; a whole draft is one pass."""
  row = Workload('task', tokens_per_pass=3.0, published_speedup=2.5, published_gamma=25).row(
      step(first=1.0, following=0.0), 25)
  assert row['predicted_ms_per_token'] == pytest.approx(9.5 / 3) and row['published_speedup'] == 2.5


@pytest.mark.parametrize('fields', [{}, {'alpha': 0.5, 'tokens_per_pass': 2.0}, {'tokens_per_pass': 0.5}])
def test_workload_that_says_too_little_or_too_much(fields):
  with pytest.raises(InputError, match=r'plan\.workloads\.task'):
    Workload('task', **fields)


def test_workloads_are_the_papers():
  """Acceptance from Table 1 and the step of Figure 1: tokens per step = ms of a step / ms per token."""
  config = chinchilla.get_config()
  rows = {(task, how): (plain, fast) for task, how, *_, plain, fast, _ in published.CHEN_TABLE_1['rows']}
  loop = published.CHEN_FIGURE_1['loop_ms']
  step_ms = loop[0] + (loop[7] - loop[0]) * 4 / 7
  names = {'humaneval': ('humaneval', 'nucleus'), 'xsum nucleus': ('xsum', 'nucleus'),
           'xsum greedy': ('xsum', 'greedy')}
  for workload in estimate.workloads_of(config):
    plain, fast = rows[names[workload.name]]
    assert (estimate.published_plain_ms(config), workload.published_ms) == (plain, fast)
    assert workload.alpha == pytest.approx(float(theory.alpha_from_tokens(step_ms / fast, 4)), abs=0.002)
    assert workload.published_gamma == published.CHEN_SETUP['gamma']


def test_workload_out_of_range():
  config = chinchilla.get_config()
  config.plan.workloads.humaneval.alpha = 1.2
  with pytest.raises(InputError, match=r'plan.workloads.humaneval.alpha=1.2 must lie in 0..1'):
    estimate.workloads_of(config)


def test_sizes_of_chinchilla():
  """70.06 and 4.12 billion, relative projections included."""
  assert num_parameters(DecoderConfig.chinchilla_70b()) / 1e9 == pytest.approx(70.06, abs=0.01)
  assert num_parameters(DecoderConfig.chinchilla_4b()) / 1e9 == pytest.approx(4.12, abs=0.01)
  assert num_parameters(DecoderConfig.llama2_70b()) / 1e9 == pytest.approx(68.98, abs=0.01)


def test_roofline_of_gpus():
  """8 H100: 140 GB at 8 x 3350 GB/s is 5.2 ms; with the cache 5.4."""
  assert roofline_ms(140.1e9, 0, 8, CHIPS['H100']) == pytest.approx(5.23, abs=0.01)
  assert roofline_ms(0, 8 * 990e12 * 0.003, 8, CHIPS['H100']) == pytest.approx(3.0)
  facts = roofline(chinchilla.get_config(), 8, CHIPS['H100'])
  assert facts['fits'] and 5.2 < facts['predicted_ms_plain'] < 5.5
  assert [row['name'] for row in facts['workloads']] == ['humaneval', 'xsum greedy', 'xsum nucleus']
  assert not roofline(chinchilla.get_config(), 1, CHIPS['H200'])['fits']
