"""Tokenizers in the metadata of GGUF files."""

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from models.errors import InputError
from models.loading.gguf import GgufFile
from models.loading.vocabulary import (
  BYTE,
  CHAT_ENDS,
  CONTROL,
  NORMAL,
  UNKNOWN,
  UNUSED,
  USER_DEFINED,
  SentencePieceSplitter,
  TokenizersSplitter,
  Vocabulary,
  byte_level_piece,
  first_line,
  sentencepiece_piece,
)

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


def gguf_vocabulary(file: GgufFile) -> Vocabulary:
  """The vocabulary in the metadata of a GGUF file.

  Raises:
    InputError: if the tokenizer's kind is not supported or its lists do not fit together.
  """
  kind = file.get('tokenizer.ggml.model', str)
  if kind not in ('gpt2', 'llama'):
    raise InputError(f"{file.path}: tokenizer model {kind!r} is not supported: only 'gpt2' and 'llama' are")
  names = _list_of(str, file, 'tokens')
  types = _list_of(int, file, 'token_type', [NORMAL] * len(names))
  if len(types) != len(names):
    raise InputError(f'{file.path}: {len(names)} tokens, but {len(types)} token types')
  real = max((token + 1 for token, kind in enumerate(types) if kind != UNUSED), default=0)
  names, types = names[:real], types[:real]  # the rest pads up to the width of the model
  ids = {name: token for token, name in enumerate(names)}
  if len(ids) != len(names):
    raise InputError(f'{file.path}: a token comes twice in tokenizer.ggml.tokens')
  for name in CHAT_ENDS:  # some files list them as ordinary tokens, which a user's text could then imitate
    if name in ids:
      types[ids[name]] = CONTROL
  build = _gguf_byte_level if kind == 'gpt2' else _gguf_sentencepiece
  splitter, pieces, prefix, bos_by_default = build(file, names, types, ids)
  specials = frozenset(token for token, kind in enumerate(types) if kind in (CONTROL, UNKNOWN))
  bos, eos = _gguf_id(file, 'bos', len(names)), _gguf_id(file, 'eos', len(names))
  ends = {eos, _gguf_id(file, 'eot', len(names)), _gguf_id(file, 'eom', len(names))}
  ends |= {ids[name] for name in CHAT_ENDS if name in ids}
  return Vocabulary(
      splitter, tuple(names), tuple(b'' if token in specials else piece for token, piece in enumerate(pieces)),
      specials, prefix, bos_id=bos, eos_id=eos, pad_id=_gguf_id(file, 'padding', len(names)),
      before=_ids_if(file.get('tokenizer.ggml.add_bos_token', bool, bos_by_default), bos),
      after=_ids_if(file.get('tokenizer.ggml.add_eos_token', bool, False), eos),
      eos_ids=frozenset(ends - {None}), chat_template=file.get('tokenizer.chat_template', str, '') or None)


def _list_of(kind: type, file: GgufFile, which: str, default: list | None = None) -> list:
  values = file.get(f'tokenizer.ggml.{which}', list, default)
  if not all(isinstance(value, kind) for value in values):
    raise InputError(f"{file.path}: metadata 'tokenizer.ggml.{which}' should hold {kind.__name__} only")
  return values


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
  merges = [tuple(merge.split(' ', 1)) for merge in _list_of(str, file, 'merges')]
  try:
    model = models.BPE(ids, merges, ignore_merges=pre in WHOLE_WORDS_FIRST)
  except Exception as error:  # `tokenizers` raises nothing narrower
    raise InputError(f'{file.path}: tokenizer.ggml.merges does not fit the tokens: {first_line(error)}') from None
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
  return TokenizersSplitter(tokenizer), pieces, False, pre in BOS_BY_DEFAULT


def _gguf_sentencepiece(file: GgufFile, names: list[str], types: list[int], ids: dict[str, int]):
  scores = _list_of(float, file, 'scores')
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
    raise InputError(f'{file.path}: sentencepiece refuses the vocabulary: {first_line(error)}') from None
  of_kind = {kind: {name: ids[name] for name, its in zip(names, types, strict=True) if its == kind}
             for kind in (CONTROL, UNKNOWN, USER_DEFINED)}
  splitter = SentencePieceSplitter(
      processor, of_kind[CONTROL] | of_kind[UNKNOWN], of_kind[USER_DEFINED], prefix)
  pieces = [name.encode() if kind == USER_DEFINED else sentencepiece_piece(name)
            for name, kind in zip(names, types, strict=True)]
  return splitter, pieces, prefix, True
