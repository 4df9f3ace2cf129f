"""Trains Medusa heads for SmolLM2-135M on its own answers, the model itself frozen (Medusa-1) or trained (Medusa-2).

    python -m experiments.make_corpus --out=results/corpus --chat=640 --function=768 --story=448 \\
        --source=384 --article=384
    python -m launch.train --config=configs/train_medusa.py
    python -m launch.bench --config=configs/smollm2.py:medusa --config.drafter.source=results/train_medusa/model

    python -m launch.train --config=configs/train_medusa.py:self_distilled
    python -m launch.bench --config=configs/smollm2.py:medusa \\
        --config.target.source=results/train_self_distilled/model/target \\
        --config.drafter.source=results/train_self_distilled/model

Variants: `law` (heads learn the target's law), `text` (cross entropy of the tokens that came, as in the paper),
`medusa2` (the model learns the texts together with the heads), `self_distilled` (an adapter of the model does, and
learns to say what the model said before). The last two change the model: decode with the one that comes out. What the
heads' loss and rate are to the model's is as in the paper (Cai et al., 2024, section 2.2 and appendix B).
"""

from ml_collections import ConfigDict

JOINT = {
    'weight': 0.2,  # λ_0, of the heads' loss beside the model's own
    'ramp': False,  # whether λ_0 grows to that, as the first quarter of a sine
    'heads_rate': 4.0,  # the heads' learning rate over the model's, which is train.learning_rate
    'heads_first': 200,  # steps in which the heads alone move
    'remat': False,
    'dtype': 'float32',  # of the changed model's files
}
BACKBONES = {
    'medusa2': JOINT | {'labels': 'text'},  # 'law' keeps the model what it was
    'self_distilled': JOINT | {'labels': 'law', 'weight': 0.01, 'ramp': True, 'adapter': {'rank': 32, 'alpha': 16.0}},
}
LABELS = {'law': 'law', 'text': 'text', 'medusa2': 'text', 'self_distilled': 'law'}  # of the heads


def get_config(variant: str = 'law') -> ConfigDict:
  if variant not in LABELS:
    raise ValueError(f'variant {variant!r} of configs/train_medusa.py does not exist: use one of {", ".join(LABELS)}')
  joint = variant in BACKBONES
  name = {'law': 'train_medusa', 'text': 'train_medusa_text'}.get(variant, f'train_{variant}')
  config = ConfigDict({
      'target': {'source': 'embedded', 'dtype': 'float32'},
      'draft': {
          'num_heads': 3, 'num_layers': 3,
          'vocab': 8192,  # most frequent tokens of the answers; 0 for all
          'dtype': 'bfloat16',  # of the file
      },
      'loss': {'token_loss': 'kl', 'labels': LABELS[variant], 'decay': 0.8, 'roots': 256},
      'data': {
          'corpus': 'results/corpus', 'row_tokens': 768,
          # the target's law is worth learning anywhere; of tokens that came only those that it said
          'learn': 'all' if LABELS[variant] == 'law' else 'answers',
          # compute the target's vectors once, and keep them in the corpus for all drafts
          'keep_vectors': variant != 'medusa2',
      },
      'train': {
          'objective': 'medusa2' if joint else 'medusa',
          'directory': f'results/{name}', 'steps': 1000 if joint else 3000,
          # Of as many tokens heads alone learn more from one row at a time.
          'batch': 4 if joint else 1, 'accumulate': 2 if joint else 1,
          'learning_rate': 1e-4 if joint else 1e-3, 'warmup_steps': 100, 'final_share': 0.1,
          'beta2': 0.95, 'weight_decay': 0.0, 'clip_norm': 1.0, 'seed': 0, 'dtype': 'float32', 'log_every': 50,
          'eval_every': 1000, 'save_every': 300, 'keep': 2},
      'mesh': {'data': 1, 'model': 1},
  } | ({'backbone': BACKBONES[variant]} if joint else {}))
  return config.lock()
