"""The vocabulary of a tokenizer and the machine that splits text.

Two kinds of machine: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM), where every character of a token stands for a
byte, and sentencepiece BPE (Llama 2, Mistral), where `▁` stands for a space and unknown characters fall to bytes.
"""

import dataclasses
import functools
import re
from typing import Protocol

import sentencepiece
import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types, in GGUF and sentencepiece alike
CHAT_ENDS = ('<|im_end|>', '<|eot_id|>', '<|eom_id|>', '<|end|>', '<end_of_turn>', '<|endoftext|>', '<|end_of_text|>')


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


def first_line(error: Exception) -> str:
  """Of the message of another library."""
  return str(error).partition('\n')[0]


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


class TokenizersSplitter:
  """`tokenizers` does the work; control tokens are looked for only with `parse_special`."""

  def __init__(self, tokenizer: tokenizers.Tokenizer):
    self._tokenizer = tokenizer

  def encode(self, text: str, parse_special: bool) -> list[int]:
    self._tokenizer.encode_special_tokens = not parse_special
    return self._tokenizer.encode(text, add_special_tokens=False).ids


class SentencePieceSplitter:
  """`sentencepiece` does the work, between special tokens, which are looked for first.

  With `space_prefix` the text between two special tokens begins with a space, as Llama 2 was trained.
  """

  def __init__(self, processor: sentencepiece.SentencePieceProcessor, specials: dict[str, int],
               user_defined: dict[str, int], space_prefix: bool):
    self._processor, self._space_prefix = processor, space_prefix
    self._ids = user_defined | specials
    self._always, self._all = _any_of(user_defined), _any_of(self._ids)

  def encode(self, text: str, parse_special: bool) -> list[int]:
    ids = []
    for index, part in enumerate((self._all if parse_special else self._always).split(text)):
      if index % 2:  # splitting by a group puts what matched between what did not
        ids.append(self._ids[part])
      elif part:
        ids += self._processor.encode(' ' + part if self._space_prefix else part)
    return ids


def _any_of(strings) -> re.Pattern:
  longest_first = sorted(strings, key=len, reverse=True)
  return re.compile('(' + '|'.join(map(re.escape, longest_first)) + ')' if longest_first else '((?!))')
