"""Trains an EAGLE head for SmolLM2-135M on its own answers.

    python -m experiments.make_corpus --out=results/corpus --chat=640 --function=768 --story=448 \\
        --source=384 --article=384
    python -m launch.train --config=configs/train_eagle.py
    python -m launch.bench --config=configs/smollm2.py:eagle --config.drafter.source=results/train_eagle/model

Variants: `unrolled` (the head reads its own guesses in the last third of training, as EAGLE-3 does), `eagle1`
(the loss of the first paper: features and .1 of the law, with noise) and `eagle3` (reads three layers and has an LM
head of its own; it decodes with --config.drafter.version=3 --config.drafter.taps="(1,14,26)"); `token` and `feature`
read only that part of a pair, to see what each is worth. Each but the first ends up in results/train_VARIANT.
"""

from ml_collections import ConfigDict

UNROLLED = {'inputs': 'both', 'steps': 3, 'token_loss': 'kl', 'labels': 'law', 'token_weight': 1.0,
            'feature_weight': 0.2, 'noise': 0.0, 'decay': 0.8, 'roots': 384, 'unroll_from': 3900}
LOSSES = {
    'unrolled': UNROLLED,
    'eagle1': UNROLLED | {'steps': 1, 'token_loss': 'cross_entropy', 'token_weight': 0.1, 'feature_weight': 1.0,
                          'noise': 0.1, 'decay': 1.0, 'roots': 0, 'unroll_from': 0},
    'eagle3': UNROLLED | {'steps': 4, 'feature_weight': 0.0},
    'token': UNROLLED | {'inputs': 'token'},
    'feature': UNROLLED | {'inputs': 'feature'},
}


def get_config(variant: str = 'unrolled') -> ConfigDict:
  if variant not in LOSSES:
    raise ValueError(f'variant {variant!r} of configs/train_eagle.py does not exist: use one of {", ".join(LOSSES)}')
  name = 'train_eagle' if variant == 'unrolled' else f'train_{variant}'
  config = ConfigDict({
      'target': {'source': 'embedded', 'dtype': 'float32'},
      'draft': {
          'version': 3 if variant == 'eagle3' else 1,
          'taps': (1, 14, 26) if variant == 'eagle3' else (),  # layers that version 3 reads: low, middle, high
          'vocab': 8192,  # most frequent tokens of the answers; 0 for all
          'levels': 4,  # of the chain that is measured on held-out texts
          'dtype': 'bfloat16',  # of the file
      },
      'loss': LOSSES[variant],
      'data': {
          'corpus': 'results/corpus', 'row_tokens': 768, 'learn': 'all',
          # compute the target's vectors once, and keep them in the corpus for all drafts; not of layers
          'keep_vectors': variant != 'eagle3',
      },
      'train': {
          'objective': 'eagle', 'directory': f'results/{name}', 'steps': 5600,
          # Of as many tokens a head learns more from one row at a time than from four.
          'batch': 1, 'accumulate': 1,
          # The projection reads 2 x 576 numbers of size 1, and no norm: at 1e-3 one step of Adam may move a feature by
          # its own size, and at 3e-3 the loss grows. 6e-4 learns no faster.
          'learning_rate': 3e-4, 'warmup_steps': 200, 'final_share': 0.1, 'beta2': 0.95, 'weight_decay': 0.0,
          'clip_norm': 0.5, 'seed': 0, 'dtype': 'float32', 'log_every': 50, 'eval_every': 1300, 'save_every': 325,
          'keep': 2},
      'mesh': {'data': 1, 'model': 1},
  })
  return config.lock()
