"""Llama 2 70B with the 7B model of the same family as its draft, on 16 chips.

    python -m launch.plan --config=configs/llama2_70b.py --topology=v4-32
    python -m launch.generate --config=configs/llama2_70b.py --config.target.source=DIRECTORY \\
        --config.drafter.source=DIRECTORY --prompt="..."

Commands that decode need `mesh.model` devices, or --config.mesh.model=N: all that there are, 1 on one.
Variants: `model` (speculative), `none` (plain decoding), `lookup` (copies what followed the same n-gram earlier). With
`random:` the weights are random ones of the same shapes. The mesh repeats each of the 8 kv heads.
"""

from ml_collections import ConfigDict

DRAFTERS = {
    'none': {'name': 'none'},
    'lookup': {'name': 'lookup', 'min_ngram': 1, 'max_ngram': 3, 'match': 'earliest', 'partial': True},
    'model': {'name': 'model', 'source': 'random:llama2_7b', 'dtype': 'bfloat16', 'draft_vocab': ''},
}

def get_config(variant: str = 'model') -> ConfigDict:
  if variant not in DRAFTERS:
    raise ValueError(f'variant {variant!r} of configs/llama2_70b.py does not exist: use one of {", ".join(DRAFTERS)}')
  config = ConfigDict({
      'target': {'source': 'random:llama2_70b', 'dtype': 'bfloat16'},
      'drafter': DRAFTERS[variant],
      'accept': {'rule': 'rejection'},
      'engine': {
          'gamma': 0 if variant == 'none' else 4,
          'capacity': 3968,  # with the slack of a step 4096 slots
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
  })
  return config.lock()
