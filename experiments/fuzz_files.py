"""Small valid files, and what is changed in them: bytes anywhere, and values where a format keeps its structure."""

from collections.abc import Callable, Sequence
import copy
import functools
import json
import pathlib
import struct
import tempfile
from typing import Any

import gguf
from hypothesis import strategies as st
import numpy as np

from models.config import DecoderConfig
from models.loading import export_hf
from models.loading.safetensors import write_safetensors
from models.random_weights import random_decoder

INTEGERS = (0, 1, -1, 2, 7, 255, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 10**30)
TEXTS = ('', '\x00', '\ud800', '\udfff', '../../x', '/', 'NaN', '<|im_end|>', '\u202e', 'F32', 'I4', '😀', 'x' * 5000)
SPECIALS = ('<|im_start|>', '<|im_end|>')
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
NESTED = '[' * 100_000, '{"a":' * 100_000, '1' * 5000  # deeper, or longer, than a parser of Python follows

INTERESTING = st.sampled_from([*INTEGERS, *TEXTS, None, True, False, 0.5, -1e308, float('nan'), float('inf'), [], {}])
JSON = st.recursive(INTERESTING | st.text(max_size=6), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.text(max_size=4), inner, max_size=3), max_leaves=4)


# Edits


@st.composite
def edited_bytes(draw: st.DrawFn, base: bytes) -> bytes:
  """Up to four places overwritten, filled in or cut out, or the end cut off."""
  data = bytearray(base)
  for _ in range(draw(st.integers(1, 4))):
    place = draw(st.integers(0, max(len(data) - 1, 0)))
    part = draw(st.binary(min_size=1, max_size=8) | st.sampled_from([
        (number % 2**64).to_bytes(8, 'little') for number in INTEGERS]))
    kind = draw(st.sampled_from(['over', 'in', 'out', 'end']))
    if kind == 'over':
      data[place:place + len(part)] = part
    elif kind == 'in':
      data[place:place] = part
    elif kind == 'out':
      del data[place:place + draw(st.integers(1, 64))]
    else:
      del data[place:]
  return bytes(data)


@st.composite
def edited_json(draw: st.DrawFn, value: Any) -> Any:
  """Up to three values somewhere inside replaced, dropped or added."""
  value = copy.deepcopy(value)
  for _ in range(draw(st.integers(1, 3))):
    holders = _holders(value)
    holder = draw(st.sampled_from(holders)) if holders else None
    if holder is None:
      return draw(JSON)
    key = draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
    kind = draw(st.sampled_from(['replace', 'drop', 'add']))
    if kind == 'replace':
      holder[key] = draw(JSON)
    elif kind == 'drop':
      del holder[key]
    elif isinstance(holder, dict):
      holder[draw(st.text(max_size=8))] = holder[key]
    else:
      holder.append(holder[key])
  return value


def _holders(value: Any) -> list[Any]:
  """All lists and objects inside that hold anything."""
  inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
  return ([value] if inner else []) + [holder for entry in inner for holder in _holders(entry)]


@st.composite
def edited_lines(draw: st.DrawFn, rows: Sequence[Any]) -> bytes:
  """JSON lines with a value, a line or bytes changed."""
  kind = draw(st.sampled_from(['json', 'bytes', 'line']))
  if kind == 'json':
    rows = draw(edited_json(list(rows)))
    rows = rows if isinstance(rows, list) else [rows]
  lines = [json.dumps(row) for row in rows]
  if kind == 'line':
    lines[draw(st.integers(0, len(lines) - 1))] = draw(st.sampled_from(NESTED) | st.text(max_size=20))
  data = '\n'.join(lines).encode(errors='surrogatepass') + draw(st.sampled_from([b'', b'\n', b'\r\n', b'{"torn": ']))
  return draw(edited_bytes(data)) if kind == 'bytes' else data


# Safetensors


@functools.cache
def safetensors_file() -> bytes:
  rng = np.random.default_rng(0)
  tensors = {'a.weight': rng.normal(size=(2, 3)).astype(np.float32), 'b': rng.normal(size=4).astype(np.float16),
             'c': np.arange(3), 'scalar': np.float32(1.5)[()] * np.ones((), np.float32)}
  return _written('model.safetensors', lambda path: write_safetensors(path, tensors))


@st.composite
def edited_safetensors(draw: st.DrawFn) -> bytes:
  base = safetensors_file()
  if draw(st.booleans()):
    return draw(edited_bytes(base))
  length = int.from_bytes(base[:8], 'little')
  header = draw(edited_json(json.loads(base[8:8 + length])))
  raw = json.dumps(header).encode(errors='surrogatepass')
  said = draw(st.sampled_from([len(raw)] * 2 * len(INTEGERS) + [*INTEGERS])) % 2**64
  return said.to_bytes(8, 'little') + raw + base[8 + length:]


# A Hugging Face directory


@functools.cache
def hf_directory() -> dict[str, bytes]:
  """File name -> content, of a model with one layer."""
  config = DecoderConfig.tiny(vocab_size=40, num_layers=1, width=8, head_dim=4, ff_width=8)
  with tempfile.TemporaryDirectory() as directory:
    export_hf(random_decoder(config, 0), directory)
    return {path.name: path.read_bytes() for path in pathlib.Path(directory).iterdir()}


@st.composite
def edited_hf_config(draw: st.DrawFn) -> bytes:
  base = hf_directory()['config.json']
  if draw(st.integers(0, 3)) == 0:
    return draw(edited_bytes(base))
  return json.dumps(draw(edited_json(json.loads(base)))).encode(errors='surrogatepass')


# GGUF


