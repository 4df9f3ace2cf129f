"""Side by side with transformers and llama.cpp: same float32 weights, prompts, machine and process; greedy, batch 1.

    python -m experiments.peers.timing --config=configs/peers.py
    python -m experiments.peers.timing --config=configs/peers.py:quick

About twenty minutes on two cores; `quick` about two. Needs `pip install -e .[peers,data]`.
"""

import ml_collections

VARIANTS = ('full', 'quick')


def get_config(variant: str = 'full') -> ml_collections.ConfigDict:
  if variant not in VARIANTS:
    raise ValueError(f'variant {variant!r} of configs/peers.py does not exist: use one of {", ".join(VARIANTS)}')
  quick = variant == 'quick'
  config = ml_collections.ConfigDict()
  config.model = ''  # a GGUF file (llama.cpp takes its tokenizer from it); empty is the embedded SmolLM2-135M
  config.tasks = ('humaneval',) if quick else ('humaneval', 'news')
  config.form = 'chat'
  config.prompts = 1 if quick else 3  # per task
  config.new_tokens = 32 if quick else 64  # per prompt, at most
  config.capacity = 1024  # prompt and output
  config.repeats = 2
  config.software = ('specdec', 'transformers', 'llama.cpp')
  # Lookup settings of each, in its own words; the best of each on a task is compared.
  config.ours = [
      {'gamma': 4, 'partial': True},
      {'gamma': 7, 'partial': True},
      {'gamma': 10, 'partial': True},
  ][:1 if quick else None]
  config.transformers = [
      {'prompt_lookup_num_tokens': 3},
      {'prompt_lookup_num_tokens': 10},
      {'prompt_lookup_num_tokens': 10, 'max_matching_ngram_size': 3},
  ][:1 if quick else None]
  config.llama_cpp = [
      {'num_pred_tokens': 2},  # what its documentation advises for CPUs
      {'num_pred_tokens': 5},
      {'num_pred_tokens': 10},
  ][:1 if quick else None]
  # A draft model, the same for all: a directory or file of its own, or the target's first layers.
  config.draft = ''
  config.draft_layers = 4
  config.ours_draft = (2,) if quick else (1, 2, 4)  # γ
  fixed = {'num_assistant_tokens_schedule': 'constant', 'assistant_confidence_threshold': 0.0}
  config.assisted = [
      {'num_assistant_tokens': 2} | fixed,
      {'num_assistant_tokens': 4} | fixed,
      # γ that changes: by what was accepted, and by the draft's own confidence (what transformers does by itself).
      {'num_assistant_tokens': 4} | fixed | {'num_assistant_tokens_schedule': 'heuristic'},
      {'num_assistant_tokens': 20} | fixed | {'assistant_confidence_threshold': 0.4},
  ][:1 if quick else None]
  return config.lock()
