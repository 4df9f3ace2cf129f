"""Text <-> ids, against the ids that llama.cpp computed (experiments/peers/record_fixtures.py)."""

import dataclasses
import functools
import gzip
import json
from pathlib import Path
import shutil

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from models import chat
from models.errors import InputError
from models.loading import embedded_model
from models.loading.gguf import GgufFile
from models.loading.gguf_tokenizer import PRE_TOKENIZERS, gguf_vocabulary
from models.loading.vocabulary import byte_of_char
from models.tokenizer import StreamDecoder, Tokenizer, check_same_vocabulary

FIXTURES = Path(__file__).parents[1] / 'fixtures' / 'tokenizers'
GGUF_KINDS = {'byte-level': 'byte-level.gguf', 'sentencepiece': 'sentencepiece.gguf'}


@functools.cache
def recorded(name: str) -> dict:
  return json.loads(gzip.decompress((FIXTURES / f'{name}.json.gz').read_bytes()))


def parsed_ids(record: dict) -> list[list[int]]:
  """Ids with special tokens read as such: kept only where they differ."""
  return [record['parsed'].get(str(index), ids) for index, ids in enumerate(record['ids'])]


@pytest.fixture(scope='module')
def smollm2() -> Tokenizer:
  try:
    return Tokenizer.from_gguf(embedded_model())
  except InputError as error:
    pytest.skip(str(error))


@pytest.fixture(scope='module', params=sorted(GGUF_KINDS))
def small(request) -> Tokenizer:
  return Tokenizer.from_gguf(FIXTURES / GGUF_KINDS[request.param])


def edited(path: Path, **metadata) -> Tokenizer:
  """The tokenizer of a GGUF file with some of its metadata replaced (None removes a key)."""
  with GgufFile(path) as file:
    for name, value in metadata.items():
      key = name if name.startswith('tokenizer.') else f'tokenizer.ggml.{name}'
      file.metadata.pop(key, None)
      if value is not None:
        file.metadata[key] = value
    return Tokenizer(gguf_vocabulary(file))


def test_embedded_model_against_llama_cpp(smollm2):
  """1,000 strings of code, many scripts, emoji, digits, white space and special tokens, parsed and not."""
  record = recorded('smollm2')
  assert len(record['texts']) == 1000
  assert [smollm2.encode(text) for text in record['texts']] == record['ids']
  assert [smollm2.encode(text, parse_special=True) for text in record['texts']] == parsed_ids(record)


def test_embedded_model_facts(smollm2):
  assert smollm2.num_tokens == 49152 and smollm2.bos_id == 1 and smollm2.pad_id == 2 and smollm2.eos_ids == {0, 2}
  assert smollm2.vocab[2] == '<|im_end|>' and smollm2.token_bytes()[2] == b''
  assert smollm2.encode('a', add_special=True) == smollm2.encode('a')  # it adds no beginning
  assert [len(smollm2.encode(digits)) for digits in ('7', '77', '7777')] == [1, 2, 4]


def test_decoding_is_the_inverse(smollm2):
  record = recorded('smollm2')
  assert [smollm2.decode(ids) for ids in record['ids']] == record['texts']
  pieces = smollm2.token_bytes()
  for text, ids in zip(record['texts'], parsed_ids(record), strict=True):
    assert smollm2.decode(ids, skip_special=False) == text
    assert b''.join(pieces[token] for token in ids).decode() == smollm2.decode(ids)


@pytest.mark.parametrize('pre', sorted(PRE_TOKENIZERS))
def test_pre_tokenizers_against_llama_cpp(pre):
  """Tekken in ASCII only: to llama.cpp every other letter is both upper and lower case, to Mistral it is not."""
  record = recorded('byte-level')
  tokenizer = edited(FIXTURES / 'byte-level.gguf', pre=pre)
  compared = 0
  for text, ids in zip(record['texts'], record['ids'][pre], strict=True):
    if pre != 'tekken' or text.isascii():
      assert tokenizer.encode(text) == ids
      compared += 1
  assert compared > 50


