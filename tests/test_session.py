"""Sessions: what they refuse, what their programs carry, where texts begin and end."""

import ast
import io
import re

import jax
from ml_collections import ConfigDict
import pytest

from configs import smollm2, tiny
from launch import generate
from launch.prompts import Prompt
from launch.session import Session
from models.errors import InputError
from models.tokenizer import Tokenizer
from specdec.commit import Origin
from specdec.engine import run
from tests.models.test_tokenizer import FIXTURES

PROMPTS = [Prompt('one', 'a b a b', False), Prompt('two', 'xyz', False), Prompt('three', 'q', False)]


@pytest.fixture(autouse=True)
def _precision():
  """Sessions set it for the whole process."""
  before = jax.config.jax_default_matmul_precision
  yield
  jax.config.update('jax_default_matmul_precision', before)


def changed(variant: str = 'lookup', **fields) -> ConfigDict:
  """`configs/tiny.py` with some fields changed, `__` standing for a dot."""
  config = tiny.get_config(variant)
  config.update_from_flattened_dict({name.replace('__', '.'): value for name, value in fields.items()})
  return config


def test_the_mesh_of_a_session_before_is_gone():
  """Set for the whole process, like the precision."""
  tokens = [Session.from_config(changed('none', mesh__data=data, mesh__model=model)).generate(PROMPTS[:1])[0].token_ids
            for data, model in ((1, 8), (1, 1))]
  assert jax.sharding.get_mesh().empty
  assert tokens[0] == tokens[1]


@pytest.mark.parametrize('fields, message', [
    (dict(engine__capacity=5000), 'engine.capacity=5000 is past the context of the target: lower it to 4096 or less'),
    (dict(engine__gamma=-1), 'engine.gamma=-1 must lie in 0..'),
    (dict(engine__batch=0), 'engine.batch=0 must lie in 1..'),
    (dict(sampling__max_new_tokens=0), 'sampling.max_new_tokens=0 must lie in 1..'),
    (dict(sampling__max_new_tokens=1 << 40), 'sampling.max_new_tokens=1099511627776 must lie in'),
    (dict(engine__widths=(1, 6)), 'engine.widths holds 6: widths lie in 1..5, engine.gamma + 1'),
    (dict(engine__widths=('1',)), "engine.widths holds '1'"),
    (dict(engine__precision='float32'), "engine.precision='float32' is unknown: use one of default, high, highest"),
    (dict(engine__attention_block=-1), 'engine.attention_block=-1 must lie in 0..'),
    (dict(sampling__stop=('x', '')), "sampling.stop holds '': stop strings are texts, and not empty"),
    (dict(sampling__stop=(3,)), 'sampling.stop holds 3'),
    (dict(sampling__temperature=-0.5), 'sampling: temperature must be'),
    (dict(sampling__top_p=1.5), 'sampling: top_p must lie in'),
    (dict(drafter__min_ngram=4), 'drafter: need 1 <= min_ngram'),
    (dict(engine__adaptive__enabled=True, engine__adaptive__verify_cost=(1.0,)), 'engine: adaptive gamma needs'),
    (dict(target__dtype='int8'), "dtype='int8' is not a floating-point type"),
    (dict(accept__rule='best'), "accept.rule='best' is unknown"),
])
def test_refuses_wrong_fields_in_one_line(fields, message):
  with pytest.raises(InputError, match=re.escape(message)) as caught:
    Session.from_config(changed(**fields))
  assert '\n' not in str(caught.value)


def test_fields_are_checked_before_a_model_is_loaded():
  with pytest.raises(InputError, match=r'sampling\.stop'):
    Session.from_config(changed(target__source='/nowhere', sampling__stop=('',)))


def test_a_fault_of_the_program_is_no_wrong_input(monkeypatch):
  """A ValueError of JAX or NumPy keeps its traceback."""
  def broken(section, attention_block, **options):
    raise ValueError('shapes (3,) and (4,) do not fit')
  monkeypatch.setattr('launch.session.build_model', broken)
  with pytest.raises(ValueError, match='do not fit') as caught:
    Session.from_config(changed())
  assert not isinstance(caught.value, InputError)


@pytest.mark.parametrize('gamma', [0, 1])
def test_default_widths_fit_every_gamma(gamma):
  for config in (changed(), smollm2.get_config('lookup')):
    config.engine.gamma = gamma
    config.target.source = 'random:tiny_target'
    assert Session.from_config(config).engine.verify_widths == tuple(range(1, gamma + 2))


def dots(lowered: jax.stages.Lowered) -> list[str]:
  return [line for line in lowered.as_text().splitlines() if 'dot_general' in line]


@pytest.mark.parametrize('precision', ['highest', 'default'])
def test_programs_carry_the_precision(precision):
  """Fault 8: the loop and the pass over the prompt; elsewhere than on a CPU a float32 product is else rounded."""
  session = Session.from_config(changed('model', engine__precision=precision))
  request = session.request(PROMPTS[:1])
  prompts = jax.jit(lambda params: session.engine.start(params, request)).lower(session.params)
  state = jax.eval_shape(lambda params: session.engine.start(params, request), session.params)
  loop = run.lower(session.engine, session.params, state)
  for lowered in (prompts, loop):
    assert len(dots(lowered)) > 5
    assert all(f'precision = [{precision.upper()}, {precision.upper()}]' in line for line in dots(lowered))


