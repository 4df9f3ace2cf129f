"""Over γ: where speculation pays, and how far (as Chen et al., 2023, Figure 1).

    python -m experiments.sweep --config=configs/sweep_gamma.py --out=sweep_gamma.jsonl --plot=sweep_gamma.png
    python -m experiments.sweep --config=configs/sweep_gamma.py:self --config.grid.engine.gamma="(0, 1, 2)"

About ten minutes on two cores. Variants are those of configs/smollm2.py, and `tiny` (seconds).
"""

from ml_collections import ConfigDict


def get_config(variant: str = 'lookup') -> ConfigDict:
  tiny = variant == 'tiny'
  config = ConfigDict({
      'base': 'configs/tiny.py:model' if tiny else f'configs/smollm2.py:{variant}',
      'grid': {'engine': {'gamma': (0, 1, 2, 3, 5, 7, 10)}},
      'zip': {},
      'repeats': 1,
      'plain': True,
  })
  if not tiny:
    config.grid.data = {'kind': ('humaneval', 'news'), 'limit': (6,)}
    config.grid.sampling = {'max_new_tokens': (64,)}
  return config.lock()
