"""Over cache capacities at the same live tokens: ms_per_round should not grow with what is allocated.

    python -m experiments.sweep --config=configs/sweep_capacity.py --out=sweep_capacity.jsonl

About two minutes on two cores. Variants are those of configs/smollm2.py, and `tiny` (seconds).
"""

from ml_collections import ConfigDict


def get_config(variant: str = 'lookup') -> ConfigDict:
  tiny = variant == 'tiny'
  config = ConfigDict({
      'base': 'configs/tiny.py:model' if tiny else f'configs/smollm2.py:{variant}',
      'grid': {
          'engine': {'capacity': (512, 2048) if tiny else (512, 4096), 'gamma': (4,)},
          'data': {'kind': ('humaneval',), 'limit': (1 if tiny else 3,)},
          'sampling': {'max_new_tokens': (16 if tiny else 64,)},
      },
      'zip': {},
      'repeats': 5,
      'plain': False,
  })
  return config.lock()
