"""Prompt lookup where the answer copies from the prompt, and where it is free (Saxena, 2023; He et al., 2023, REST).

    python -m experiments.sweep --config=configs/sweep_copying.py --out=sweep_copying.jsonl --plot=sweep_copying.png

About fifteen minutes on two cores. Variants are those of configs/smollm2.py that draft chains or copies, and `tiny`
(seconds).
"""

from ml_collections import ConfigDict


def get_config(variant: str = 'lookup') -> ConfigDict:
  tiny = variant == 'tiny'
  prompts = tuple(f'experiments/prompts/{name}.txt' for name in ('copying', 'free'))
  return ConfigDict({
      'base': 'configs/tiny.py:lookup' if tiny else f'configs/smollm2.py:{variant}',
      'grid': {
          'engine': {'gamma': (4,) if tiny else (4, 7, 10)},
          'sampling': {'max_new_tokens': (8 if tiny else 96,), 'temperature': (0.0,) if tiny else (0.0, 0.8)},
      },
      'zip': {'data': {'kind': ('file',) * 2, 'path': prompts, 'limit': (1 if tiny else 6,) * 2}},
      'repeats': 1,
      'plain': False,
  }).lock()
