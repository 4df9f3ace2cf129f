"""Figure 1 of Chen et al. (2023) over γ = 0..7 on the model that installs with the project: its three panels.

    python -m experiments.chen --config=configs/chen_figure1.py --out=chen_figure1.jsonl --plot=chen_figure1.png

About forty minutes on two cores. Variants: `smollm2`, and `tiny` (a toy, in seconds).
"""

from ml_collections import ConfigDict


def get_config(variant: str = 'smollm2') -> ConfigDict:
  if variant not in ('smollm2', 'tiny'):
    raise ValueError(f'variant {variant!r} of configs/chen_figure1.py does not exist: use smollm2 or tiny')
  tiny = variant == 'tiny'
  return ConfigDict({
      'base': 'configs/tiny.py:lookup' if tiny else ('configs/smollm2.py:lookup', 'configs/smollm2.py:model'),
      'grid': {
          'engine': {'gamma': (0, 7) if tiny else tuple(range(8))},
          'data': {'limit': (1 if tiny else 12,)},
          'sampling': {'max_new_tokens': (4 if tiny else 128,)},
      },
      # HumanEval at temperature 0.8 with top-p 0.95, summaries with top-p 0.8.
      'zip': {'data': {'kind': ('humaneval', 'news')}, 'sampling': {'temperature': (0.8, 1.0), 'top_p': (0.95, 0.8)}},
      'repeats': 1,
      'plain': True,
      'plan': 'experiments/results/plan_chinchilla.jsonl',  # what experiments.plan_sweep predicted
      'topology': 'v4-32',
  }).lock()
