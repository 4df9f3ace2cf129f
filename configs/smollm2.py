"""SmolLM2-135M-Instruct, the model that installs with the project, decoding on this machine.

    python -m launch.generate --config=configs/smollm2.py:lookup --prompt="Write a haiku about the sea."
    python -m launch.bench    --config=configs/smollm2.py:lookup --config.engine.gamma=7

Variants: `none` (plain decoding), `lookup` (copy from the text so far), `self` (the model's first layers draft),
`lookup_tree` (several copies at once), and with the weights in experiments/weights `model` (a draft of two layers),
`medusa` (heads on the model's last vector), `eagle` (a head that continues its vectors) and `hybrid` (that head and a
copy, in one tree).
"""

from ml_collections import ConfigDict

LOOKUP = {'min_ngram': 1, 'max_ngram': 3, 'match': 'earliest', 'partial': True}
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1))
EAGLE = {'name': 'eagle', 'source': 'experiments/weights/eagle', 'dtype': 'float32', 'tree': TREE, 'children': 'top',
         'version': 1, 'taps': ()}
SELF = {'name': 'self', 'num_layers': 4, 'draft_vocab': ''}  # or a JSON list of the ids that the draft may say
DRAFTERS = {
    'none': {'name': 'none'},
    'lookup': LOOKUP | {'name': 'lookup'},
    'self': SELF,
    'model': {'name': 'model', 'source': 'experiments/weights/draft', 'dtype': 'float32', 'draft_vocab': ''},
    'lookup_tree': LOOKUP | {'name': 'lookup_tree', 'branches': 2},
    'hybrid': {'name': 'hybrid', 'of': EAGLE | {'tree': ((0,), (1,))}, 'lookup': LOOKUP, 'copied': 5},
    'medusa': {'name': 'medusa', 'source': 'experiments/weights/medusa', 'dtype': 'float32', 'tree': TREE,
               'num_heads': 3, 'own_head': False},
    'eagle': EAGLE,
}
CHAINS = ('none', 'lookup', 'self', 'model')
# Others 7: a pass over 8 rows suits a CPU (README, "What the numbers mean").
GAMMAS = {'none': 0, 'self': 2, 'model': 4, 'lookup_tree': 6}


def get_config(variant: str = 'lookup') -> ConfigDict:
  if variant not in DRAFTERS:
    raise ValueError(f'variant {variant!r} of configs/smollm2.py does not exist: use one of {", ".join(DRAFTERS)}')
  config = ConfigDict({
      'target': {
          'source': 'embedded',  # or a Hugging Face directory, or a .gguf file
          'dtype': 'float32',
      },
      'drafter': DRAFTERS[variant],
      'accept': {'rule': 'rejection' if variant in CHAINS else 'multiround', 'lenience': 1.0},  # below 1: lossy
      'engine': {
          'gamma': GAMMAS.get(variant, 7),
          'capacity': 1024,  # prompt and output tokens per row
          'batch': 1,
          'rows': 1,
          'widths': (1,),
          'precision': 'highest',  # of float32 products: default, high or highest; a CPU knows one only
          'attention_block': 256,  # cache slots read at a time; 0 reads all at once, which suits a TPU
          'logprobs': False,
          # costs in plain passes; without verify_cost both are measured when the model is loaded
          'adaptive': {'enabled': False, 'draft_cost': 0.0, 'verify_cost': (), 'prior': 0.7},
      },
      'mesh': {'data': 1, 'model': 1, 'draft': 'sharded'},  # devices: rows over data, heads and hidden units over model
      'sampling': {'temperature': 0.0, 'top_k': 0, 'top_p': 1.0, 'max_new_tokens': 128, 'seed': 0, 'stop': ()},
      'data': {'kind': 'humaneval', 'form': 'chat', 'limit': 12, 'offset': 0, 'path': '', 'text': '', 'shots': 0},
  })
  return config.lock()
