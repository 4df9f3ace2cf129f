"""The vocabulary of a tokenizer and the machine that splits text, from GGUF metadata or Hugging Face files.

Two kinds of machine: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM), where every character of a token stands for a
byte, and sentencepiece BPE (Llama 2, Mistral), where `▁` stands for a space and unknown characters fall to bytes.
"""

import dataclasses
import functools
import re
from typing import Protocol

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from models.errors import InputError
from models.loading.gguf import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types, in GGUF and sentencepiece alike
CHAT_ENDS = ('<|im_end|>', '<|eot_id|>', '<|eom_id|>', '<|end|>', '<end_of_turn>', '<|endoftext|>', '<|end_of_text|>')

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_TEKKEN_WORDS = (
    r'[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|'
    r'[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|'
    r'\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+')
# `tokenizer.ggml.pre` -> expressions that split the text one after the other.
PRE_TOKENIZERS = {
    'default': (r'[\p{P}\$\+<=>\^~\|]+', GPT2_WORDS, r'\p{N}+', '[0-9][0-9][0-9]'),
    'gpt-2': (GPT2_WORDS,),
    'smollm': (r'\p{N}', GPT2_WORDS),
    'starcoder': (r'\p{N}', GPT2_WORDS),
    'llama-bpe': (_LLAMA3_WORDS % r'\p{N}{1,3}',),
    'qwen2': (_LLAMA3_WORDS % r'\p{N}',),
    'tekken': (_TEKKEN_WORDS,),
}
WHOLE_WORDS_FIRST = ('llama-bpe', 'tekken')  # a word that is a token is taken as it is, whatever the merges say
BOS_BY_DEFAULT = ('llama-bpe', 'tekken')


class Splitter(Protocol):
  """Text -> ids, without beginning or end tokens."""

  def encode(self, text: str, parse_special: bool) -> list[int]:
    ...


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """All that a `Tokenizer` is made of.

  Attributes:
    splitter: text -> ids.
    names: id -> string; holes are ''.
    pieces: id -> bytes in the middle of a text; b'' for control tokens.
    specials: ids of control tokens.
    space_prefix: whether a text starts with a space of its own making, which decoding takes away.
    before, after: ids put around a text with `add_special`.
    bos_id, eos_id, pad_id: None if there is none.
    eos_ids: every id that ends a generation.
    chat_template: Jinja source.
  """

  splitter: Splitter
  names: tuple[str, ...]
  pieces: tuple[bytes, ...]
  specials: frozenset[int]
  space_prefix: bool = False
  before: tuple[int, ...] = ()
  after: tuple[int, ...] = ()
  bos_id: int | None = None
  eos_id: int | None = None
  pad_id: int | None = None
  eos_ids: frozenset[int] = frozenset()
  chat_template: str | None = None


@functools.cache
def byte_of_char() -> dict[str, int]:
  """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for characters from U+0100 on."""
  printable = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def byte_level_piece(name: str) -> bytes:
  """The bytes of a token of byte-level BPE; characters outside of the alphabet stand for themselves."""
  table = byte_of_char()
  return b''.join(bytes([table[char]]) if char in table else char.encode() for char in name)


def sentencepiece_piece(name: str) -> bytes:
  """The bytes of a sentencepiece token: `<0x0A>` is a byte, `▁` a space."""
  if re.fullmatch('<0x[0-9A-Fa-f]{2}>', name):
    return bytes([int(name[3:5], 16)])
  return name.replace('▁', ' ').encode()


class ByteLevelSplitter:
  """`tokenizers` does the work; control tokens are looked for only with `parse_special`."""

  def __init__(self, tokenizer: tokenizers.Tokenizer):
    self._tokenizer = tokenizer

  def encode(self, text: str, parse_special: bool) -> list[int]:
    self._tokenizer.encode_special_tokens = not parse_special
    return self._tokenizer.encode(text, add_special_tokens=False).ids


class SentencePieceSplitter:
  """`sentencepiece` does the work, between special tokens, which are looked for first, longest first."""

  def __init__(self, processor: sentencepiece.SentencePieceProcessor, specials: dict[str, int],
               user_defined: dict[str, int], space_prefix: bool):
    self._processor, self._space_prefix = processor, space_prefix
    self._ids = user_defined | specials
    self._always, self._all = _any_of(user_defined), _any_of(self._ids)

  def encode(self, text: str, parse_special: bool) -> list[int]:
    ids, start_of_text = [], True
    pattern = self._all if parse_special else self._always
    for index, part in enumerate(pattern.split(text)):
      if index % 2:
        ids.append(self._ids[part])
      elif part:
        ids += self._processor.encode(' ' + part if self._space_prefix and start_of_text else part)
      start_of_text = index % 2 == 1 or (start_of_text and not part)
    return ids


def _any_of(strings) -> re.Pattern:
  longest_first = sorted(strings, key=len, reverse=True)
  return re.compile('(' + '|'.join(map(re.escape, longest_first)) + ')' if longest_first else '((?!))')