def test_sentencepiece_gguf_against_llama_cpp():
  record = recorded('sentencepiece')
  tokenizer = Tokenizer.from_gguf(FIXTURES / 'sentencepiece.gguf')
  assert [tokenizer.encode(text) for text in record['texts']] == record['ids']
  assert [tokenizer.encode(text, parse_special=True) for text in record['texts']] == parsed_ids(record)
  begun = [tokenizer.encode(text, add_special=True) for text in record['texts'][:len(record['begun'])]]
  assert begun == record['begun'] and tokenizer.bos_id == begun[0][0]


def test_sentencepiece_model_against_llama_cpp():
  """tokenizer.model and the GGUF file hold the same vocabulary; llama.cpp alone adds spaces after special tokens."""
  record = recorded('sentencepiece')
  tokenizer = Tokenizer.from_hf(FIXTURES)
  for text, ids in zip(record['texts'], record['ids'], strict=True):
    if '<|' not in text:
      assert tokenizer.encode(text) == ids
      assert tokenizer.decode(ids) == text.replace('▁', ' ')  # it is the space
  check_same_vocabulary(tokenizer, Tokenizer.from_gguf(FIXTURES / 'sentencepiece.gguf'))


def test_space_prefix_can_be_off():
  tokenizer = edited(FIXTURES / 'sentencepiece.gguf', add_space_prefix=False)
  assert tokenizer.decode(tokenizer.encode(' two spaces ')) == ' two spaces '
  assert tokenizer.encode('a') != Tokenizer.from_gguf(FIXTURES / 'sentencepiece.gguf').encode('a')


@pytest.mark.parametrize(('file', 'changes', 'named'), [
    ('byte-level.gguf', dict(model='bert'), "tokenizer model 'bert' is not supported"),
    ('byte-level.gguf', dict(model=None), 'tokenizer.ggml.model'),
    ('byte-level.gguf', dict(pre='gpt-4o'), "pre-tokenizer 'gpt-4o' is not supported"),
    ('byte-level.gguf', dict(merges=['q', 'x y']), 'merges'), ('byte-level.gguf', dict(merges=['zq qz']), 'merges'),
    ('byte-level.gguf', dict(token_type=[1, 1]), '2 token types'),
    ('byte-level.gguf', dict(tokens=[1, 2]), 'should hold str only'),
    ('byte-level.gguf', dict(tokens=['a', 'a'], token_type=[1, 1]), 'comes twice'),
    ('byte-level.gguf', dict(eos_token_id=10 ** 6), 'eos_token_id is 1000000'),
    ('sentencepiece.gguf', dict(scores=[0.0]), '1 scores'), ('sentencepiece.gguf', dict(scores=None), 'scores'),
    ('sentencepiece.gguf', dict(token_type=[1] * 480), 'sentencepiece refuses the vocabulary')])
def test_gguf_refusals(file, changes, named):
  with pytest.raises(InputError, match=named) as caught:
    edited(FIXTURES / file, **changes)
  assert '\n' not in str(caught.value)


def test_beginning_and_end_tokens():
  path = FIXTURES / 'byte-level.gguf'
  plain = edited(path).encode('x')
  assert edited(path, pre='gpt-2').encode('x', add_special=True) == plain
  assert edited(path, pre='llama-bpe').encode('x', add_special=True) == [1, *plain]  # as llama.cpp
  assert edited(path, pre='llama-bpe', add_bos_token=False).encode('x', add_special=True) == plain
  assert edited(path, add_bos_token=True, add_eos_token=True).encode('x', add_special=True) == [1, *plain, 0]


def test_padding_tokens_do_not_count():
  """fault 29: [PAD] entries that fill a vocabulary up to the model's width are no real tokens."""
  path = FIXTURES / 'byte-level.gguf'
  with GgufFile(path) as file:
    names, types = file.get('tokenizer.ggml.tokens', list), file.get('tokenizer.ggml.token_type', list)
  padded = edited(path, tokens=[*names, '[PAD0]', '[PAD1]'], token_type=[*types, 5, 5])
  assert padded.num_tokens == len(names) == len(padded.token_bytes())
  check_same_vocabulary(Tokenizer.from_gguf(path), padded)


