"""EAGLE heads on Llama 2 Chat (Li et al., 2024): one decoder layer that continues the target's features.

    python -m launch.plan --config=configs/eagle_llama2.py --topology=v4-32
    python -m launch.plan --config=configs/eagle_llama2.py:7b --topology=v4-8
    python -m launch.generate --config=configs/eagle_llama2.py --config.target.source=DIRECTORY \\
        --config.drafter.source=DIRECTORY --noraw --prompt="..."

Commands that decode need `mesh.model` devices, or --config.mesh.model=N: all that there are, 1 on one.
Variants: `70b` and `7b` with the published tree of 25 nodes in 5 levels, its children drawn without replacement;
`70b_eagle2` and `7b_eagle2` with the dynamic trees of EAGLE-2, grown on the same head. `random:` makes random weights
of the same shapes, `untrained` a new head.
"""

from ml_collections import ConfigDict

PATHS = '0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001'
TREE = tuple(tuple(map(int, path)) for path in PATHS.split())
DYNAMIC = {'70b': {'levels': 6, 'top_k': 10, 'nodes': 48}, '7b': {'levels': 6, 'top_k': 10, 'nodes': 60}}
TARGETS = {'70b': ('random:llama2_70b', 16), '7b': ('random:llama2_7b', 4)}  # and the chips that share it
# MT-Bench, greedy: tables 1 and 2 of EAGLE, on A100s. EAGLE-2: means over six tasks; 70B is not in its table.
WORKLOADS = {
    '70b': {'mt-bench': {'tokens_per_pass': 3.81, 'published_speedup': 3.01, 'published_gamma': 25}},
    '7b': {'mt-bench': {'tokens_per_pass': 3.62, 'published_speedup': 2.78, 'published_gamma': 25}},
    '70b_eagle2': {'if as on 7b': {'tokens_per_pass': 4.64}},
    '7b_eagle2': {'mean of six tasks': {'tokens_per_pass': 4.64, 'published_speedup': 3.43, 'published_gamma': 60}},
}


def get_config(variant: str = '70b') -> ConfigDict:
  if variant not in WORKLOADS:
    raise ValueError(f'variant {variant!r} of configs/eagle_llama2.py does not exist: use {", ".join(WORKLOADS)}')
  size, _, grown = variant.partition('_')
  source, chips = TARGETS[size]
  config = ConfigDict({
      'target': {'source': source, 'dtype': 'bfloat16'},
      'drafter': {'name': 'eagle', 'source': 'untrained', 'dtype': 'bfloat16', 'tree': DYNAMIC[size] if grown else TREE,
                  'children': 'top' if grown else 'without', 'version': 1, 'taps': ()},
      'accept': {'rule': 'multiround'},
      'engine': {
          'gamma': DYNAMIC[size]['nodes'] if grown else len(TREE),
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
      'sampling': {'temperature': 0.0, 'top_k': 0, 'top_p': 1.0, 'max_new_tokens': 128, 'seed': 0, 'stop': ()},
      'data': {'kind': 'humaneval', 'form': 'raw', 'limit': 12, 'offset': 0, 'path': '', 'text': '', 'shots': 0},
      'plan': {'published_plain_ms': None, 'workloads': WORKLOADS[variant]},  # read by launch.plan only
  })
  return config.lock()
