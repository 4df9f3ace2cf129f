"""What a tree adds to heads: a chain, the tree that configs/smollm2.py has by hand, and one that was planned.

    python -m experiments.sweep --config=configs/sweep_trees.py:eagle --out=trees.jsonl

Variants: `eagle`, `medusa`, and `hybrid`, the EAGLE head's trees with a copy beside them.
The planned trees are those of `experiments.plan_tree --most_tokens`, in experiments/weights.
"""

from ml_collections import ConfigDict

HEADS = {'eagle': 'eagle', 'medusa': 'medusa', 'hybrid': 'eagle'}
LEVELS = {'eagle': 4, 'medusa': 3}
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1))
PLANNED = 31  # nodes
COPIED = 5  # tokens of the hybrid's copy


def get_config(variant: str = 'eagle') -> ConfigDict:
  if variant not in HEADS:
    raise ValueError(f'variant {variant!r} of configs/sweep_trees.py does not exist: use one of {", ".join(HEADS)}')
  head = HEADS[variant]
  chain = tuple((0,) * depth for depth in range(1, LEVELS[head] + 1))
  trees = {'tree': (chain, TREE, (f'experiments/weights/{head}/tree.json',))}
  drafter, copied = ({'of': trees}, COPIED) if variant == 'hybrid' else (trees, 0)
  return ConfigDict({
      'base': f'configs/smollm2.py:{variant}',
      'grid': {
          'data': {'kind': ('humaneval', 'news'), 'limit': (12,)},
          'sampling': {'temperature': (0.0, 0.8), 'max_new_tokens': (48,)},
      },
      'zip': {
          'drafter': drafter,
          'engine': {'gamma': tuple(nodes + copied for nodes in (len(chain), len(TREE), PLANNED))},
      },
      'repeats': 1,
      'plain': False,
  }).lock()
