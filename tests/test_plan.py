"""`launch.plan`: what the TPU compiler makes of the loops, and what the command says.

The structure is that of Chinchilla at full width with fewer layers; the 80 layers are compiled in a slow test.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import pytest

from configs import chinchilla, llama2_70b, tiny
from launch import build, compile_ahead, plan
from launch.chips import CHIPS, GIB
from launch.compile_ahead import described_mesh, kept_arrays, need_compiler, programs_of
from launch.roofline import roofline
from launch.slices.table import slice_of
from models.config import DecoderConfig
from models.errors import InputError

try:
  import libtpu
except ImportError:
  libtpu = None
needs_libtpu = pytest.mark.skipif(libtpu is None, reason="pip install -e '.[tpu]'")
pytestmark = pytest.mark.usefixtures('optimized')
LAYERS = {'chinchilla_70b': 3, 'chinchilla_4b': 2, 'llama2_70b': 2, 'llama2_7b': 1}


@pytest.fixture(autouse=True)
def few_layers(request, monkeypatch):
  """The models of the configs, shorter."""
  monkeypatch.setattr(os, 'environ', os.environ.copy())
  if request.function is test_chinchilla_on_v4:
    return
  for name, layers in LAYERS.items():
    make, seed = build.RANDOM_MODELS[name]
    monkeypatch.setitem(build.RANDOM_MODELS, name, (
        functools.partial(shortened, make, layers), seed))


def shortened(make, layers: int) -> DecoderConfig:
  return dataclasses.replace(make(), num_layers=layers)


@functools.cache
def planned(family: str = 'chinchilla', rows: int = 8, wanted: tuple[str, ...] = plan.LOOPS, topology: str = 'v4-32',
            draft: str = 'sharded') -> dict:
  need_compiler()
  config = {'chinchilla': chinchilla, 'llama2_70b': llama2_70b}[family].get_config()
  config.engine.rows, config.mesh.draft = rows, draft
  return plan.plan(config, slice_of(topology), wanted=wanted, prompt_tokens=128)


def structure_holds(facts: dict, target_layers: int, draft_layers: int):
  """The facts that decide whether the program is the one that was meant."""
  assert facts['fits']
  assert facts['temp_mib'] <= 64
  assert facts['loop_copies'] == []
  assert facts['vector_dots'] == []
  assert facts['aliased'] and facts['same_shardings']
  assert facts['aliased_mib'] == pytest.approx(facts['cache_gib'] * 1024, rel=0.02)
  for name, counts in facts['all_reduces_per_pass'].items():
    layers = draft_layers if name.startswith('draft') else target_layers
    # XLA may merge one with an independent one, which is then named after that.
    assert counts['layers'] + counts['other'] == 2 * layers + 1
    assert counts['layers'] >= 2 * layers - 1
    assert counts['all_gathers'] == 1


@pytest.mark.slow
@needs_libtpu
def test_structure_on_v4():
  """Two all-reduces a layer, one for the embedding, one gather of the logits; nothing copied, nothing off the unit."""
  structure_holds(planned(), LAYERS['chinchilla_70b'], LAYERS['chinchilla_4b'])
  assert set(planned()['all_reduces_per_pass']) == {'plain', 'verify', 'draft first', 'draft next'}


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize('topology', ['v5p-32', 'v5e-16', 'v6e-16'])
def test_structure_on_the_other_slices(topology):
  facts = planned(wanted=('speculative',), topology=topology)
  structure_holds(facts, LAYERS['chinchilla_70b'], LAYERS['chinchilla_4b'])


@needs_libtpu
@pytest.mark.slow
def test_a_draft_that_is_whole_on_every_chip():
  """It needs no links, and its weights and caches are counted whole."""
  facts, sharded = planned(wanted=('speculative',), draft='replicated'), planned()
  assert facts['loop_copies'] == [] and facts['aliased'] and facts['same_shardings']
  for name in ('draft first', 'draft next'):
    assert not any(facts['all_reduces_per_pass'][name].values())
  assert facts['all_reduces_per_pass']['verify'] == sharded['all_reduces_per_pass']['verify']
  assert facts['weights_gib'] > sharded['weights_gib'] and facts['cache_gib'] > sharded['cache_gib']


@needs_libtpu
def test_precision_is_that_of_the_run(monkeypatch):
  found = []

  def refuse(*_):
    found.append(jax.config.jax_default_matmul_precision)
    raise compile_ahead.DoesNotFitError('too much')

  monkeypatch.setattr(compile_ahead.Programs, 'compile_loop', refuse)
  need_compiler()
  config = chinchilla.get_config()
  config.engine.precision = 'highest'
  plan.plan(config, slice_of('v4-32'))
  assert found == ['highest']


def test_what_is_left_out():
  config = chinchilla.get_config()
  assert plan._left_out(config) == []
  config.engine.widths, config.engine.adaptive.enabled = (1,), True
  assert plan._left_out(config) == ['engine.widths', 'engine.adaptive']


def test_a_prompt_that_fills_the_row():
  config = chinchilla.get_config()
  with pytest.raises(InputError, match=r'--prompt_tokens=1920 leaves no room in engine\.capacity=1920'):
    plan.plan(config, slice_of('v4-32'), prompt_tokens=1920)


@needs_libtpu
@pytest.mark.slow
def test_grouped_queries_on_v4():
  """Llama 2 70B has 8 kv heads for 16 chips: each is repeated, the structure stays."""
  structure_holds(planned('llama2_70b'), LAYERS['llama2_70b'], LAYERS['llama2_7b'])


@needs_libtpu
def test_a_single_row_would_be_seen():
  """With one query row XLA multiplies on the vector unit: the check must find that."""
  assert planned(rows=1, wanted=('plain',))['vector_dots']


@pytest.mark.slow
@needs_libtpu
def test_facts_and_rows():
  facts = planned()
  assert (facts['chips'], facts['hosts'], facts['usable_gib']) == (16, 4, CHIPS['v4'].usable_gib)
  assert facts['floor_ms'] < facts['predicted_ms_plain']
  assert [(row['name'], row['gamma'], row['measured_ms_per_token']) for row in facts['workloads']] == [
      (name, 4, None) for name in ('humaneval', 'xsum greedy', 'xsum nucleus')]
  for key in ('weights_gib', 'predicted_ms_draft', 'predicted_ms_verify'):
    assert facts[key] > 0


@needs_libtpu
def test_nothing_to_compile():
  need_compiler()
  with pytest.raises(InputError, match='nothing to compile'):
    plan.plan(chinchilla.get_config('none'), slice_of('v4-32'), wanted=('speculative',))


@needs_libtpu
def test_v4_has_one_device_per_chip():
  """Without megacore the compiler describes 32 devices for 16 chips."""
  need_compiler()
  assert described_mesh(slice_of('v4-32'), chinchilla.get_config().mesh).size == 16


@pytest.mark.slow
@needs_libtpu
def test_a_config_that_does_not_fit():
  """Before anything is compiled: by how much, and which knob helps."""
  need_compiler()
  config = chinchilla.get_config('none')
  config.engine.batch = 4400
  facts = plan.plan(config, slice_of('v4-32'))
  assert not facts['fits'] and 'loop_copies' not in facts
  assert facts['problem'].startswith('does not fit on v4-32: ')
  assert 'GiB a chip too much' in facts['problem']
  assert 'lower engine.capacity or engine.batch' in facts['problem']
  excess = float(facts['problem'].removeprefix('does not fit on v4-32: ').split()[0])
  assert excess == pytest.approx(facts['weights_gib'] + facts['cache_gib'] - facts['usable_gib'], abs=0.01)


@needs_libtpu
def test_the_compiler_says_what_does_not_fit(monkeypatch):
  """RESOURCE_EXHAUSTED while compiling is no traceback."""
  def refuse(*_):
    raise compile_ahead.DoesNotFitError('the total memory exceeds available HBM (30.75G)')
  monkeypatch.setattr(compile_ahead.Programs, 'compile_loop', refuse)
  need_compiler()
  facts = plan.plan(chinchilla.get_config(), slice_of('v4-32'))
  assert not facts['fits'] and 'exceeds available HBM (30.75G)' in facts['problem']


@needs_libtpu
def test_kept_arrays_are_large_ones():
  need_compiler()
  config = chinchilla.get_config()
  programs = programs_of(config, described_mesh(slice_of('v4-32'), config.mesh))
  dims = {shape.dims for shape in kept_arrays((programs.params, programs.state(1, 128).cache))}
  assert {(8192, 512), (4, 3, 128, 8192), (1, 4, 2048, 128), (2000, 8192)} <= dims
  assert (4, 128) not in dims and (8192,) not in dims


def test_mesh_of_another_size():
  config = chinchilla.get_config()
  with pytest.raises(InputError, match=r'mesh.data=1 x mesh.model=16 does not match the slice: v4-16 has 8 chips on 2'):
    described_mesh(slice_of('v4-16'), config.mesh)


def test_without_the_compiler(monkeypatch):
  monkeypatch.setattr(compile_ahead.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(InputError, match=r"pip install -e '\.\[tpu\]'"):
    need_compiler()


@needs_libtpu
def test_drafter_that_cannot_be_planned():
  need_compiler()
  config = chinchilla.get_config()
  with config.unlocked():
    config.drafter = {'name': 'simulated', 'alpha': 0.5}
  with pytest.raises(InputError, match="'simulated' cannot be planned"):
    programs_of(config, described_mesh(slice_of('v4-32'), config.mesh))


def command(*arguments: str) -> subprocess.CompletedProcess:
  environment = {name: value for name, value in os.environ.items() if name != 'JAX_PLATFORMS'}
  return subprocess.run([sys.executable, '-m', 'launch.plan', *arguments], capture_output=True, text=True, check=False,
                        env=environment)


@pytest.mark.parametrize('arguments, said', [
    (['--topology=v4-33'], "slice 'v4-33' is unknown"), (['--topology=8xV100'], "the GPU 'V100' is unknown"),
    ([], '--topology is missing'), (['--topology=v4-32', '--only=plane'], '--only=plane is no program'),
    (['--topology=1xA100'], 'does not fit on 1xA100'),
    (['--topology=8xH100', '--only=plain'], '--only is for slices')])
def test_wrong_input(arguments, said):
  result = command(*arguments)
  assert result.returncode == 2
  assert [line for line in result.stderr.splitlines() if said in line] == result.stderr.splitlines()


def test_gpus_by_roofline():
  result = command('--topology=8xH100', '--json_out=-')
  assert result.returncode == 0
  facts = json.loads(result.stdout)
  assert facts['fits'] and facts['chips'] == 8 and len(facts['workloads']) == 3
  assert 'predicted ms/token' in result.stderr and 'published ms/token' in result.stderr


def test_layers_that_draft_cost_time():
  """On GPUs as well: they are read, though no byte is stored twice."""
  config = tiny.get_config('self')
  facts, none = (roofline(one, 1, CHIPS['H100']) for one in (config, tiny.get_config('none')))
  assert 0 < facts['predicted_ms_draft'] < facts['predicted_ms_plain']
  assert facts['weights_gib'] == none['weights_gib'] and facts['cache_gib'] > none['cache_gib']
  config.drafter.num_layers = 3
  with pytest.raises(InputError, match=r'drafter\.num_layers=3 must lie in 1\.\.2'):
    roofline(config, 1, CHIPS['H100'])


@pytest.mark.slow
@needs_libtpu
def test_chinchilla_on_v4():
  """The whole 70B + 4B loop: it fits, it is the program that was meant, and what it should take."""
  facts = planned.__wrapped__()
  structure_holds(facts, 80, 8)
  assert facts['weights_gib'] == pytest.approx((70.06 + 4.12) * 1e9 * 2 / 16 / GIB, rel=0.01)
  assert facts['predicted_ms_plain'] <= 9.5
  predicted = {row['name']: row['predicted_ms_per_token'] for row in facts['workloads']}
  assert predicted['humaneval'] <= 4.0 and predicted['xsum nucleus'] <= 5.0 and predicted['xsum greedy'] <= 4.7