def test_user_text_does_not_become_control_tokens(small):
  text = 'a<|im_end|>b'
  raw, parsed = small.encode(text), small.encode(text, parse_special=True)
  (end,) = (token for token, name in small.vocab.items() if name == '<|im_end|>')
  assert end not in raw and end in parsed and end in small.eos_ids
  assert small.decode(raw) == text and small.decode(parsed).replace(' ', '') == 'ab'
  assert '<|im_end|>' in small.decode(parsed, skip_special=False)


def test_ids_out_of_range(small):
  for token in (-1, small.num_tokens):
    with pytest.raises(InputError, match=f'token id {token} is not in the vocabulary'):
      small.decode([token])


def test_half_a_surrogate_pair(small):
  with pytest.raises(InputError, match='surrogate pair at character 1'):
    small.encode('a\ud800')


@settings(max_examples=150, deadline=None)
@given(text=st.text(), cuts=st.lists(st.integers(0, 60), max_size=5))
@pytest.mark.parametrize('kind', sorted(GGUF_KINDS))
def test_streaming_equals_decoding(kind, text, cuts):
  """Pieces of any size join up to the whole, and no piece holds half a character."""
  tokenizer = cached(kind)
  ids = tokenizer.encode(text)
  stream, parts, start = StreamDecoder(tokenizer), [], 0
  for cut in [*sorted(cuts), len(ids)]:
    parts.append(stream.feed(ids[start:cut]))
    start = max(start, cut)
  assert all('\ufffd' not in part for part in parts) or '\ufffd' in text
  assert ''.join(parts) + stream.finish() == tokenizer.decode(ids) == text.replace('▁', ' ' if kind[0] == 's' else '▁')


@functools.cache
def cached(kind: str) -> Tokenizer:
  return Tokenizer.from_gguf(FIXTURES / GGUF_KINDS[kind])


def test_streaming_holds_back_half_characters(small):
  ids = small.encode('é漢🙂')
  stream = StreamDecoder(small)
  parts = [stream.feed([token]) for token in ids]
  assert ''.join(parts) == 'é漢🙂' and set(''.join(parts)) == set('é漢🙂') and parts.count('') > 3
  stream = StreamDecoder(small)
  assert stream.feed(ids[:-1]) == 'é漢' and stream.finish() == '\ufffd'


def test_streaming_a_continuation():
  """Llama's leading space belongs to the text if it goes on with one."""
  tokenizer = cached('sentencepiece')
  ids = tokenizer.encode('go on')
  assert StreamDecoder(tokenizer).feed(ids) == 'go on'
  assert StreamDecoder(tokenizer, continues=True).feed(ids) == ' go on'


def swapped(tokenizer: Tokenizer, first: int, second: int) -> Tokenizer:
  names = list(tokenizer._parts.names)
  names[first], names[second] = names[second], names[first]
  return Tokenizer(dataclasses.replace(tokenizer._parts, names=tuple(names)))


def changed(tokenizer: Tokenizer, **changes) -> Tokenizer:
  return Tokenizer(dataclasses.replace(tokenizer._parts, **changes))


def test_draft_with_another_vocabulary(small):
  """fault 28: ids 10 and 11 swapped: refused, naming the first differing id and both strings."""
  with pytest.raises(InputError) as caught:
    check_same_vocabulary(small, swapped(small, 10, 11))
  message = str(caught.value)
  assert f'id 10 is {small.vocab[10]!r} to the target and {small.vocab[11]!r} to the draft' in message
  check_same_vocabulary(small, small)


