"""Text <-> ids."""

import codecs
from collections.abc import Iterable, Sequence
import os
from pathlib import Path

from models import chat
from models.errors import InputError
from models.loading import orbax
from models.loading.gguf import GgufFile
from models.loading.gguf_tokenizer import gguf_vocabulary
from models.loading.hf_tokenizer import hf_vocabulary
from models.loading.vocabulary import Vocabulary


class Tokenizer:
  """Text <-> ids.

  Attributes:
    num_tokens: real tokens; a model's logits may be wider.
    vocab: id -> string.
    bos_id, eos_id, pad_id: None if there is none.
    eos_ids: every id that ends a generation, ends of chat turns included.
    chat_template: Jinja source, or None.
  """

  def __init__(self, parts: Vocabulary):
    self._parts = parts
    self.num_tokens = len(parts.names)
    self.vocab = {token: name for token, name in enumerate(parts.names) if name}
    self.bos_id, self.eos_id, self.pad_id = parts.bos_id, parts.eos_id, parts.pad_id
    self.eos_ids = parts.eos_ids
    self.chat_template = parts.chat_template

  @classmethod
  def of_model(cls, path: str | os.PathLike) -> 'Tokenizer':
    """From whatever `models.loading.load_decoder` reads: a GGUF file, a Hugging Face directory, a checkpoint of ours.

    Raises:
      InputError: if a file is missing or at fault.
    """
    path = Path(path)
    if (path / orbax.MARK).is_file():
      path /= orbax.TOKENIZER
    if (path / orbax.GGUF_TOKENIZER).is_file():
      path /= orbax.GGUF_TOKENIZER
    return cls.from_gguf(path) if path.is_file() else cls.from_hf(path)

  @classmethod
  def from_gguf(cls, path: str | os.PathLike) -> 'Tokenizer':
    """From the metadata of a GGUF file.

    Raises:
      InputError: if the file or its kind of tokenizer is at fault.
    """
    with GgufFile(path) as file:
      return cls(gguf_vocabulary(file))

  @classmethod
  def from_hf(cls, directory: str | os.PathLike) -> 'Tokenizer':
    """From tokenizer.json or tokenizer.model in a directory, and the settings beside it.

    Raises:
      InputError: if a file is missing or at fault.
    """
    return cls(hf_vocabulary(directory))

  def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
    """Ids of a text.

    Args:
      text: any text.
      add_special: put the model's beginning and end tokens around it, if it has them.
      parse_special: read `<|im_end|>` and the like as control tokens. Not for text of a user's.
    """
    try:
      text.encode()
    except UnicodeEncodeError as error:
      raise InputError(f'the text cannot be encoded: half of a surrogate pair at character {error.start}') from None
    ids = self._parts.splitter.encode(text, parse_special)
    return [*self._parts.before, *ids, *self._parts.after] if add_special else ids

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Text of ids; bytes that are no UTF-8 become U+FFFD."""
    stream = StreamDecoder(self, skip_special)
    return stream.feed(ids) + stream.finish()

  def piece(self, token: int, skip_special: bool = True) -> bytes:
    """The bytes of one id in the middle of a text."""
    if not 0 <= token < self.num_tokens:
      raise InputError(f'token id {token} is not in the vocabulary of {self.num_tokens} tokens')
    if token in self._parts.specials and not skip_special:
      return self._parts.names[token].encode()
    return self._parts.pieces[token]

  def token_bytes(self) -> list[bytes]:
    """What each id adds in the middle of a text; b'' for control tokens."""
    return list(self._parts.pieces)

  @property
  def space_prefix(self) -> bool:
    """Whether encoding puts a space before a text, which decoding takes away again."""
    return self._parts.space_prefix

  def apply_chat(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """The text of a conversation, to be encoded with `parse_special=True` and without `add_special`.

    Raises:
      InputError: if the model has no chat template, or its template refuses the messages.
    """
    if self.chat_template is None:
      raise InputError('this model has no chat template: give it the prompt as plain text')
    names = {key: '' if token is None else self.vocab[token]
             for key, token in (('bos_token', self.bos_id), ('eos_token', self.eos_id), ('pad_token', self.pad_id))}
    return chat.render(self.chat_template, messages, add_generation_prompt=add_generation_prompt, **names)


class StreamDecoder:
  """Decodes ids as they come. Half a UTF-8 character is held back until its other half arrives."""

  def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, continues: bool = False):
    """With `continues` the ids go on with a text begun before, so that a leading space is kept."""
    self._tokenizer, self._skip_special = tokenizer, skip_special
    self._utf8 = codecs.getincrementaldecoder('utf-8')('replace')
    self._at_start = tokenizer.space_prefix and not continues

  def feed(self, ids: Iterable[int]) -> str:
    """The text that is certain after these ids; the texts of all calls join up to `decode` of all ids."""
    data = b''.join(self._tokenizer.piece(token, self._skip_special) for token in ids)
    if self._at_start and data:
      data, self._at_start = data.removeprefix(b' '), False
    return self._utf8.decode(data)

  def finish(self) -> str:
    """What was held back: U+FFFD for a character that never became whole."""
    return self._utf8.decode(b'', final=True)


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer):
  """Checks that an id means the same to both models; how far their logits are padded does not matter.

  The draft must know every id of the target; what it knows beyond them can never be emitted.

  Raises:
    InputError: naming the first id that differs and both strings.
  """
  for token in range(target.num_tokens):
    ours, theirs = target.vocab.get(token), draft.vocab.get(token)
    if ours != theirs:
      raise InputError(f'the draft has another vocabulary: id {token} is {ours!r} to the target and {theirs!r} to the '
                       'draft; use a draft with the tokenizer of the target')
  for which in ('bos', 'eos', 'pad'):
    ours, theirs = getattr(target, f'{which}_id'), getattr(draft, f'{which}_id')
    if ours != theirs and (which != 'pad' or None not in (ours, theirs)):
      raise InputError(f'the draft has another {which} token: {_named(target, ours)} to the target, '
                       f'{_named(draft, theirs)} to the draft')


def _named(tokenizer: Tokenizer, token: int | None) -> str:
  return 'none' if token is None else f'id {token} ({tokenizer.vocab.get(token)!r})'
