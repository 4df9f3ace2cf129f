"""Table 1 of Chen et al. (2023) on the model that installs with the project: score, time and speed-up of each task.

    python -m experiments.chen --config=configs/chen_table1.py --allow_code_execution --out=chen_table1.jsonl

Two to three hours on two cores with all problems and four samples of each; --config.samples=1 --config.limit=20 gives
wide intervals in about ten minutes. Drafts whose files are not there are left out. Variant `tiny`: a toy, in seconds.
"""

from ml_collections import ConfigDict

# As the paper samples; its XSum with nucleus sampling names no temperature.
TASKS = {
    'humaneval nucleus': {'kind': 'humaneval', 'temperature': 0.8, 'top_p': 0.95},
    'xsum nucleus': {'kind': 'news', 'temperature': 1.0, 'top_p': 0.8},
    'xsum greedy': {'kind': 'news', 'temperature': 0.0, 'top_p': 1.0},
}
DRAFTS = tuple(f'configs/smollm2.py:{variant}' for variant in ('lookup', 'model', 'hybrid'))


def get_config(variant: str = 'smollm2') -> ConfigDict:
  if variant not in ('smollm2', 'tiny'):
    raise ValueError(f'variant {variant!r} of configs/chen_table1.py does not exist: use smollm2 or tiny')
  tiny = variant == 'tiny'
  return ConfigDict({
      'drafts': ('configs/tiny.py:lookup',) if tiny else DRAFTS,
      'tasks': TASKS,
      'samples': 1 if tiny else 4,  # of each HumanEval problem
      'limit': 1 if tiny else 0,  # problems and stories; 0 is all of them
      'max_new_tokens': 4 if tiny else 128,
      'plan': 'experiments/results/plan_chinchilla.jsonl',  # what experiments.plan_sweep predicted
      'topology': 'v4-32',
  }).lock()
