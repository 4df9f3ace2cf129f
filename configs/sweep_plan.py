"""Chinchilla 70B + 4B on four slices of 16 chips, over γ: which slice, and how many drafted tokens (predictions).

    python -m experiments.plan_sweep --config=configs/sweep_plan.py --out=plan.jsonl --plot=plan.png

No TPU is needed; half an hour on two cores. Variant `v4`: that slice alone.
"""

from ml_collections import ConfigDict

TOPOLOGIES = {'all': ('v4-32', 'v5p-32', 'v5e-16', 'v6e-16'), 'v4': ('v4-32',)}


def get_config(variant: str = 'all') -> ConfigDict:
  if variant not in TOPOLOGIES:
    raise ValueError(f'variant {variant!r} of configs/sweep_plan.py does not exist: use one of {", ".join(TOPOLOGIES)}')
  config = ConfigDict({
      'base': 'configs/chinchilla.py:model',
      'topologies': TOPOLOGIES[variant],
      'gammas': (1, 2, 3, 4, 5, 6, 7, 8),
      'assume': (),  # such as 'hop_us=2.7'
  })
  return config.lock()
