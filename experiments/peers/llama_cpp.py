"""llama.cpp through llama-cpp-python as a contestant: its own `generate`, plain and with its prompt lookup."""

from collections.abc import Sequence
import functools
import itertools
import os
from typing import Any

from experiments.peers.contestant import Contestant


def contestants(path: str, eos_ids: Sequence[int], settings: Sequence[dict[str, Any]], new_tokens: int,
                capacity: int) -> list[Contestant]:
  """Plain decoding, then lookup with each of `settings` (arguments of `LlamaPromptLookupDecoding`)."""
  import llama_cpp
  from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
  threads = os.cpu_count()
  load = functools.partial(llama_cpp.Llama, path, n_ctx=capacity, n_threads=threads, n_threads_batch=threads,
                           verbose=False)
  plain = load()
  # One more copy of the weights for all lookups: a draft model makes it keep the logits of every position.
  lookup = load(draft_model=LlamaPromptLookupDecoding()) if settings else None
  decode = functools.partial(_decode, eos_ids=frozenset(eos_ids), new_tokens=new_tokens)
  found = [Contestant('llama.cpp', llama_cpp.__version__, 'none', {}, functools.partial(_prepare, plain, None),
                      decode)]
  for setting in settings:
    draft = LlamaPromptLookupDecoding(**setting)
    found.append(Contestant('llama.cpp', llama_cpp.__version__, 'lookup', dict(setting),
                            functools.partial(_prepare, lookup, draft), decode))
  return found


def _prepare(model: Any, draft: Any, ids: Sequence[int]) -> tuple[Any, list[int]]:
  model.draft_model = draft
  model.reset()
  model.eval(list(ids[:-1]))
  return model, list(ids)


def _decode(prepared: tuple[Any, list[int]], eos_ids: frozenset[int], new_tokens: int) -> list[int]:
  # `generate` finds the prompt in the cache and evaluates its last id only.
  model, ids = prepared
  generated = []
  for token in itertools.islice(model.generate(ids, temp=0.0), new_tokens):
    generated.append(token)
    if token in eos_ids:
      break
  return generated