@functools.cache
def gguf_file() -> bytes:
  """A model with one layer and a byte-level vocabulary of 262 tokens, two of them special."""
  return _written('model.gguf', _write_gguf)


def byte_names() -> list[str]:
  """The letters that byte-level vocabularies write the 256 bytes with."""
  shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
  hidden = iter(range(256, 512))
  return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


def _write_gguf(path: pathlib.Path) -> None:
  writer = gguf.GGUFWriter(path, 'llama')
  width, kv_width, ff_width = 32, 16, 32
  for key, value in {
      'block_count': 1, 'context_length': 128, 'embedding_length': width, 'feed_forward_length': ff_width,
      'attention.head_count': 4, 'attention.head_count_kv': 2, 'attention.key_length': 8}.items():
    writer.add_uint32(f'llama.{key}', value)
  writer.add_float32('llama.attention.layer_norm_rms_epsilon', 1e-5)
  letters = byte_names()
  names = [*letters, 'Ġt', 'he', 'in', 'er', *SPECIALS]
  writer.add_string('tokenizer.ggml.model', 'gpt2')
  writer.add_string('tokenizer.ggml.pre', 'smollm')
  writer.add_array('tokenizer.ggml.tokens', names)
  writer.add_array('tokenizer.ggml.token_type', [1] * (len(names) - 2) + [3, 3])
  writer.add_array('tokenizer.ggml.merges', ['Ġ t', 'h e', 'i n', 'e r'])
  writer.add_uint32('tokenizer.ggml.eos_token_id', len(names) - 1)
  writer.add_string('tokenizer.chat_template', CHAT)
  rng = np.random.default_rng(0)
  shapes = {
      'token_embd.weight': (len(names), width), 'output_norm.weight': (width,), 'blk.0.attn_norm.weight': (width,),
      'blk.0.ffn_norm.weight': (width,), 'blk.0.attn_q.weight': (width, width),
      'blk.0.attn_k.weight': (kv_width, width), 'blk.0.attn_v.weight': (kv_width, width),
      'blk.0.attn_output.weight': (width, width), 'blk.0.ffn_gate.weight': (ff_width, width),
      'blk.0.ffn_up.weight': (ff_width, width), 'blk.0.ffn_down.weight': (width, ff_width)}
  for name, shape in shapes.items():
    tensor = rng.normal(size=shape).astype(np.float32)
    if name == 'blk.0.ffn_up.weight':
      kind = gguf.GGMLQuantizationType.Q8_0
      writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    else:
      writer.add_tensor(name, tensor)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


@st.composite
def edited_gguf(draw: st.DrawFn) -> bytes:
  """Bytes changed, or numbers behind the name of a key or a tensor: types, values, counts, dimensions, offsets."""
  base = gguf_file()
  if draw(st.booleans()):
    return draw(edited_bytes(base))
  data = bytearray(base)
  for _ in range(draw(st.integers(1, 3))):
    name = draw(st.sampled_from(_gguf_names()))
    place = base.index(struct.pack('<Q', len(name)) + name) + 8 + len(name) + draw(st.sampled_from(range(0, 36, 4)))
    size = draw(st.sampled_from([4, 8]))
    data[place:place + size] = (draw(st.sampled_from(INTEGERS)) % 2**64).to_bytes(8, 'little')[:size]
  return bytes(data)


@functools.cache
def _gguf_names() -> list[bytes]:
  """Of the keys and tensors, as they stand in the file."""
  base = gguf_file()
  words = (b'general.', b'llama.', b'tokenizer.', b'blk.0.', b'token_embd', b'output_norm')
  found = set()
  for word in words:
    place = -1
    while (place := base.find(word, place + 1)) >= 8:
      length = int.from_bytes(base[place - 8:place], 'little')
      if len(word) <= length < 64:
        found.add(base[place:place + length])
  return sorted(found)


def _written(name: str, write: Callable[[pathlib.Path], None]) -> bytes:
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory) / name
    write(path)
    return path.read_bytes()


# JSON lines


PROMPTS = ({'id': 'a', 'prompt': 'one'}, {'messages': [{'role': 'user', 'content': 'two'}], 'reference': 'r'},
           {'prompt': 'three'})
SAMPLES = ({'task_id': 'HumanEval/0', 'completion': '  return 1\n'}, {'task_id': 'HumanEval/1', 'completion': ''})
ROWS = ({'base': 'c.py', 'overrides': {'engine.gamma': 3}, 'config_hash': 'x', 'drafter': 'lookup', 'gamma': 3,
         'speedup': 1.25, 'predicted_speedup': 1.5, 'ms_per_token': 10.0, 'backend': 'cpu', 'tokens_per_pass': 2.0},
        {'drafter': 'none', 'gamma': 0, 'speedup': 1.0, 'ms_per_token': 12.5, 'backend': 'cpu'})
UNIT = {'texts': [{'id': 'story/1', 'kind': 'story', 'temperature': 1.0, 'prompt_length': 2, 'tokens': [5, 6, 7, 8]},
                  {'id': 'chat/2', 'kind': 'chat', 'temperature': 0.0, 'prompt_length': 1, 'tokens': [9, 1, 2]}]}
IDS = [5, 3, 200, 0]
DONE = {'about': 'a5' * 32, 'done': 12}

PROMPT_TEXTS = st.text(max_size=40) | st.builds(
    lambda parts, times: ''.join(parts) * times,
    st.lists(st.sampled_from([*SPECIALS, '\x00', '\n', ' ', 'a', 'é', '😀', '\ud800', '\u0301', '\ufeff', '\u202e']),
             min_size=1, max_size=5), st.sampled_from([1, 2, 50, 3000]))