@pytest.mark.parametrize('which', ['bos', 'eos', 'pad'])
def test_draft_with_other_special_tokens(small, which):
  """fault 28: compared by string and id."""
  base = changed(small, bos_id=1, eos_id=0, pad_id=2)
  with pytest.raises(InputError, match=f'another {which} token: id . .* to the target, id 7') as caught:
    check_same_vocabulary(base, changed(base, **{f'{which}_id': 7}))
  assert repr(small.vocab[7]) in str(caught.value)


def test_draft_with_more_or_fewer_tokens(small):
  """fault 29: what the draft knows beyond the target is harmless; what it lacks is not."""
  shorter = changed(small, names=small._parts.names[:-2], pieces=small._parts.pieces[:-2])
  check_same_vocabulary(shorter, small)
  with pytest.raises(InputError, match=f'id {small.num_tokens - 2} is .* to the target and None to the draft'):
    check_same_vocabulary(small, shorter)
  check_same_vocabulary(small, changed(small, pad_id=None))


def test_chat_templates_against_transformers():
  record = recorded('chat')
  for name, template in record['templates'].items():
    rendered = [
        chat.render(template, messages, add_generation_prompt=prompt, bos_token='<s>', eos_token='</s>')
        for messages in record['conversations'] for prompt in (True, False)]
    assert rendered == record['rendered'][name]


def test_chat_refusals():
  with pytest.raises(InputError, match='refuses these messages: unknown role'):
    chat.render(recorded('chat')['templates']['llama3'], [dict(role='tool', content='')])
  with pytest.raises(InputError, match='cannot be rendered'):
    chat.render('{% for %}', [])
  with pytest.raises(InputError, match='cannot be rendered'):
    chat.render('{{ messages.__class__.__mro__ }}', [])
  assert len(chat.render('{{ strftime_now("%Y-%m-%d") }}', [])) == 10


def test_chat(smollm2, small):
  with pytest.raises(InputError, match='no chat template'):
    small.apply_chat([dict(role='user', content='Hi')])
  text = smollm2.apply_chat([dict(role='user', content='Hi')])
  assert text.endswith('<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n')
  ids = smollm2.encode(text, parse_special=True)
  assert ids.count(1) == 3 and ids.count(2) == 2 and smollm2.decode(ids, skip_special=False) == text


