"""Chinchilla 70B with the 4B draft of Chen et al. (2023), on the 16 TPU v4 chips of their setup.

    python -m launch.plan --config=configs/chinchilla.py --topology=v4-32

Variants: `model` (speculative), `none` (plain decoding). The weights were never published: `random:` makes random ones
of the same shapes; with your own, put a path into `target.source` and `drafter.source`.
"""

from ml_collections import ConfigDict

DRAFTERS = {
    'none': {'name': 'none'},
    'model': {'name': 'model', 'source': 'random:chinchilla_4b', 'dtype': 'bfloat16', 'draft_vocab': ''},
}
# Table 1 of the paper, and the acceptance it implies: a step of 4 drafted tokens took 22.4 ms (Figure 1), so 22.4 / ms
# tokens were emitted per step, which is (1 - alpha^5) / (1 - alpha).
WORKLOADS = {
    'humaneval': {'alpha': 0.876, 'published_ms': 5.73, 'published_gamma': 4},
    'xsum nucleus': {'alpha': 0.737, 'published_ms': 7.52, 'published_gamma': 4},
    'xsum greedy': {'alpha': 0.774, 'published_ms': 7.00, 'published_gamma': 4},
}


def get_config(variant: str = 'model') -> ConfigDict:
  if variant not in DRAFTERS:
    raise ValueError(f'variant {variant!r} of configs/chinchilla.py does not exist: use one of {", ".join(DRAFTERS)}')
  config = ConfigDict({
      'target': {'source': 'random:chinchilla_70b', 'dtype': 'bfloat16'},
      'drafter': DRAFTERS[variant],
      'accept': {'rule': 'rejection'},
      'engine': {
          'gamma': 0 if variant == 'none' else 4,
          'capacity': 1920,  # with the slack of a step 2048 slots
          'batch': 1,
          'rows': 8,  # one query row is multiplied off the matrix unit, five times slower
          'widths': (),
          'precision': 'default',
          'attention_block': 0,  # all at once: a loop over blocks would stop the prefetch of weights
          'logprobs': False,
          'adaptive': {'enabled': False, 'draft_cost': 0.0, 'verify_cost': (), 'prior': 0.7},
      },
      'mesh': {'data': 1, 'model': 16, 'draft': 'sharded'},  # or 'replicated': each device has all of the draft
      'sampling': {'temperature': 0.8, 'top_k': 0, 'top_p': 0.95, 'max_new_tokens': 128, 'seed': 0, 'stop': ()},
      'data': {'kind': 'humaneval', 'form': 'raw', 'limit': 12, 'offset': 0, 'path': '', 'text': '', 'shots': 0},
      'plan': {'published_plain_ms': 14.1, 'workloads': WORKLOADS},  # read by launch.plan only
  })
  return config.lock()