def from_gguf(file: GgufFile) -> Vocabulary:
  """The vocabulary in the metadata of a GGUF file.

  Raises:
    InputError: if the tokenizer's kind is not supported or its lists do not fit together.
  """
  kind = file.get('tokenizer.ggml.model', str)
  if kind not in ('gpt2', 'llama'):
    raise InputError(f"{file.path}: tokenizer model {kind!r} is not supported: only 'gpt2' and 'llama' are")
  names = file.get('tokenizer.ggml.tokens', list)
  types = file.get('tokenizer.ggml.token_type', list, [NORMAL] * len(names))
  if len(types) != len(names) or not all(isinstance(name, str) for name in names):
    raise InputError(f'{file.path}: {len(names)} tokens, but {len(types)} token types')
  while names and types[-1] == UNUSED:  # padding up to the width of the model
    names, types = names[:-1], types[:-1]
  ids = {name: token for token, name in enumerate(names)}
  if len(ids) != len(names):
    raise InputError(f'{file.path}: a token comes twice in tokenizer.ggml.tokens')
  build = _gguf_byte_level if kind == 'gpt2' else _gguf_sentencepiece
  splitter, pieces, prefix, bos_by_default = build(file, names, types, ids)
  specials = frozenset(token for token, kind in enumerate(types) if kind in (CONTROL, UNKNOWN))
  bos, eos = _gguf_id(file, 'bos', len(names)), _gguf_id(file, 'eos', len(names))
  ends = {eos, _gguf_id(file, 'eot', len(names)), _gguf_id(file, 'eom', len(names))}
  ends |= {ids[name] for name in CHAT_ENDS if ids.get(name) in specials}
  return Vocabulary(
      splitter, tuple(names), tuple(b'' if token in specials else piece for token, piece in enumerate(pieces)),
      specials, prefix, bos_id=bos, eos_id=eos, pad_id=_gguf_id(file, 'padding', len(names)),
      before=_ids_if(file.get('tokenizer.ggml.add_bos_token', bool, bos_by_default), bos),
      after=_ids_if(file.get('tokenizer.ggml.add_eos_token', bool, False), eos),
      eos_ids=frozenset(ends - {None}), chat_template=file.get('tokenizer.chat_template', str, '') or None)


def _ids_if(wanted: bool, token: int | None) -> tuple[int, ...]:
  return (token,) if wanted and token is not None else ()


def _gguf_id(file: GgufFile, which: str, num_tokens: int) -> int | None:
  token = file.get(f'tokenizer.ggml.{which}_token_id', int, -1)
  if token >= num_tokens:
    raise InputError(f'{file.path}: tokenizer.ggml.{which}_token_id is {token}, but there are {num_tokens} tokens')
  return token if token >= 0 else None


def _gguf_byte_level(file: GgufFile, names: list[str], types: list[int], ids: dict[str, int]):
  pre = file.get('tokenizer.ggml.pre', str, 'default')
  if pre not in PRE_TOKENIZERS:
    raise InputError(f'{file.path}: pre-tokenizer {pre!r} is not supported: use one of {", ".join(PRE_TOKENIZERS)}')
  merges = [tuple(merge.split(' ', 1)) for merge in file.get('tokenizer.ggml.merges', list)]
  try:
    model = models.BPE(ids, merges, ignore_merges=pre in WHOLE_WORDS_FIRST)
  except Exception as error:  # `tokenizers` raises nothing narrower
    raise InputError(f'{file.path}: tokenizer.ggml.merges does not fit the tokens: {error}') from None
  tokenizer = tokenizers.Tokenizer(model)
  splits = [pre_tokenizers.Split(tokenizers.Regex(words), 'isolated') for words in PRE_TOKENIZERS[pre]]
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
      [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens([
      tokenizers.AddedToken(name, normalized=False) for name, kind in zip(names, types, strict=True)
      if kind in (CONTROL, UNKNOWN)])
  tokenizer.add_tokens([
      tokenizers.AddedToken(name, normalized=False) for name, kind in zip(names, types, strict=True)
      if kind == USER_DEFINED])
  pieces = [name.encode() if kind == USER_DEFINED else byte_level_piece(name)
            for name, kind in zip(names, types, strict=True)]
  return ByteLevelSplitter(tokenizer), pieces, False, pre in BOS_BY_DEFAULT


def _gguf_sentencepiece(file: GgufFile, names: list[str], types: list[int], ids: dict[str, int]):
  scores = file.get('tokenizer.ggml.scores', list)
  if len(scores) < len(names):
    raise InputError(f'{file.path}: {len(names)} tokens, but {len(scores)} scores')
  prefix = file.get('tokenizer.ggml.add_space_prefix', bool, True)
  proto = sentencepiece_model_pb2.ModelProto()
  proto.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
  proto.trainer_spec.byte_fallback = BYTE in types
  proto.normalizer_spec.name = 'identity'
  proto.normalizer_spec.add_dummy_prefix = False  # the splitter adds it, also after special tokens
  proto.normalizer_spec.remove_extra_whitespaces = False
  for name, score, kind in zip(names, scores, types, strict=False):
    proto.pieces.add(piece=name, score=score, type=NORMAL if kind == USER_DEFINED else kind)
  try:
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
  except RuntimeError as error:
    raise InputError(f'{file.path}: sentencepiece refuses the vocabulary: {error}') from None
  of_kind = {kind: {name: ids[name] for name, its in zip(names, types, strict=True) if its == kind}
             for kind in (CONTROL, UNKNOWN, USER_DEFINED)}
  splitter = SentencePieceSplitter(
      processor, of_kind[CONTROL] | of_kind[UNKNOWN], of_kind[USER_DEFINED], prefix)
  pieces = [name.encode() if kind == USER_DEFINED else sentencepiece_piece(name)
            for name, kind in zip(names, types, strict=True)]
  return splitter, pieces, prefix, True
