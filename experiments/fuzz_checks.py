"""What must hold of any input: a right answer, or an InputError of one line. Anything else is a fault."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import signal
import tempfile
from typing import Any

from hypothesis import strategies as st
from ml_collections import ConfigDict
import numpy as np
import safetensors.numpy

from configs import tiny
from experiments import fuzz_files as files
from experiments.report.inputs import runs_of
from experiments.report.page import render
from experiments.sample_files import read_samples
from launch import corpus, results
from launch.draft_ids import read_draft_ids
from launch.prompts import Prompt, load_prompts
from launch.session import Session
from models.errors import InputError
from models.loading import load_decoder
from models.loading.gguf import GgufFile
from models.loading.safetensors import SafetensorsDirectory
from models.tokenizer import Tokenizer
from specdec.training import kept_vectors

SECONDS = 20.0  # of processor time, of one input: longer is a hang
NUM_TOKENS = 262
WORDS = ('random:tiny_target', 'random:tiny_draft', 'embedding', 'float32', 'bfloat16', 'int8', 'block', 'coupled',
         'typical', 'multiround', 'humaneval', 'news', 'file', 'raw', 'chat', 'default', 'replicated')  # of configs
Check = Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class Target:
  """Inputs, and what must hold of each."""

  inputs: st.SearchStrategy
  check: Check


@contextlib.contextmanager
def refused() -> Iterator[None]:
  """Passes over what is refused as it should be."""
  try:
    yield
  except InputError as error:
    assert str(error).strip(), 'refused without a word'


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
  """Ends what takes more than its share of the processor."""

  def stop(number, frame):
    raise TimeoutError(f'still at work after {SECONDS:.0f} s')

  before = signal.signal(signal.SIGVTALRM, stop)
  signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def written(name: str, data: bytes) -> Iterator[pathlib.Path]:
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory) / name
    path.write_bytes(data)
    yield path


def check_safetensors(data: bytes) -> None:
  """What is read is what the format's own package reads."""
  with written('model.safetensors', data) as path, refused():
    file = SafetensorsDirectory(path)
    tensors = {name: file.read(name) for name in file.shapes if file.problem(name) is None}
    theirs = safetensors.numpy.load(data)
    assert file.shapes.keys() == theirs.keys()
    for name, tensor in tensors.items():
      assert tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape == file.shapes[name]
      assert tensor.tobytes() == theirs[name].tobytes()


def check_hf(data: bytes) -> None:
  """A directory whose config.json was changed, weights left alone."""
  with tempfile.TemporaryDirectory() as directory, refused():
    for name, content in (files.hf_directory() | {'config.json': data}).items():
      (pathlib.Path(directory) / name).write_bytes(content)
    model, config = load_decoder(directory)
    assert model.vocab_size == config.vocab_size == 40


def check_gguf(data: bytes) -> None:
  with written('model.gguf', data) as path:
    with refused(), GgufFile(path) as file:
      for name, shape in file.shapes.items():
        if file.problem(name) is None:
          with refused():
            assert file.read(name).shape == shape
    with refused():
      load_decoder(path)
    with refused():
      tokenizer = Tokenizer.from_gguf(path)
      ids = tokenizer.encode('the end')
      assert all(0 <= token < tokenizer.num_tokens for token in ids)
      assert isinstance(tokenizer.decode(ids), str)


@functools.cache
def tokenizer() -> Tokenizer:
  with written('model.gguf', files.gguf_file()) as path:
    return Tokenizer.from_gguf(path)


@functools.cache
def session(drafter: str = 'lookup') -> Session:
  return Session.from_config(_small(drafter))


def _small(drafter: str) -> ConfigDict:
  config = tiny.get_config(drafter)
  with config.unlocked():
    config.engine.capacity, config.sampling.max_new_tokens = 48, 8
  return config


def check_prompt(text: str) -> None:
  """Encoding loses nothing, and a user's text never becomes a special token."""
  with refused():
    ids = tokenizer().encode(text)
    assert tokenizer().decode(ids, skip_special=False) == text
    assert all(0 <= token < NUM_TOKENS - len(files.SPECIALS) for token in ids)
    chat = tokenizer().encode(tokenizer().apply_chat([{'role': 'user', 'content': text}]), parse_special=True)
    assert all(0 <= token < NUM_TOKENS for token in chat)
  with refused():
    (ids,) = session().request([Prompt('x', text, False)]).prompts
    assert 0 < len(ids) < 48


def check_decoding(text: str) -> None:
  """Greedy text with drafts is the plain one."""
  with refused():
    (drafted,) = session().generate([Prompt('x', text, False)])
    (plain,) = plain_session().generate([Prompt('x', text, False)])
    assert drafted.token_ids == plain.token_ids and drafted.text == plain.text and 0 < len(drafted.token_ids) <= 8


@functools.cache
def plain_session() -> Session:
  return session().plain()


