"""What `libtpu` is told before it is loaded."""

import importlib.util

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
