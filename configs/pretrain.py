"""Pretrains a target and a draft from scratch, the Chinchilla way, on text that every machine has.

    python -m launch.train --config=configs/pretrain.py:target
    python -m launch.train --config=configs/pretrain.py:draft
    python -m launch.plan  --config=configs/pretrain.py:1b --topology=v4-32
    make pretrain                                  both, and then what the draft is worth to the target

Variants: `target` and `draft` (a twentieth of its parameters) of a toy pair with a vocabulary of its own, minutes on
two cores; `1b`, to be planned and, with a `data` section of yours, trained on a slice.
"""

from ml_collections import ConfigDict

SHARED = {'vocab_size': 320, 'mlp': 'swiglu', 'positions': 'rope', 'tied_embedding': True}
MODELS = {
    'target': SHARED | {'width': 64, 'num_layers': 4, 'num_heads': 2, 'num_kv_heads': 2, 'head_dim': 32,
                        'ff_width': 176},
    'draft': SHARED | {'width': 20, 'num_layers': 1, 'num_heads': 1, 'num_kv_heads': 1, 'head_dim': 20, 'ff_width': 50},
    '1b': SHARED | {'vocab_size': 32_000, 'width': 2048, 'num_layers': 20, 'num_heads': 16, 'num_kv_heads': 16,
                    'head_dim': 128, 'ff_width': 5632},
}
TOY = {
    'row_tokens': 128, 'batch': 32, 'accumulate': 1, 'learning_rate': 4e-3, 'warmup_steps': 50, 'dtype': 'float32',
    'remat': False, 'log_every': 20, 'eval_every': 200, 'save_every': 200}
TRAIN = {
    'target': TOY,
    'draft': TOY | {'batch': 16, 'learning_rate': 1e-2},
    '1b': {'row_tokens': 2048, 'batch': 256, 'accumulate': 4, 'learning_rate': 2e-4, 'warmup_steps': 500,
           'dtype': 'bfloat16', 'remat': True, 'log_every': 10, 'eval_every': 1000, 'save_every': 500},
}


def get_config(variant: str = 'target') -> ConfigDict:
  if variant not in MODELS:
    raise ValueError(f'variant {variant!r} of configs/pretrain.py does not exist: use one of {", ".join(MODELS)}')
  config = ConfigDict({
      'model': MODELS[variant],
      'tokenizer': {'source': 'results/pretrain/tokenizer'},  # made of the training texts where it does not exist
      'data': {'kind': 'stdlib', 'path': '', 'name': '', 'split': 'train', 'field': 'text', 'limit': 0,
               'held_out': 0.05},
      'train': TRAIN[variant] | {
          'objective': 'next_token',
          'directory': f'results/pretrain/{variant}',  # goes on from what is there; the model ends up in model/
          # Hoffmann et al. (2022). A draft is worth more: it is trained once, and cheap in every pass after.
          'tokens_per_parameter': 200.0 if variant == 'draft' else 20.0,
          'tokens': 0,  # instead, if not 0
          'final_share': 0.1,  # of the learning rate, at the end of the cosine
          'beta2': 0.95, 'weight_decay': 0.1, 'clip_norm': 1.0, 'seed': 0,
          'held_out_rows': 128,
          'keep': 2},
      'mesh': {'data': 8, 'model': 2} if variant == '1b' else {'data': 1, 'model': 1},
  })
  return config.lock()