@pytest.mark.parametrize('block', [0, 64])
def test_attention_block_reaches_target_and_draft(block):
  session = Session.from_config(changed('model', engine__attention_block=block))
  assert {model.config.attention_block for model in (session.params.target, session.params.draft)} == {block or None}


@pytest.mark.parametrize('variant', ['lookup', 'simulated'])
def test_costs_that_the_config_leaves_open_are_measured_and_said(variant, capsys):
  """The line can be written into a config; widths that are not compiled cost what holds them."""
  session = Session.from_config(changed(variant, engine__gamma=2, engine__adaptive__enabled=True))
  adaptive, said = session.engine.adaptive, capsys.readouterr().err
  assert said.count('\n') == 1
  draft_cost, verify_cost = re.search(r'draft_cost=(\S+) engine\.adaptive\.verify_cost=(.*)', said).groups()
  assert (adaptive.draft_cost, adaptive.verify_cost) == (float(draft_cost), ast.literal_eval(verify_cost))
  assert len(adaptive.verify_cost) == 3 and adaptive.verify_cost[0] == 1
  assert adaptive.verify_cost[1] == adaptive.verify_cost[2] and adaptive.draft_cost >= 0


def test_all_prompts_are_checked_before_any_is_decoded(monkeypatch):
  session = Session.from_config(changed())
  monkeypatch.setattr(session, '_complete', None)
  with pytest.raises(InputError, match="prompt 'long' has 5000 tokens, which leaves no room"):
    session.generate([*PROMPTS, Prompt('long', 'x' * 5000, False)])
  with pytest.raises(InputError, match="prompt 'nothing' has no tokens"):
    session.generate([*PROMPTS, Prompt('nothing', '', False)])


def test_a_batch_that_is_short_is_filled_up():
  session = Session.from_config(changed(engine__batch=2))
  (first, full), (last, filled) = session.requests(PROMPTS, [5, 6, 7])
  assert (first, last) == (PROMPTS[:2], PROMPTS[2:])
  assert full.seeds == [5, 6] and filled.seeds == [7, 7] and filled.prompts[0] == filled.prompts[1]


def texts_of(file: str, stops: tuple[str, ...] = ()) -> Session:
  """A session without a model: enough to make text of tokens."""
  return Session(changed(sampling__stop=stops), Tokenizer.from_gguf(FIXTURES / file), None, None)


def test_the_first_space_of_a_continuation_is_kept():
  """Llama 2 and Mistral: a completion's indent is part of it."""
  session = texts_of('sentencepiece.gguf')
  ids = session.tokenizer.encode('return x')
  assert session.tokenizer.token_bytes()[ids[0]].startswith(b' ')
  assert session.text(ids) == ' return x' and session.tokenizer.decode(ids) == 'return x'


def shown(session: Session, ids: list[int], monkeypatch, colour: bool = False) -> str:
  """What `launch.generate` shows of these tokens."""
  out = io.StringIO()
  monkeypatch.setattr(generate.cli, 'output', lambda: out)
  display = generate.Display(session, colour)
  for token in ids:
    display.add([token], [Origin.ACCEPTED if token % 2 else Origin.PLAIN])
  display.finish()
  return out.getvalue()


@pytest.mark.parametrize('file', ['sentencepiece.gguf', 'byte-level.gguf'])
@pytest.mark.parametrize('stops', [(), ('the',), ('he',), ('zz', 'é'), ('\n\n', '\n#')])
def test_what_is_shown_is_what_is_written(file, stops, monkeypatch):
  """Fault 17: no stop string, nothing behind it, and nothing of one that does not come."""
  session = texts_of(file, stops)
  ids = session.tokenizer.encode('In the end é 🙂 came.\n\nThe rest\n')
  end = next((end for end in range(1, len(ids)) if any(stop in session.tokenizer.decode(ids[:end]) for stop in stops)),
             len(ids))
  text = session.text(ids[:end])
  assert shown(session, ids[:end], monkeypatch) == text + '\n'
  assert not any(stop in text for stop in stops)


def test_each_character_has_the_colour_of_its_token(monkeypatch):
  """Also where it is held back until a later token comes."""
  session = texts_of('byte-level.gguf', ('bc!',))
  pieces = {piece: token for token, piece in enumerate(session.tokenizer.token_bytes())}
  ids = [pieces[piece] for piece in (b'a', b'b', b'c', b'd')]
  green = [character for character, token in zip('abcd', ids, strict=True) if token % 2]
  assert 0 < len(green) < 4
  text = shown(session, ids, monkeypatch, colour=True)
  runs = re.findall(r'\x1b\[32m(.*?)\x1b\[0m', text)
  assert ''.join(runs) == ''.join(green) and re.sub(r'\x1b\[\d+m', '', text) == 'abcd\n'
