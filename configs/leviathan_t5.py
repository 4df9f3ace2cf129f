"""T5-XXL with the drafts of Leviathan et al. (2023), v1.1 sizes, on the one TPU v4 chip of their setup.

    python -m launch.plan --config=configs/leviathan_t5.py:xxl_small --topology=v4-2
    python -m launch.generate --config=configs/leviathan_t5.py:tiny --prompt="abc"

Variants: `xxl_small`, `xxl_base`, `xxl_large`, at the gamma of greedy translation in Table 2 (7 for all three; others
by --config.engine.gamma), `xxl_none`; `tiny`, `tiny_lookup` and `tiny_none`, with random weights and a byte vocabulary,
run in seconds. The weights of the paper, fine-tuned for each task, were never published: `random:` makes random ones of
the same shapes; with a directory of your own in `target.source` and `drafter.source` the rest stays as it is.
"""

from ml_collections import ConfigDict

LOOKUP = {'name': 'lookup', 'min_ngram': 1, 'max_ngram': 3, 'match': 'earliest', 'partial': True}
DRAFTS = ('small', 'base', 'large')
VARIANTS = (*(f'xxl_{draft}' for draft in (*DRAFTS, 'none')), 'tiny', 'tiny_lookup', 'tiny_none')
TASKS = ('en-de greedy', 'en-de sampled', 'cnn/dm greedy', 'cnn/dm sampled')
# Table 2 of the paper: gamma, alpha, measured speed-up, for each of the tasks.
TABLE_2 = {
    'small': ((7, 0.75, 3.4), (7, 0.62, 2.6), (5, 0.65, 3.1), (5, 0.53, 2.3)),
    'base': ((7, 0.80, 2.8), (5, 0.68, 2.4), (5, 0.73, 3.0), (3, 0.55, 2.2)),
    'large': ((7, 0.82, 1.7), (3, 0.71, 1.4), (3, 0.74, 2.2), (3, 0.56, 1.7)),
}


def _model(source: str, dtype: str) -> dict:
  return {'name': 'model', 'source': f'random:{source}', 'dtype': dtype, 'draft_vocab': ''}


def _drafter(kind: str, dtype: str) -> dict:
  return {'none': {'name': 'none'}, 'lookup': LOOKUP}.get(kind) or _model(
      f't5_{kind}' if kind in DRAFTS else 'tiny_encdec_draft', dtype)


def _workloads(draft: str) -> dict:
  return {task: {'alpha': alpha, 'published_speedup': speedup, 'published_gamma': gamma}
          for task, (gamma, alpha, speedup) in zip(TASKS, TABLE_2[draft], strict=True)}


def get_config(variant: str = 'xxl_small') -> ConfigDict:
  if variant not in VARIANTS:
    raise ValueError(f'variant {variant!r} of configs/leviathan_t5.py does not exist: use one of {", ".join(VARIANTS)}')
  size, _, kind = variant.partition('_')
  large = size == 'xxl'
  dtype = 'bfloat16' if large else 'float32'
  config = ConfigDict({
      'target': {'source': 'random:t5_xxl' if large else 'random:tiny_encdec_target', 'dtype': dtype},
      'drafter': _drafter(kind, dtype),
      'accept': {'rule': 'rejection', 'lenience': 1.0},
      'engine': {
          'gamma': 0 if kind == 'none' else 7 if large else 4,
          'capacity': 368 if large else 200,
          'source_capacity': 512,
          'batch': 1,
          'rows': 8 if large else 1,  # one query row is multiplied off the matrix unit, five times slower
          'widths': () if large else (1,),
          'precision': 'default' if large else 'highest',
          'attention_block': 0,
          'logprobs': False,
          'adaptive': {'enabled': False, 'draft_cost': 0.0, 'verify_cost': (), 'prior': 0.7},
      },
      'mesh': {'data': 1, 'model': 1, 'draft': 'sharded'},
      'sampling': {'temperature': 0.0, 'top_k': 0, 'top_p': 1.0, 'max_new_tokens': 128 if large else 32, 'seed': 0,
                   'stop': ()},
      'data': {'kind': 'text', 'form': 'raw', 'limit': 2, 'offset': 0, 'path': '', 'text': 'a b a b a', 'shots': 0},
  })
  if kind in DRAFTS:
    config.plan = {'published_plain_ms': None, 'workloads': _workloads(kind)}  # read by launch.plan only
  return config.lock()
