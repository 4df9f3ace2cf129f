"""transformers as a contestant: its own `generate`, plain and with prompt lookup.

Its prompt lookup takes a prefilled cache without complaint but then generates another text than plain decoding does
(transformers 5.24), so the prompt is part of every call here and its time is taken off afterwards.
"""

from collections.abc import Sequence
import functools
import os
from typing import Any

from experiments.peers.contestant import Contestant


def contestants(directory: str, eos_ids: Sequence[int], settings: Sequence[dict[str, Any]],
                new_tokens: int) -> list[Contestant]:
  """Plain decoding, then prompt lookup with each of `settings` (arguments of `generate`)."""
  import torch
  import transformers
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  torch.set_num_threads(os.cpu_count())
  model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
  options = dict(do_sample=False, eos_token_id=list(eos_ids), pad_token_id=eos_ids[0])
  return [
      Contestant('transformers', transformers.__version__, drafter, dict(setting), torch.tensor,
                 functools.partial(_generate, model, max_new_tokens=new_tokens, **options, **setting), _tokens,
                 functools.partial(_generate, model, max_new_tokens=1, **options, **setting))
      for drafter, setting in [('none', {}), *(('lookup', setting) for setting in settings)]]


def _generate(model: Any, prompt: Any, **options: Any) -> tuple[int, Any]:
  import torch
  prompt = prompt[None]
  with torch.inference_mode():
    return prompt.shape[1], model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def _tokens(generated: tuple[int, Any]) -> list[int]:
  prompt_length, output = generated
  return output[0, prompt_length:].tolist()
