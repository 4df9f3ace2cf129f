"""Records what transformers computes of encoder-decoders: `python -m experiments.peers.record_t5`.

Small random models of T5 v1.0, v1.1 and Flan kind, for tests/fixtures. Needs the `peers` extra and nothing of this
project, so that what is recorded is independent of it.
"""

import argparse
import json
from pathlib import Path
import shutil

import numpy as np
import sentencepiece
import torch
import transformers
from transformers.models.t5.modeling_t5 import T5Attention

VOCAB, SOURCES, TARGET = 64, (7, 150, 1), 140
COMMON = dict(vocab_size=VOCAB, d_model=32, num_layers=2, num_heads=3, decoder_start_token_id=0)
KINDS = {
    'v1_0': dict(d_kv=16, d_ff=48, feed_forward_proj='relu'),
    'v1_1': dict(d_kv=8, d_ff=40, feed_forward_proj='gated-gelu', tie_word_embeddings=False, num_decoder_layers=3),
    'flan': dict(d_kv=12, d_ff=44, feed_forward_proj='gated-gelu', tie_word_embeddings=False,
                 relative_attention_num_buckets=16, relative_attention_max_distance=40, layer_norm_epsilon=1e-4),
}
SHARDED = 'flan'


def randomize(model: torch.nn.Module, seed: int):
  """Weights that make attention sharp, positions count and norms uneven."""
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      if 'norm' in name:
        parameter.copy_(1 + 0.3 * noise)
      elif 'relative_attention_bias' in name or 'shared' in name:
        parameter.copy_(noise)
      else:
        gain = 0.5 if name.endswith('.q.weight') else 1.0
        parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)


def record(kind: str, directory: Path):
  """The encoder's vectors and the logits, of sources of different lengths in one batch."""
  config = transformers.T5Config(**COMMON | KINDS[kind])
  config._attn_implementation = 'eager'
  model = transformers.T5ForConditionalGeneration(config).eval()
  if 'tie_word_embeddings' in KINDS[kind]:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
  randomize(model, seed=len(kind) + config.d_ff)
  shutil.rmtree(directory, ignore_errors=True)
  save(model, kind, directory)
  rng = np.random.default_rng(0)
  source, target = rng.integers(1, VOCAB, (len(SOURCES), max(SOURCES))), rng.integers(1, VOCAB, (len(SOURCES), TARGET))
  target[:, 0] = 0
  mask = np.arange(max(SOURCES)) < np.array(SOURCES)[:, None]
  with torch.no_grad():
    output = model(input_ids=torch.tensor(source), attention_mask=torch.tensor(mask, dtype=torch.long),
                   decoder_input_ids=torch.tensor(target))
  np.savez_compressed(
      directory / 'recorded.npz', source=source, lengths=np.array(SOURCES), target=target,
      encoded=output.encoder_last_hidden_state.numpy(), logits=output.logits.numpy())


def save(model: transformers.T5ForConditionalGeneration, kind: str, directory: Path):
  """As transformers writes it now, but for the config of v1.1, which is as published: not tied."""
  model.save_pretrained(directory, max_shard_size='60KB' if kind == SHARDED else '1GB')
  (directory / 'generation_config.json').unlink(missing_ok=True)
  if kind == 'v1_1':
    path = directory / 'config.json'
    fields = json.loads(path.read_text()) | {'tie_word_embeddings': False}
    fields.pop('scale_decoder_outputs', None)
    path.write_text(json.dumps(fields, indent=2) + '\n')


def record_buckets(path: Path):
  """The bucket of every distance, query minus key, from -300 to 300."""
  relative = torch.arange(300, -301, -1)  # the library's own sign: key minus query
  buckets = {f'{side}_{count}_{most}': T5Attention._relative_position_bucket(
      relative, side == 'both', count, most).numpy() for side in ('both', 'past') for count, most in (
          (32, 128), (16, 40), (8, 20), (64, 250))}
  np.savez_compressed(path, **buckets)


def record_tokenizer(directory: Path):
  """A small unigram model as spiece.model with T5's special tokens, the same as tokenizer.json, and ids of texts."""
  shutil.rmtree(directory, ignore_errors=True)
  directory.mkdir(parents=True)
  library = Path(json.__file__).parents[1]
  lines = [line for name in ('argparse.py', 'textwrap.py', 'heapq.py')
           for line in (library / name).read_text().splitlines() if line.strip()]
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(lines), model_prefix=str(directory / 'spiece'), vocab_size=300, model_type='unigram',
      pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2)
  (directory / 'spiece.vocab').unlink()
  tokenizer = transformers.T5Tokenizer.from_pretrained(directory, extra_ids=100)
  tokenizer.save_pretrained(directory)
  texts = ['translate English to German: That is good.', 'for x in range(10):', '<extra_id_0> of <extra_id_99>', 'a',
           '  two  spaces ', 'naïve café', 'return None']
  record = {'texts': texts, 'ids': [tokenizer(text).input_ids for text in texts]}
  (directory / 'recorded.json').write_text(json.dumps(record, ensure_ascii=False, indent=1) + '\n')


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--target', type=Path, default=Path('tests/fixtures'))
  target = parser.parse_args().target
  for kind in KINDS:
    record(kind, target / 't5' / kind)
  record_buckets(target / 't5' / 'buckets.npz')
  record_tokenizer(target / 't5' / 'tokenizer')


if __name__ == '__main__':
  main()
