"""Trains a small T5 target and a draft for it from scratch, by span corruption, on text that every machine has.

    python -m launch.train --config=configs/span_corruption.py:target
    python -m launch.train --config=configs/span_corruption.py:draft
    python -m experiments.t5_pair                  both, and then what the draft is worth to the target

Span corruption is T5's own first task (Raffel et al., 2020), needs no labels, and keeps acceptance away from both ends:
what stood in a gap is partly forced by the text around it, which any draft learns (names that recur, brackets, ends of
words), and partly open, where a small draft guesses otherwise. Longer spans than T5's 3 tokens make answers of fifty
tokens, long enough to be timed.

Variants: `target`, and `draft`, which has a tenth of its parameters, an encoder of its own, and one layer where the
target's decoder has six. Some minutes on two cores for both.
"""

from ml_collections import ConfigDict

SHARED = {'vocab_size': 384, 'mlp': 'geglu', 'num_buckets': 32, 'max_distance': 64}
MODELS = {
    'target': SHARED | {'width': 64, 'num_layers': 6, 'num_encoder_layers': 2, 'num_heads': 2, 'head_dim': 32,
                        'ff_width': 176},
    'draft': SHARED | {'width': 32, 'num_layers': 1, 'num_encoder_layers': 1, 'num_heads': 1, 'head_dim': 32,
                       'ff_width': 88},
}
TRAIN = {
    'target': {'learning_rate': 4e-3, 'tokens': 1_800_000},
    'draft': {'learning_rate': 1e-2, 'tokens': 3_600_000},
}


def get_config(variant: str = 'target') -> ConfigDict:
  if variant not in MODELS:
    raise ValueError(f'variant {variant!r} of configs/span_corruption.py does not exist: use one of '
                     f'{", ".join(MODELS)}')
  config = ConfigDict({
      'model': MODELS[variant],
      'tokenizer': {'source': 'results/t5_pair/tokenizer'},  # made of the training texts where it does not exist
      'spans': {'piece': 128, 'density': 0.35, 'mean_span': 6.0},
      'data': {'kind': 'stdlib', 'path': '', 'name': '', 'split': 'train', 'field': 'text', 'limit': 0,
               'held_out': 0.05},
      'train': TRAIN[variant] | {  # tokens: of targets, all epochs together
          'objective': 'span_corruption',
          'directory': f'results/t5_pair/{variant}',  # goes on from what is there; the model ends up in model/
          'batch': 32, 'accumulate': 1, 'warmup_steps': 50, 'final_share': 0.1, 'beta2': 0.95, 'weight_decay': 0.1,
          'clip_norm': 1.0, 'seed': 0, 'dtype': 'float32', 'log_every': 20, 'eval_every': 200, 'save_every': 200,
          'held_out_rows': 128, 'keep': 2},
      'mesh': {'data': 1, 'model': 1},
  })
  return config.lock()
