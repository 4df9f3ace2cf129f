"""Distils a draft model for SmolLM2-135M from its own answers: two of its layers, and a quarter of its vocabulary.

    python -m experiments.make_corpus --out=results/corpus --chat=640 --function=768 --story=448 \\
        --source=384 --article=384
    python -m launch.train --config=configs/train_draft.py
    python -m launch.bench --config=configs/smollm2.py:model --config.drafter.source=results/train_draft/model

Variants are losses: `kl`, `cross_entropy`, `total_variation`, `minus_log_alpha`. The last two are α itself: begin them
with --config.draft.start=results/train_draft/model, which `kl` trained. They end up in results/train_draft_VARIANT.
"""

from ml_collections import ConfigDict

LOSSES = ('kl', 'total_variation', 'minus_log_alpha', 'cross_entropy')


def get_config(variant: str = 'kl') -> ConfigDict:
  if variant not in LOSSES:
    raise ValueError(f'variant {variant!r} of configs/train_draft.py does not exist: use one of {", ".join(LOSSES)}')
  name = 'train_draft' if variant == 'kl' else f'train_draft_{variant}'
  config = ConfigDict({
      'target': {'source': 'embedded', 'dtype': 'float32'},
      'draft': {
          'num_layers': 2,  # the target's first ones, to begin with
          'start': '',  # or the directory of a trained draft, to begin with its layers
          'vocab': 8192,  # most frequent tokens of the answers; 0 for all
          'borrows_head': True,  # the LM head is the target's, and not trained
          'levels': 4,  # of the chain that is measured on held-out texts
          'dtype': 'bfloat16',  # of the file
      },
      'loss': {'token_loss': variant, 'labels': 'law'},
      'data': {
          'corpus': 'results/corpus', 'row_tokens': 768, 'learn': 'all',
          'keep_vectors': True,  # compute the target's vectors once, and keep them in the corpus for all drafts
      },
      'train': {
          'objective': 'distill', 'directory': f'results/{name}', 'steps': 1800,
          # Of as many tokens a draft learns more from one row at a time than from four.
          'batch': 1, 'accumulate': 1, 'learning_rate': 5e-4, 'warmup_steps': 100, 'final_share': 0.1, 'beta2': 0.95,
          'weight_decay': 0.0, 'clip_norm': 1.0, 'seed': 0, 'dtype': 'float32', 'log_every': 50, 'eval_every': 1000,
          'save_every': 300, 'keep': 2},
      'mesh': {'data': 1, 'model': 1},
  })
  return config.lock()
