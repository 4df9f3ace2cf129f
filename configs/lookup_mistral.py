"""Prompt lookup on Mistral 7B, with the reference rule's 3-grams and 10 tokens (Saxena, 2023).

    python -m launch.plan --config=configs/lookup_mistral.py --topology=v4-8
    python -m launch.generate --config=configs/lookup_mistral.py --config.target.source=DIRECTORY --prompt="..."

Commands that decode need `mesh.model` devices, or --config.mesh.model=N: all that there are, 1 on one.
Variants: `lookup` (the earliest match, whole continuations only), `lookup_tree` (two matches at once), `none` (plain
decoding). `random:` makes random weights of the same shapes.
"""

from ml_collections import ConfigDict

REFERENCE = {'min_ngram': 1, 'max_ngram': 3, 'match': 'earliest', 'partial': False}
DRAFTERS = {'lookup': REFERENCE | {'name': 'lookup'}, 'lookup_tree': REFERENCE | {'name': 'lookup_tree', 'branches': 2},
            'none': {'name': 'none'}}
GAMMAS = {'lookup': 10, 'lookup_tree': 20, 'none': 0}
# The reference reports a speed-up of 2.4 over summaries and answers from a context, greedy, on an A100. Copying costs
# nothing there, so that at least as many tokens were emitted per pass.
WORKLOADS = {'summaries, answers from context': {
    'tokens_per_pass': 2.4, 'published_speedup': 2.4, 'published_gamma': 10}}


def get_config(variant: str = 'lookup') -> ConfigDict:
  if variant not in DRAFTERS:
    raise ValueError(f'variant {variant!r} of configs/lookup_mistral.py does not exist: use {", ".join(DRAFTERS)}')
  config = ConfigDict({
      'target': {'source': 'random:mistral_7b', 'dtype': 'bfloat16'},
      'drafter': DRAFTERS[variant],
      'accept': {'rule': 'multiround' if variant == 'lookup_tree' else 'rejection'},
      'engine': {
          'gamma': GAMMAS[variant],
          'capacity': 3968,  # with the slack of a step 4096 slots
          'batch': 1,
          'rows': 8,  # one query row is multiplied off the matrix unit, five times slower
          'widths': (),
          'precision': 'default',
          'attention_block': 0,  # all at once: a loop over blocks would stop the prefetch of weights
          'logprobs': False,
          'adaptive': {'enabled': False, 'draft_cost': 0.0, 'verify_cost': (), 'prior': 0.7},
      },
      'mesh': {'data': 1, 'model': 4, 'draft': 'sharded'},
      'sampling': {'temperature': 0.0, 'top_k': 0, 'top_p': 1.0, 'max_new_tokens': 128, 'seed': 0, 'stop': ()},
      'data': {'kind': 'news', 'form': 'raw', 'limit': 12, 'offset': 0, 'path': '', 'text': '', 'shots': 0},
      'plan': {'published_plain_ms': None, 'workloads': WORKLOADS},  # read by launch.plan only
  })
  return config.lock()
