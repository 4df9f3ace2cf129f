"""A byte-level BPE vocabulary of its own for a model that is trained from scratch (Sennrich et al., 2016)."""

from collections.abc import Iterable
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from models.errors import InputError

END = '<|endoftext|>'  # between documents: it begins each, and ends it
SMALLEST = 257  # all bytes, and the end


def train_tokenizer(texts: Iterable[str], vocab_size: int, directory: Path) -> None:
  """Writes tokenizer.json and tokenizer_config.json, as every model directory has them.

  Raises:
    InputError: if the vocabulary is too small for all bytes.
  """
  if vocab_size < SMALLEST:
    raise InputError(f'tokenizer.vocab_size={vocab_size} is too small: all bytes and the end of a text are {SMALLEST}')
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], show_progress=False,
                                initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
  tokenizer.train_from_iterator(texts, trainer)
  tokenizer.post_processor = processors.TemplateProcessing(
      single=f'{END} $A', special_tokens=[(END, tokenizer.token_to_id(END))])
  directory.mkdir(parents=True, exist_ok=True)
  settings = {'bos_token': END, 'eos_token': END, 'tokenizer_class': 'PreTrainedTokenizerFast'}
  (directory / 'tokenizer_config.json').write_text(json.dumps(settings, indent=2) + '\n')
  partial = directory / 'tokenizer.json.part'
  tokenizer.save(str(partial))
  partial.rename(directory / 'tokenizer.json')  # last, and whole: what is there is finished
