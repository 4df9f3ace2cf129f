"""The toy Chinchilla pair that `make pretrain` trains, decoding.

    python -m launch.generate --config=configs/toy_pair.py --prompt="import os"
    python -m launch.bench    --config=configs/toy_pair.py

Variants: `model` (the draft), `none` (plain decoding), `lookup`. Both models are in results/pretrain, where
`python -m experiments.pretrain` puts them, with the prompts: how files of the standard library begin that neither has
seen.
"""

from ml_collections import ConfigDict

DRAFTERS = {
    'none': {'name': 'none'},
    'model': {'name': 'model', 'source': 'results/pretrain/draft/model', 'dtype': 'float32', 'draft_vocab': ''},
    'lookup': {'name': 'lookup', 'min_ngram': 1, 'max_ngram': 3, 'match': 'earliest', 'partial': True},
}


def get_config(variant: str = 'model') -> ConfigDict:
  if variant not in DRAFTERS:
    raise ValueError(f'variant {variant!r} of configs/toy_pair.py does not exist: use one of {", ".join(DRAFTERS)}')
  config = ConfigDict({
      'target': {'source': 'results/pretrain/target/model', 'dtype': 'float32'},
      'drafter': DRAFTERS[variant],
      'accept': {'rule': 'rejection'},
      'engine': {
          'gamma': 0 if variant == 'none' else 4,
          'capacity': 128,  # the rows that both were trained on
          'batch': 1,
          'rows': 1,
          'widths': (1,),
          'precision': 'highest',
          'attention_block': 0,
          'logprobs': False,
          'adaptive': {'enabled': False, 'draft_cost': 0.0, 'verify_cost': (), 'prior': 0.7},
      },
      'mesh': {'data': 1, 'model': 1, 'draft': 'sharded'},
      'sampling': {'temperature': 0.0, 'top_k': 0, 'top_p': 1.0, 'max_new_tokens': 64, 'seed': 0, 'stop': ()},
      'data': {'kind': 'file', 'form': 'raw', 'limit': 24, 'offset': 0, 'path': 'results/pretrain/prompts.jsonl',
               'text': '', 'shots': 0},
  })
  return config.lock()
