"""Bytes as tokens: the tokenizer of models with random weights."""

from collections.abc import Iterable, Sequence

from models.errors import InputError

NUM_BYTES = 256


class ByteTokenizer:
  """Ids 0..255 are bytes, 256 ends a text. The same interface as `models.tokenizer.Tokenizer`, without chat."""

  num_tokens = NUM_BYTES + 1
  bos_id, eos_id, pad_id = None, NUM_BYTES, None
  eos_ids = frozenset({NUM_BYTES})
  space_prefix = False

  @property
  def vocab(self) -> dict[int, str]:
    return {token: f'<0x{token:02X}>' for token in range(NUM_BYTES)} | {NUM_BYTES: '<end>'}

  def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
    try:
      return list(text.encode())
    except UnicodeEncodeError as error:
      raise InputError(f'the text cannot be encoded: half of a surrogate pair at character {error.start}') from None

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    return b''.join(self.piece(token) for token in ids).decode('utf-8', 'replace')

  def piece(self, token: int, skip_special: bool = True) -> bytes:
    return bytes([token]) if token < NUM_BYTES else b''

  def token_bytes(self) -> list[bytes]:
    return [self.piece(token) for token in range(self.num_tokens)]

  def apply_chat(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
    raise InputError('a model with random weights has no chat template: set data.form=raw')
