"""Trains Medusa heads for SmolLM2-135M on its own answers, the model itself frozen (Medusa-1).

    python -m experiments.make_corpus --out=results/corpus --chat=2048 --function=2048 --story=1024
    python -m launch.train --config=configs/train_medusa.py
    python -m launch.bench --config=configs/smollm2.py:medusa --config.drafter.source=results/train_medusa/model

Variants: `law` (heads learn the target's law) and `text` (cross entropy of the tokens that came, as in the paper).
"""

from ml_collections import ConfigDict

VARIANTS = ('law', 'text')


def get_config(variant: str = 'law') -> ConfigDict:
  if variant not in VARIANTS:
    raise ValueError(f'variant {variant!r} of configs/train_medusa.py does not exist: use one of {", ".join(VARIANTS)}')
  config = ConfigDict({
      'target': {'source': 'embedded', 'dtype': 'float32'},
      'draft': {
          'num_heads': 3, 'num_layers': 1,
          'vocab': 8192,  # most frequent tokens of the answers; 0 for all
          'dtype': 'bfloat16',  # of the file
      },
      'loss': {'token_loss': 'kl', 'labels': variant, 'decay': 0.8, 'roots': 192},
      'data': {
          'corpus': 'results/corpus', 'row_tokens': 320,
          'keep_vectors': True,  # compute the target's vectors once, and keep them in the corpus for all drafts
      },
      'train': {
          'objective': 'medusa', 'directory': 'results/train_medusa', 'steps': 2000, 'batch': 16, 'accumulate': 4,
          'learning_rate': 1e-3, 'warmup_steps': 40, 'final_share': 0.1, 'beta2': 0.95, 'weight_decay': 0.0,
          'clip_norm': 1.0, 'seed': 0, 'dtype': 'float32', 'log_every': 10, 'eval_every': 200, 'save_every': 100,
          'keep': 2},
      'mesh': {'data': 1, 'model': 1},
  })
  return config.lock()
