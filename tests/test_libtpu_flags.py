"""What `libtpu` is told before it is loaded."""

import importlib.util
import os
import subprocess
import sys

import jax
import pytest

from launch import libtpu_flags
from launch.libtpu_flags import skip_absent_tpu, use_libtpu_flags


@pytest.mark.parametrize('given, expected', [
    (None, '--xla_jf_program_hbm_alignment_in_kib=1'), ('--a=2', '--a=2 --xla_jf_program_hbm_alignment_in_kib=1'),
    ('--xla_jf_program_hbm_alignment_in_kib=16', '--xla_jf_program_hbm_alignment_in_kib=16')])
def test_the_users_flags_count_more(given, expected):
  environment = {} if given is None else {'LIBTPU_INIT_ARGS': given}
  use_libtpu_flags(environment)
  assert environment == {'LIBTPU_INIT_ARGS': expected}


@pytest.mark.parametrize('installed, files, before, after', [
    (('libtpu',), [], None, 'cpu'), (('libtpu',), ['/dev/accel0'], None, None), ((), [], None, None),
    (('libtpu', 'jax_cuda12_plugin'), [], None, None), (('libtpu',), [], 'tpu', 'tpu')])
def test_no_tpu_no_search(monkeypatch, installed, files, before, after):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name in installed)
  monkeypatch.setattr(libtpu_flags.glob, 'glob', lambda pattern: files if 'accel' in pattern else [])
  kept = jax.config.jax_platforms
  try:
    jax.config.update('jax_platforms', before)
    skip_absent_tpu()
    assert jax.config.jax_platforms == after
  finally:
    jax.config.update('jax_platforms', kept)


def test_a_cpu_run_does_not_speak_of_tpus():
  """Whether or not `libtpu` is installed."""
  environment = {name: value for name, value in os.environ.items() if name != 'JAX_PLATFORMS'}
  result = subprocess.run(
      [sys.executable, '-m', 'launch.generate', '--config=configs/tiny.py:none', '--prompt=abc',
       '--config.sampling.max_new_tokens=2'], capture_output=True, text=True, check=True, env=environment)
  assert result.stderr == ''
