"""config.json -> `DecoderConfig`."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from models.config import DecoderConfig, RopeScaling
from models.errors import InputError
from models.layers import rope_frequencies
from models.loading.hf_config import decoder_config

LLAMA = dict(
    model_type='llama', vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096, rms_norm_eps=1e-6)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def parse(directory, **changes) -> DecoderConfig:
  fields = {name: value for name, value in (LLAMA | changes).items() if value != 'absent'}
  (directory / 'config.json').write_text(json.dumps(fields))
  return decoder_config(directory)


def refusal(directory, **changes) -> str:
  with pytest.raises(InputError) as caught:
    parse(directory, **changes)
  assert '\n' not in str(caught.value) and 'config.json' in str(caught.value)
  return str(caught.value)


def test_llama(tmp_path):
  assert parse(tmp_path) == DecoderConfig(
      vocab_size=100, width=64, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=8, ff_width=96,
      max_positions=4096, norm_eps=1e-6)


@pytest.mark.parametrize('field', [name for name in LLAMA if name != 'num_key_value_heads'])
def test_missing_fields_are_named(tmp_path, field):
  assert f"no field '{field}'" in refusal(tmp_path, **{field: 'absent'})


def test_kv_heads_default_per_family(tmp_path):
  assert parse(tmp_path, num_key_value_heads='absent').num_kv_heads == 8
  assert parse(tmp_path, num_key_value_heads=None).num_kv_heads == 8
  assert 'num_key_value_heads' in refusal(tmp_path, model_type='mistral', num_key_value_heads='absent')


def test_head_dim_defaults(tmp_path):
  assert parse(tmp_path, head_dim=24).head_dim == 24
  assert parse(tmp_path, model_type='qwen3').head_dim == 128
  assert parse(tmp_path, model_type='qwen2').head_dim == 8
  assert 'hidden_size=65' in refusal(tmp_path, hidden_size=65)


def test_family_switches(tmp_path):
  llama, qwen2, qwen3 = (parse(tmp_path, model_type=family) for family in ('llama', 'qwen2', 'qwen3'))
  assert [(config.qkv_bias, config.qk_norm) for config in (llama, qwen2, qwen3)] == [
      (False, False), (True, False), (False, True)]
  assert not llama.tied_embedding and parse(tmp_path, tie_word_embeddings=True).tied_embedding


def test_torch_dtype_is_not_followed(tmp_path):
  assert parse(tmp_path, torch_dtype='bfloat16').dtype == 'float32'


@pytest.mark.parametrize(('changes', 'named'), [
    (dict(model_type='gemma'), 'model_type'), (dict(attention_bias=True), 'attention_bias'),
    (dict(mlp_bias=True), 'mlp_bias'), (dict(hidden_act='gelu'), 'hidden_act'),
    (dict(partial_rotary_factor=0.5), 'partial_rotary_factor'), (dict(quantization_config={'bits': 4}), 'quantization'),
    (dict(rope_parameters=dict(rope_type='default', partial_rotary_factor=0.5)), 'rope_parameters.partial'),
    (dict(vocab_size='many'), 'vocab_size'), (dict(vocab_size=True), 'vocab_size'), (dict(vocab_size=0), 'vocab_size'),
    (dict(rms_norm_eps=float('nan')), 'rms_norm_eps'), (dict(num_attention_heads=3, head_dim=8), 'num_heads=3')])
def test_refusals_name_the_field(tmp_path, changes, named):
  fields = LLAMA | changes
  (tmp_path / 'config.json').write_text(json.dumps(fields))
  with pytest.raises(InputError, match=named):
    decoder_config(tmp_path)


def test_config_file_itself(tmp_path):
  with pytest.raises(InputError, match='cannot be read'):
    decoder_config(tmp_path)
  (tmp_path / 'config.json').write_text('{"model_type": ')
  with pytest.raises(InputError, match='not valid JSON'):
    decoder_config(tmp_path)


def test_mistral_windows(tmp_path):
  assert parse(tmp_path, model_type='mistral', sliding_window=7).windows == (7,) * 4
  assert parse(tmp_path, model_type='mistral', sliding_window=None).windows == ()
  assert parse(tmp_path, model_type='mistral').windows == (4096,) * 4
  assert parse(tmp_path, sliding_window=7).windows == ()  # Llama has none
  mixed = ['full_attention'] + ['sliding_attention'] * 3
  assert 'layer_types' in refusal(tmp_path, model_type='mistral', sliding_window=7, layer_types=mixed)


@pytest.mark.parametrize('family', ['qwen2', 'qwen3'])
def test_qwen_windows(tmp_path, family):
  fields = dict(model_type=family, sliding_window=7, use_sliding_window=True)
  assert parse(tmp_path, **fields, max_window_layers=2).windows == (None, None, 7, 7)
  assert parse(tmp_path, **fields).windows == ()  # from layer 28 on
  assert parse(tmp_path, **fields | dict(use_sliding_window=False), max_window_layers=2).windows == ()
  types = ['sliding_attention', 'full_attention', 'sliding_attention', 'full_attention']
  assert parse(tmp_path, **fields, layer_types=types).windows == (7, None, 7, None)
  assert 'layer_types' in refusal(tmp_path, **fields, layer_types=types[:3])
  assert 'layer_types' in refusal(tmp_path, **fields, layer_types=['chunked_attention'] * 4)
  assert 'layer_types' in refusal(tmp_path, **fields | dict(use_sliding_window=False), layer_types=types)


def test_rope_theta_in_both_forms(tmp_path):
  assert parse(tmp_path).rope_theta == 10_000.0
  assert parse(tmp_path, rope_theta=500_000).rope_theta == 500_000.0
  new = dict(rope_type='default', rope_theta=1e6)
  assert parse(tmp_path, rope_parameters=new).rope_theta == 1e6
  assert parse(tmp_path, rope_parameters=new).rope_scaling is None


@pytest.mark.parametrize('key', ['rope_scaling', 'rope_parameters'])
@pytest.mark.parametrize('kind', ['type', 'rope_type'])
def test_rope_scaling_in_all_forms(tmp_path, key, kind):
  def scaling(**fields):
    return parse(tmp_path, **{key: fields}).rope_scaling

  assert scaling(**{kind: 'default'}) is None
  assert scaling(**{kind: 'linear'}, factor=2) == RopeScaling('linear', 2.0)
  assert scaling(**{kind: 'llama3'}, **LLAMA3) == RopeScaling('llama3', 8.0, 8192)
  assert scaling(**{kind: 'yarn'}, factor=4.0) == RopeScaling('yarn', 4.0, 4096)
  assert scaling(**{kind: 'yarn'}, factor=4.0, original_max_position_embeddings=1024, beta_fast=16, beta_slow=2,
                 attention_factor=1.5, truncate=False) == RopeScaling(
                     'yarn', 4.0, 1024, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5, truncate=False)


def test_yarn_mscale(tmp_path):
  """As transformers: a ratio if both are given, else the usual factor."""
  def factor(**fields):
    return parse(tmp_path, rope_scaling=dict(type='yarn', factor=40.0, **fields)).rope_scaling.attention_factor

  assert factor() is None and factor(mscale=1.0) is None
  assert factor(mscale=1.0, mscale_all_dim=1.0) == 1.0
  np.testing.assert_allclose(factor(mscale=0.707, mscale_all_dim=1.0), 1.2608 / 1.3689, rtol=1e-4)


def test_unknown_rope_types_are_refused(tmp_path):
  """fault 53: unknown rope type -> error, never ignored."""
  for kind in ('dynamic', 'longrope', 'su', 'proportional', 'yarm'):
    assert f"is '{kind}', which is not supported" in refusal(tmp_path, rope_scaling=dict(type=kind, factor=2.0))
  assert 'takes no scaling' in refusal(tmp_path, rope_scaling=dict(factor=2.0))
  assert 'takes no scaling' in refusal(tmp_path, rope_parameters=dict(full_attention=dict(rope_type='yarn')))
  assert 'rope_scaling.factor' in refusal(tmp_path, rope_scaling=dict(type='linear'))
  assert 'rope_scaling.factor' in refusal(tmp_path, rope_scaling=dict(type='linear', factor=0.5))
  assert 'low_freq_factor' in refusal(tmp_path, rope_scaling=dict(type='llama3', **LLAMA3 | dict(low_freq_factor=9.0)))


def test_llama3_frequencies(tmp_path):
  """fault 53: head size 128, base 500,000, Llama 3.1's scaling."""
  changes = dict(head_dim=128, rope_theta=500_000.0)
  plain, _ = rope_frequencies(parse(tmp_path, **changes))
  scaled, _ = rope_frequencies(parse(tmp_path, **changes, rope_scaling=dict(rope_type='llama3', **LLAMA3)))
  ratio = scaled / plain
  np.testing.assert_allclose(ratio[:29], 1.0)
  np.testing.assert_allclose(ratio[29:35], [0.828, 0.644, 0.494, 0.371, 0.271, 0.190], atol=5e-4)
  np.testing.assert_allclose(ratio[35:], 0.125)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10 ** 9) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(['type', 'rope_type', 'factor', 'rope_theta', 'x']), inner, max_size=3), max_leaves=4)
FIELDS = [*LLAMA, 'head_dim', 'rope_theta', 'rope_scaling', 'rope_parameters', 'sliding_window', 'layer_types',
          'use_sliding_window', 'max_window_layers', 'tie_word_embeddings', 'hidden_act', 'partial_rotary_factor']


@settings(max_examples=400, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3),
       family=st.sampled_from(['llama', 'mistral', 'qwen2', 'qwen3']))
def test_any_json_is_refused_or_read(tmp_path_factory, changes, family):
  directory = tmp_path_factory.getbasetemp() / 'json'
  directory.mkdir(exist_ok=True)
  (directory / 'config.json').write_text(json.dumps(LLAMA | dict(model_type=family) | changes))
  try:
    decoder_config(directory)
  except InputError as error:
    assert '\n' not in str(error)


@pytest.mark.parametrize('layers', [0, -1, 10**9])
def test_layers_are_counted_before_lists_are_made_of_them(tmp_path, layers):
  assert f"'num_hidden_layers' should lie in 1..10000, not {layers}" in refusal(tmp_path, num_hidden_layers=layers)
