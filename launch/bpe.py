"""A byte-level BPE vocabulary of its own for a model that is trained from scratch (Sennrich et al., 2016)."""

from collections.abc import Iterable, Sequence
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from models.errors import InputError

END = '<|endoftext|>'  # between documents: it begins each, and ends it
SMALLEST = 257  # all bytes, and the end


def train_tokenizer(texts: Iterable[str], vocab_size: int, directory: Path, markers: Sequence[str] = ()) -> None:
  """Writes tokenizer.json and tokenizer_config.json, as every model directory has them.

  Args:
    texts: to learn from.
    vocab_size: ids, markers included.
    directory: made if need be.
    markers: texts that are one token each wherever they stand, the last ids.

  Raises:
    InputError: if the vocabulary is too small for all bytes.
  """
  least = SMALLEST + len(markers)
  if vocab_size < least:
    raise InputError(f'tokenizer.vocab_size={vocab_size} is too small: all bytes and the end of a text are {SMALLEST}'
                     + (f', with {len(markers)} markers {least}' if markers else ''))
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(markers), special_tokens=[END], show_progress=False,
                                initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
  tokenizer.train_from_iterator(texts, trainer)
  tokenizer.add_tokens([tokenizers.AddedToken(marker, normalized=False) for marker in markers])
  tokenizer.post_processor = processors.TemplateProcessing(
      single=f'{END} $A', special_tokens=[(END, tokenizer.token_to_id(END))])
  directory.mkdir(parents=True, exist_ok=True)
  settings = {'bos_token': END, 'eos_token': END, 'tokenizer_class': 'PreTrainedTokenizerFast'}
  (directory / 'tokenizer_config.json').write_text(json.dumps(settings, indent=2) + '\n')
  partial = directory / 'tokenizer.json.part'
  tokenizer.save(str(partial))
  partial.rename(directory / 'tokenizer.json')  # last, and whole: what is there is finished
