"""A toy pair with random weights and a byte vocabulary: most commands run on it in seconds.

    python -m launch.generate --config=configs/tiny.py --prompt="abc"
    python -m experiments.exactness --config=configs/tiny.py --rungs=three_tokens

Variants: `model` (a one-layer draft), `none`, `lookup`, `self`, `simulated`.
"""

from ml_collections import ConfigDict

DRAFTERS = {
    'none': {'name': 'none'},
    'lookup': {'name': 'lookup', 'min_ngram': 1, 'max_ngram': 3, 'match': 'earliest', 'partial': True},
    'self': {'name': 'self', 'num_layers': 1, 'draft_vocab': ''},
    'model': {'name': 'model', 'source': 'random:tiny_draft', 'dtype': 'float32', 'draft_vocab': ''},
    'simulated': {'name': 'simulated', 'alpha': 0.8},
}


def get_config(variant: str = 'model') -> ConfigDict:
  if variant not in DRAFTERS:
    raise ValueError(f'variant {variant!r} of configs/tiny.py does not exist: use one of {", ".join(DRAFTERS)}')
  config = ConfigDict({
      'target': {'source': 'random:tiny_target', 'dtype': 'float32'},
      'drafter': DRAFTERS[variant],
      'accept': {'rule': 'rejection', 'lenience': 1.0},  # below 1: lossy
      'engine': {
          'gamma': 0 if variant == 'none' else 4,
          'capacity': 2048,  # holds every problem of HumanEval, byte by byte
          'batch': 1,
          'rows': 1,
          'widths': (1,),
          'precision': 'highest',
          'attention_block': 256,
          'logprobs': True,
          'adaptive': {'enabled': False, 'draft_cost': 0.0, 'verify_cost': (), 'prior': 0.7},
      },
      'mesh': {'data': 1, 'model': 1, 'draft': 'sharded'},  # devices: rows over data, heads and hidden units over model
      'sampling': {'temperature': 0.0, 'top_k': 0, 'top_p': 1.0, 'max_new_tokens': 32, 'seed': 0, 'stop': ()},
      'data': {'kind': 'text', 'form': 'raw', 'limit': 2, 'offset': 0, 'path': '', 'text': 'a b a b a', 'shots': 0},
  })
  return config.lock()
