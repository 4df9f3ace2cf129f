"""Medusa heads on Vicuna (Cai et al., 2024): 5 heads with LM heads of their own, and the published tree of 63 nodes.

    python -m launch.plan --config=configs/medusa_vicuna.py --topology=v4-8
    python -m launch.plan --config=configs/medusa_vicuna.py:70b --topology=v4-32
    python -m launch.generate --config=configs/medusa_vicuna.py --config.target.source=DIRECTORY \\
        --config.drafter.source=DIRECTORY --noraw --prompt="..."

Commands that decode need `mesh.model` devices, or --config.mesh.model=N: all that there are, 1 on one.
Variants: `7b` (Vicuna 7B has the shapes of Llama 2 7B), `70b` (the same heads on Llama 2 70B, which nobody published).
The papers' acceptance is `--config.accept.rule=typical`, which changes the law of the text; this config keeps it.
`random:` makes random weights of the same shapes, `untrained` new heads.
"""

from ml_collections import ConfigDict

# Ranks that lead to each node; the tree that the authors grew for Medusa-2 on Vicuna 7B.
PATHS = (
    '0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 30 31 40 50 60 70 '
    '000 001 002 003 004 005 006 007 008 010 011 012 013 020 021 030 040 050 100 101 102 110 200 '
    '0000 0001 0002 0003 0010 0020 0100')
TREE = tuple(tuple(map(int, path)) for path in PATHS.split())
TARGETS = {'7b': ('random:llama2_7b', 4), '70b': ('random:llama2_70b', 16)}  # and the chips that share it
# Table 1 of the paper: MT-Bench with typical acceptance. Its GPU is not stated.
WORKLOADS = {'7b': {'mt-bench': {'tokens_per_pass': 3.47, 'published_speedup': 2.83, 'published_gamma': 63}},
             '70b': {'if as on 7b': {'tokens_per_pass': 3.47}}}


def get_config(variant: str = '7b') -> ConfigDict:
  if variant not in TARGETS:
    raise ValueError(f'variant {variant!r} of configs/medusa_vicuna.py does not exist: use one of {", ".join(TARGETS)}')
  source, chips = TARGETS[variant]
  config = ConfigDict({
      'target': {'source': source, 'dtype': 'bfloat16'},
      'drafter': {'name': 'medusa', 'source': 'untrained', 'dtype': 'bfloat16', 'tree': TREE, 'num_heads': 5,
                  'own_head': True},
      'accept': {'rule': 'multiround'},
      'engine': {
          'gamma': len(TREE),
          'capacity': 1920,  # with the slack of a step 2048 slots
          'batch': 1,
          'rows': 8,  # one query row is multiplied off the matrix unit, five times slower
          'widths': (),
          'precision': 'default',
          'attention_block': 0,  # all at once: a loop over blocks would stop the prefetch of weights
          'logprobs': False,
          'adaptive': {'enabled': False, 'draft_cost': 0.0, 'verify_cost': (), 'prior': 0.7},
      },
      'mesh': {'data': 1, 'model': chips, 'draft': 'sharded'},
      'sampling': {'temperature': 0.7, 'top_k': 0, 'top_p': 1.0, 'max_new_tokens': 128, 'seed': 0, 'stop': ()},
      'data': {'kind': 'humaneval', 'form': 'raw', 'limit': 12, 'offset': 0, 'path': '', 'text': '', 'shots': 0},
      'plan': {'published_plain_ms': None, 'workloads': WORKLOADS[variant]},  # read by launch.plan only
  })
  return config.lock()
