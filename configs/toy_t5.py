"""The toy T5 pair that `python -m experiments.t5_pair` trains, decoding: it fills in what was taken out of a text.

    python -m launch.bench    --config=configs/toy_t5.py
    python -m launch.generate --config=configs/toy_t5.py --prompt="import <extra_id_0> = os.path"

Variants: `model` (the draft), `none` (plain decoding), `lookup` (from the source too), `unigram` and `bigram` (counts
of the training texts), `lenient` (the draft under the token rule with lenience .5: lossy). Models, counts and prompts
are in results/t5_pair; the prompts are pieces of files that neither model has seen.
"""

from ml_collections import ConfigDict

COUNTS = 'results/t5_pair/counts.npy'
MODEL = {'name': 'model', 'source': 'results/t5_pair/draft/model', 'dtype': 'float32', 'draft_vocab': ''}
DRAFTERS = {
    'none': {'name': 'none'},
    'model': MODEL,
    'lookup': {'name': 'lookup', 'min_ngram': 1, 'max_ngram': 3, 'match': 'earliest', 'partial': True},
    'unigram': {'name': 'unigram', 'counts': COUNTS},
    'bigram': {'name': 'bigram', 'counts': COUNTS, 'followers': 64},
    'lenient': MODEL,
}


def get_config(variant: str = 'model') -> ConfigDict:
  if variant not in DRAFTERS:
    raise ValueError(f'variant {variant!r} of configs/toy_t5.py does not exist: use one of {", ".join(DRAFTERS)}')
  config = ConfigDict({
      'target': {'source': 'results/t5_pair/target/model', 'dtype': 'float32'},
      'drafter': DRAFTERS[variant],
      'accept': {'rule': 'rejection', 'lenience': 0.5 if variant == 'lenient' else 1.0},
      'engine': {
          'gamma': 0 if variant == 'none' else 3,
          'capacity': 64,
          'source_capacity': 96,  # the rows that both were trained on
          'batch': 1,
          'rows': 1,
          'widths': (1,),
          'precision': 'highest',
          'attention_block': 0,
          'logprobs': False,
          'adaptive': {'enabled': False, 'draft_cost': 0.0, 'verify_cost': (), 'prior': 0.7},
      },
      'mesh': {'data': 1, 'model': 1, 'draft': 'sharded'},
      'sampling': {'temperature': 0.0, 'top_k': 0, 'top_p': 1.0, 'max_new_tokens': 56, 'seed': 0, 'stop': ()},
      'data': {'kind': 'file', 'form': 'raw', 'limit': 24, 'offset': 0, 'path': 'results/t5_pair/prompts.jsonl',
               'text': '', 'shots': 0},
  })
  return config.lock()