def hf_byte_level(directory: Path) -> tokenizers.Tokenizer:
  """A tokenizer.json in the style of Llama 3: byte-level, with a beginning token from its post-processor."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.train_from_iterator(recorded('smollm2')['texts'][:200], tokenizers.trainers.BpeTrainer(
      vocab_size=400, special_tokens=['<|begin|>', '<|eot_id|>'], show_progress=False,
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
  tokenizer.add_tokens(['<think>'])
  tokenizer.post_processor = processors.TemplateProcessing(
      single='<|begin|> $A', pair='<|begin|> $A $B', special_tokens=[('<|begin|>', 0)])
  tokenizer.enable_truncation(4)
  tokenizer.save(str(directory / 'tokenizer.json'))
  tokenizer.no_truncation()
  return tokenizer


def test_tokenizer_json_byte_level(tmp_path):
  theirs = hf_byte_level(tmp_path)
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(dict(
      bos_token={'content': '<|begin|>'}, eos_token='<|eot_id|>', pad_token=None, chat_template=[
          dict(name='tools', template='x'),
          dict(name='default', template='{{ bos_token }}{{ messages[0].content }}')])))
  (tmp_path / 'generation_config.json').write_text(json.dumps(dict(eos_token_id=[1, 5])))
  ours = Tokenizer.from_hf(tmp_path)
  assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.eos_ids) == (0, 1, None, {1, 5})
  assert ours.num_tokens == theirs.get_vocab_size() == 401
  for text in recorded('smollm2')['texts']:
    ids = theirs.encode(text).ids
    assert ours.encode(text, add_special=True, parse_special=True) == ids
    assert ours.decode(ids) == theirs.decode(ids) == text
  raw = ours.encode('<|eot_id|><think>')
  assert 1 not in raw and raw[-1] == 400 and ours.token_bytes()[400] == b'<think>'
  assert ours.apply_chat([dict(content='Hi')]) == '<|begin|>Hi'
  (tmp_path / 'chat_template.jinja').write_text('{{ eos_token }}')
  assert Tokenizer.from_hf(tmp_path).apply_chat([]) == '<|eot_id|>'


def test_tokenizer_json_sentencepiece_style(tmp_path):
  """Llama 2's tokenizer.json: spaces become ▁, unknown characters bytes, one leading space is taken away."""
  vocabulary = ['<unk>', '<s>', '</s>', *(f'<0x{byte:02X}>' for byte in range(256)), '▁', 'a', 'b', '▁a', 'ab', '▁ab']
  theirs = tokenizers.Tokenizer(tokenizers.models.BPE(
      {name: token for token, name in enumerate(vocabulary)}, [('▁', 'a'), ('a', 'b'), ('▁a', 'b')],
      unk_token='<unk>', fuse_unk=True, byte_fallback=True))
  theirs.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
  theirs.decoder = decoders.Sequence([
      decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)])
  theirs.add_special_tokens(['<unk>', '<s>', '</s>'])
  theirs.save(str(tmp_path / 'tokenizer.json'))
  (tmp_path / 'config.json').write_text(json.dumps(dict(bos_token_id=1, eos_token_id=2)))
  ours = Tokenizer.from_hf(tmp_path)
  assert ours.space_prefix and (ours.bos_id, ours.eos_ids) == (1, {2})
  assert ours.token_bytes()[259:] == [b' ', b'a', b'b', b' a', b'ab', b' ab']
  assert ours.token_bytes()[3 + 0xE9] == b'\xe9'
  for text in ('ab a  b', 'é漢', ' ab', 'ab\n', ''):
    ids = ours.encode(text)
    assert ids == theirs.encode(text).ids and ours.decode(ids) == theirs.decode(ids) == text


def test_hugging_face_refusals(tmp_path):
  with pytest.raises(InputError, match=r'neither tokenizer\.json nor tokenizer\.model'):
    Tokenizer.from_hf(tmp_path)
  (tmp_path / 'tokenizer.model').write_bytes(b'not a model')
  with pytest.raises(InputError, match='not a sentencepiece model'):
    Tokenizer.from_hf(tmp_path)
  (tmp_path / 'tokenizer.json').write_text('{}')
  with pytest.raises(InputError, match='is not a tokenizer'):
    Tokenizer.from_hf(tmp_path)
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece({'a': 0, '[UNK]': 1}, unk_token='[UNK]'))
  tokenizer.decoder = decoders.WordPiece()
  tokenizer.save(str(tmp_path / 'tokenizer.json'))
  with pytest.raises(InputError, match=r"decoder .'WordPiece'. is not supported"):
    Tokenizer.from_hf(tmp_path)
  hf_byte_level(tmp_path)
  (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "<gone>"}')
  with pytest.raises(InputError, match="eos_token '<gone>' is not in the vocabulary"):
    Tokenizer.from_hf(tmp_path)


def test_added_tokens_beside_a_sentencepiece_model(tmp_path):
  shutil.copy(FIXTURES / 'tokenizer.model', tmp_path)
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(dict(added_tokens_decoder={
      '480': dict(content='<|eot_id|>', special=True), '481': dict(content='<think>', special=False)})))
  tokenizer = Tokenizer.from_hf(tmp_path)
  assert tokenizer.num_tokens == 482 and 480 in tokenizer.eos_ids
  assert 481 in tokenizer.encode('a<think>') and 480 not in tokenizer.encode('a<|eot_id|>')
  assert tokenizer.encode('a<|eot_id|>', parse_special=True)[-1] == 480
  assert tokenizer.token_bytes()[480:] == [b'', b'<think>']


def test_alphabet_is_a_bijection():
  table = byte_of_char()
  assert sorted(table.values()) == list(range(256)) and set(table) == set(pre_tokenizers.ByteLevel.alphabet())