def check_overrides(change: tuple[str, dict[str, Any]]) -> None:
  """A config with fields changed to values of their types builds, or is refused."""
  variant, changes = change
  config = _small(variant)
  with config.unlocked():
    config.update_from_flattened_dict(changes)
  with refused():
    made = Session.from_config(config)
    for _, request in made.requests(load_prompts(config.data)):
      assert len(request.prompts) == config.engine.batch


@st.composite
def overrides(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
  variant = draw(st.sampled_from(sorted(tiny.DRAFTERS)))
  fields = dict(_fields(tiny.get_config(variant)))
  names = draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3, unique=True))
  return variant, {name: draw(_like(fields[name])) for name in names}


def _fields(config: ConfigDict, prefix: str = '') -> Iterator[tuple[str, Any]]:
  for name, value in config.items():
    if isinstance(value, ConfigDict):
      yield from _fields(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


def _like(value: Any) -> st.SearchStrategy:
  """Values of the type that a flag of the field takes."""
  if isinstance(value, bool):
    return st.booleans()
  if isinstance(value, int):
    return st.sampled_from(files.INTEGERS) | st.integers(-3, 300)
  if isinstance(value, float):
    return st.floats() | st.sampled_from([0.0, 1.0, -1.0, 1e-300, 1e300])
  if isinstance(value, tuple):
    return st.lists(files.INTERESTING | st.integers(0, 6), max_size=3).map(tuple)
  return st.sampled_from([*files.TEXTS, *WORDS])


def check_prompts_file(data: bytes) -> None:
  for name in ('prompts.jsonl', 'prompts.txt'):
    with written(name, data) as path, refused():
      prompts = load_prompts(ConfigDict({'kind': 'file', 'path': str(path), 'form': 'raw'}))
      assert prompts and len({prompt.id for prompt in prompts}) == len(prompts)
      for prompt in prompts:
        (prompt.id + prompt.text + prompt.reference).encode()
        with refused():
          session().encode(prompt)


def check_rows_file(data: bytes) -> None:
  """What is read can be written and read again, added to, and shown."""
  with written('rows.jsonl', data) as path, refused():
    rows = results.read_rows(str(path))
    results.append_row(str(path), {'last': 1})
    assert results.read_rows(str(path)) == [*rows, {'last': 1}] or 'NaN' in repr(rows) or 'nan' in repr(rows)
    for row in rows:
      results.row_key(row)
    render('x', runs_of(str(path))).encode()


def check_samples_file(data: bytes) -> None:
  with written('samples.jsonl', data) as path, refused():
    for sample in read_samples(str(path)):
      (sample.task_id + sample.completion).encode()


def check_corpus(data: bytes) -> None:
  with written('unit-00000-of-00001.json', data) as path, refused():
    texts = corpus.read_texts(str(path.parent))
    for row in corpus.rows(texts, 8):
      assert all(isinstance(array, np.ndarray) and array.shape == (8,) for array in row.values())
    assert all(isinstance(text.held_out, bool) for text in texts)


def check_draft_ids(data: bytes) -> None:
  with written('ids.json', data) as path, refused():
    ids_U = read_draft_ids(path, NUM_TOKENS)
    assert ids_U.dtype == np.int32 and ids_U[0] >= 0 and ids_U[-1] < NUM_TOKENS and (np.diff(ids_U) > 0).all()


def check_done(data: bytes) -> None:
  """Whatever is there, as many rows as there can be."""
  with written(kept_vectors.DONE, data) as path:
    done = kept_vectors.rows_done(path.parent, files.DONE['about'], 40)
    assert type(done) is int and 0 <= done <= 40


def _json_file(sample: Any) -> st.SearchStrategy:
  """The sample edited as JSON and as bytes, and what is nested without end."""
  return (files.edited_json(sample).map(lambda value: json.dumps(value).encode(errors='surrogatepass'))
          | files.edited_bytes(json.dumps(sample).encode())
          | st.sampled_from([nested.encode() for nested in files.NESTED]))


TARGETS = {
    'safetensors': Target(files.edited_safetensors(), check_safetensors),
    'hf_config': Target(files.edited_hf_config(), check_hf),
    'gguf': Target(files.edited_gguf(), check_gguf),
    'overrides': Target(overrides(), check_overrides),
    'prompt': Target(files.PROMPT_TEXTS, check_prompt),
    'decoding': Target(files.PROMPT_TEXTS, check_decoding),
    'prompts_file': Target(files.edited_lines(files.PROMPTS), check_prompts_file),
    'rows_file': Target(files.edited_lines(files.ROWS), check_rows_file),
    'samples_file': Target(files.edited_lines(files.SAMPLES), check_samples_file),
    'corpus': Target(_json_file(files.UNIT), check_corpus),
    'draft_ids': Target(_json_file(files.IDS), check_draft_ids),
    'done': Target(_json_file(files.DONE), check_done),
}


def check(name: str, value: Any) -> None:
  """Puts one input to a target."""
  with no_hang(), contextlib.redirect_stderr(io.StringIO()):
    TARGETS[name].check(value)
