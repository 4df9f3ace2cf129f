"""`launch.plan` of trees and heads: what the TPU compiler makes of their loops, at full width with fewer layers."""

import dataclasses
import functools
import importlib.util
import os

import pytest

from configs import eagle_llama2, lookup_mistral, medusa_vicuna
from launch import build, plan
from launch.build_drafter import tree_of
from launch.chips import CHIPS
from launch.compile_ahead import need_compiler
from launch.roofline import roofline
from launch.slices.table import slice_of
from models.errors import InputError

pytestmark = pytest.mark.usefixtures('optimized')
needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec('libtpu'), reason="pip install -e '.[tpu]'")
LAYERS = 2
CONFIGS = {'medusa': (medusa_vicuna, '70b', 'v4-32'), 'eagle': (eagle_llama2, '70b', 'v4-32'),
           'eagle2': (eagle_llama2, '70b_eagle2', 'v4-32'), 'lookup_tree': (lookup_mistral, 'lookup_tree', 'v4-8')}


@pytest.fixture(autouse=True)
def few_layers(monkeypatch):
  monkeypatch.setattr(os, 'environ', os.environ.copy())
  for name, (make, seed) in build.RANDOM_MODELS.items():
    monkeypatch.setitem(build.RANDOM_MODELS, name, (functools.partial(shortened, make), seed))


def shortened(make):
  config = make()
  return dataclasses.replace(config, num_layers=LAYERS, windows=config.windows[:LAYERS])


@functools.cache
def planned(name: str) -> dict:
  need_compiler()
  module, variant, topology = CONFIGS[name]
  return plan.plan(module.get_config(variant), slice_of(topology), wanted=plan.LOOPS, prompt_tokens=128)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize('name', CONFIGS)
def test_structure(name):
  """The accepted path moves within the cache: no copy of it, or of a weight, in the loop."""
  facts = planned(name)
  assert facts['fits'] and facts['temp_mib'] <= 64
  assert facts['loop_copies'] == []
  assert facts['vector_dots'] == []
  assert facts['aliased'] and facts['same_shardings']
  verify = facts['all_reduces_per_pass']['verify']
  assert verify['layers'] + verify['other'] == 2 * LAYERS + 1 and verify['all_gathers'] == 1


@pytest.mark.slow
@needs_libtpu
def test_links_of_heads():
  """Medusa: one for each residual block. EAGLE: projection, attention and MLP of each of 5 passes."""
  medusa, eagle = (planned(name)['all_reduces_per_pass']['draft'] for name in ('medusa', 'eagle'))
  assert medusa['layers'] + medusa['other'] <= 5
  assert eagle['all_gathers'] >= 5


@pytest.mark.slow
@needs_libtpu
def test_times_of_heads():
  facts = planned('eagle')
  assert 0 < facts['predicted_ms_draft'] < facts['predicted_ms_verify'] * 10
  row, = facts['workloads']
  assert (row['tokens_per_pass'], row['published_speedup'], row['alpha']) == (3.81, 3.01, None)


def test_published_trees():
  """Nodes by depth, as their authors released them."""
  count = lambda tree: [len(tree.nodes_at(depth)) for depth in range(1, tree.levels + 1)]
  assert count(tree_of(medusa_vicuna.TREE)) == [10, 23, 23, 7]
  assert count(tree_of(eagle_llama2.TREE)) == [4, 8, 8, 3, 2]


@needs_libtpu
def test_heads_of_a_file():
  config = eagle_llama2.get_config()
  config.drafter.source = 'somewhere'
  need_compiler()
  with pytest.raises(InputError, match=r'somewhere is no directory with config\.json and model\.safetensors'):
    plan.plan(config, slice_of('v4-32'))


def test_gpus_know_no_trees():
  with pytest.raises(InputError, match=r"drafter.name='medusa': GPUs are planned for chains"):
    roofline(medusa_vicuna.get_config(), 8, CHIPS['H100'])
