"""Tokenizers in Hugging Face directories: tokenizer.json, or tokenizer.model or spiece.model of sentencepiece."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from models.errors import InputError
from models.loading.safetensors import read_json
from models.loading.vocabulary import (
  CHAT_ENDS,
  SentencePieceSplitter,
  TokenizersSplitter,
  Vocabulary,
  byte_level_piece,
  first_line,
  sentencepiece_piece,
)

EXTRA_IDS = 100  # T5's own number of gaps


def hf_vocabulary(directory: str | os.PathLike) -> Vocabulary:
  """The vocabulary of a directory.

  Raises:
    InputError: if there is no tokenizer, or it is of a kind that is not supported.
  """
  directory = Path(directory)
  if (directory / 'tokenizer.json').is_file():
    vocabulary = _from_tokenizer_json(directory / 'tokenizer.json')
  elif (directory / 'tokenizer.model').is_file():
    vocabulary = _from_sentencepiece(directory / 'tokenizer.model', _added_tokens(directory))
  elif (directory / 'spiece.model').is_file():
    vocabulary = _from_t5(directory)
  elif not directory.exists():
    raise InputError(f'{directory} does not exist')
  else:
    raise InputError(f'{directory} has neither tokenizer.json nor tokenizer.model')
  return _with_settings(vocabulary, directory)


def _optional(path: Path) -> dict:
  return read_json(path) if path.is_file() else {}


def _decoder_steps(decoder: Any) -> list[dict]:
  """The steps of the decoder of a tokenizer.json, flattened."""
  if not isinstance(decoder, dict):
    return []
  if decoder.get('type') == 'Sequence':
    return [step for inner in decoder.get('decoders', []) for step in _decoder_steps(inner)]
  return [decoder]


def _from_tokenizer_json(path: Path) -> Vocabulary:
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # `tokenizers` raises nothing narrower
    raise InputError(f'{path} is not a tokenizer: {first_line(error)}') from None
  tokenizer.no_truncation()
  tokenizer.no_padding()
  steps = _decoder_steps(read_json(path).get('decoder'))
  piece_of = _piece_function(path, {step.get('type') for step in steps})
  ids, added = tokenizer.get_vocab(with_added_tokens=True), tokenizer.get_added_tokens_decoder()
  names = [''] * (max(ids.values(), default=-1) + 1)
  for name, token in ids.items():
    names[token] = name
  pieces = [name.encode() if token in added else piece_of(name) for token, name in enumerate(names)]
  specials = frozenset(token for token, its in added.items() if its.special)
  before, after = _around(tokenizer)
  return Vocabulary(
      TokenizersSplitter(tokenizer), tuple(names), _silenced(pieces, specials), specials,
      space_prefix=any(_strips_space(step) for step in steps), before=before, after=after)


def _piece_function(path: Path, kinds: set[str]):
  if 'ByteLevel' in kinds:
    return byte_level_piece
  if kinds & {'Metaspace', 'Replace', 'ByteFallback'}:
    return sentencepiece_piece
  raise InputError(f'{path}: decoder {sorted(map(str, kinds))} is not supported: use a byte-level or a '
                   'sentencepiece tokenizer')


def _around(tokenizer: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """The ids that the post-processor puts before and after a text."""
  plain, full = (tokenizer.encode('a', add_special_tokens=special).ids for special in (False, True))
  start = next((at for at in range(len(full)) if full[at:at + len(plain)] == plain), 0)
  return tuple(full[:start]), tuple(full[start + len(plain):])


def _strips_space(step: dict) -> bool:
  if step.get('type') == 'Metaspace':
    return step.get('prepend_scheme', 'always') != 'never' and step.get('add_prefix_space', True)
  return step.get('type') == 'Strip' and step.get('content') == ' ' and step.get('start', 0) > 0


def _silenced(pieces: list[bytes], specials: frozenset[int]) -> tuple[bytes, ...]:
  return tuple(b'' if token in specials else piece for token, piece in enumerate(pieces))


def _added_tokens(directory: Path) -> dict[int, tuple[str, bool]]:
  """id -> string and whether it is a control token, beyond the sentencepiece model."""
  added = {token: (name, True) for name, token in _optional(directory / 'added_tokens.json').items()}
  if not all(isinstance(token, int) for token in added):
    raise InputError(f"{directory / 'added_tokens.json'} maps tokens to something other than ids")
  settings = _optional(directory / 'tokenizer_config.json')
  try:
    for token, fields in settings.get('added_tokens_decoder', {}).items():
      added[int(token)] = fields['content'], fields.get('special', False)
  except (AttributeError, KeyError, TypeError, ValueError):
    raise InputError(f"{directory / 'tokenizer_config.json'}: 'added_tokens_decoder' is malformed") from None
  return added


def _from_sentencepiece(path: Path, added: dict[int, tuple[str, bool]]) -> Vocabulary:
  try:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
  except (RuntimeError, OSError) as error:
    raise InputError(f'{path} is not a sentencepiece model: {first_line(error)}') from None
  size = processor.get_piece_size()
  names = [processor.id_to_piece(token) for token in range(size)]
  names += [''] * (max(added, default=-1) + 1 - size)
  for token, (name, _) in added.items():
    names[token] = name
  specials = {token for token in range(size) if processor.is_control(token) or processor.is_unknown(token)}
  specials |= {token for token, (_, special) in added.items() if special}
  of_user = {name: token for token, (name, _) in added.items() if token not in specials}
  splitter = SentencePieceSplitter(
      processor, {names[token]: token for token in specials}, of_user, space_prefix=False)  # the model adds its own
  pieces = [name.encode() if name in of_user else sentencepiece_piece(name) for name in names]
  return Vocabulary(
      splitter, tuple(names), _silenced(pieces, frozenset(specials)), frozenset(specials),
      space_prefix=processor.encode('a', out_type=str)[0].startswith('▁'),
      before=(processor.bos_id(),) if processor.bos_id() >= 0 else (),
      bos_id=_id_or_none(processor.bos_id()), eos_id=_id_or_none(processor.eos_id()),
      pad_id=_id_or_none(processor.pad_id()))


def _from_t5(directory: Path) -> Vocabulary:
  """T5's spiece.model: gaps to fill in are tokens behind its own, the first the last, and a text ends in </s>."""
  path = directory / 'spiece.model'
  added = _added_tokens(directory)
  first = _from_sentencepiece(path, {})
  if not added:
    count = _optional(directory / 'tokenizer_config.json').get('extra_ids', EXTRA_IDS)
    if not isinstance(count, int) or count < 0:
      raise InputError(f"{directory / 'tokenizer_config.json'}: 'extra_ids' is {count!r}, no number of tokens")
    added = {len(first.names) + count - 1 - gap: (f'<extra_id_{gap}>', True) for gap in range(count)}
  if first.eos_id is None:
    raise InputError(f'{path} has no token that ends a text, which every T5 needs')
  return dataclasses.replace(_from_sentencepiece(path, added), before=(), after=(first.eos_id,))


