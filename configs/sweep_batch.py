"""Over batch sizes: where speculation stops paying on this machine.

    python -m experiments.sweep --config=configs/sweep_batch.py --out=sweep_batch.jsonl --plot=sweep_batch.png

About twenty minutes on two cores. Variants are those of configs/smollm2.py, and `tiny` (seconds); a drafter of trees
keeps the γ of its tree. Drafts of your own: --config.base="('FILE:variant',)", of all one kind.
"""

from ml_collections import ConfigDict

TREES = ('lookup_tree', 'hybrid', 'medusa', 'eagle')


def get_config(variant: str = 'lookup') -> ConfigDict:
  tiny = variant == 'tiny'
  gammas = {} if variant in TREES else {'gamma': (4,) if tiny else (3, 7)}
  config = ConfigDict({
      'base': 'configs/tiny.py:model' if tiny else f'configs/smollm2.py:{variant}',
      'grid': {
          'engine': {'batch': (1, 2) if tiny else (1, 2, 4, 8, 16), **gammas},
          'data': {'kind': ('news',), 'limit': (2 if tiny else 16,)},
          'sampling': {'max_new_tokens': (16 if tiny else 64,)},
      },
      'zip': {},
      'repeats': 1,
      'plain': False,
  })
  return config.lock()
