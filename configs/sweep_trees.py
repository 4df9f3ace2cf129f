"""What a tree adds to heads: a chain, the tree that configs/smollm2.py has by hand, and one that was planned.

    python -m experiments.sweep --config=configs/sweep_trees.py:eagle --out=trees.jsonl

About fifteen minutes on two cores. Variants: `eagle` and `medusa`. The planned trees are those of
`experiments.plan_tree --most_tokens`, in experiments/weights.
"""

from ml_collections import ConfigDict

from configs import smollm2

LEVELS = {'eagle': 4, 'medusa': 3}
PLANNED = 31  # nodes


def get_config(variant: str = 'eagle') -> ConfigDict:
  chain = tuple((0,) * depth for depth in range(1, LEVELS[variant] + 1))
  trees = chain, smollm2.TREE, (f'experiments/weights/{variant}/tree.json',)
  return ConfigDict({
      'base': f'configs/smollm2.py:{variant}',
      'grid': {
          'data': {'kind': ('humaneval', 'news'), 'limit': (12,)},
          'sampling': {'temperature': (0.0, 0.8), 'max_new_tokens': (48,)},
      },
      'zip': {'drafter': {'tree': trees}, 'engine': {'gamma': (len(chain), len(smollm2.TREE), PLANNED)}},
      'repeats': 1,
      'plain': False,
  }).lock()