def _id_or_none(token: int) -> int | None:
  return token if token >= 0 else None


def _with_settings(vocabulary: Vocabulary, directory: Path) -> Vocabulary:
  """Adds what tokenizer_config.json, config.json and generation_config.json say about special tokens and chat."""
  settings = _optional(directory / 'special_tokens_map.json') | _optional(directory / 'tokenizer_config.json')
  model = _optional(directory / 'config.json')
  ids = {name: token for token, name in enumerate(vocabulary.names) if name}

  def special(which: str) -> int | None:
    name = settings.get(f'{which}_token')
    name = name.get('content') if isinstance(name, dict) else name
    if name is None:
      return min(_token_ids(model, which), default=getattr(vocabulary, f'{which}_id'))
    if not isinstance(name, str) or name not in ids:
      raise InputError(f'{directory}: {which}_token {name!r} is not in the vocabulary')
    return ids[name]

  eos = special('eos')
  ends = {eos} - {None} | _token_ids(model, 'eos') | _token_ids(_optional(directory / 'generation_config.json'), 'eos')
  ends |= {ids[name] for name in CHAT_ENDS if name in ids}
  return dataclasses.replace(
      vocabulary, bos_id=special('bos'), eos_id=eos, pad_id=special('pad'),
      eos_ids=frozenset(end for end in ends if end < len(vocabulary.names)),
      chat_template=_chat_template(directory, settings))


def _token_ids(fields: dict, which: str) -> set[int]:
  value = fields.get(f'{which}_token_id')
  return {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}


def _chat_template(directory: Path, settings: dict) -> str | None:
  """chat_template.jinja, or the field of tokenizer_config.json: a string, or a list of which 'default' is taken."""
  if (directory / 'chat_template.jinja').is_file():
    try:
      return (directory / 'chat_template.jinja').read_text(encoding='utf-8')
    except UnicodeDecodeError:
      raise InputError(f"{directory / 'chat_template.jinja'} is no text in UTF-8") from None
  template = settings.get('chat_template')
  if isinstance(template, list):
    named = {entry.get('name'): entry.get('template') for entry in template if isinstance(entry, dict)}
    template = named.get('default')
  if not isinstance(template, str | None):
    raise InputError(f"{directory / 'tokenizer_config.json'}: 'chat_template' is neither a text nor a list of them")
  return template
