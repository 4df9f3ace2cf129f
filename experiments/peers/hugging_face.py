"""transformers as a contestant: its own `generate`, plain, with prompt lookup, and assisted by a draft model.

Its prompt lookup takes a prefilled cache without complaint but then generates another text than plain decoding does
(transformers 5.24), so the prompt is part of every call here and its time is taken off afterwards.
"""

from collections.abc import Callable, Sequence
import functools
import os
from typing import Any

from experiments.peers.contestant import Contestant


def contestants(directory: str, eos_ids: Sequence[int], settings: Sequence[dict[str, Any]], new_tokens: int,
                draft: str = '', assisted: Sequence[dict[str, Any]] = ()) -> list[Contestant]:
  """Plain decoding, then prompt lookup with each of `settings`, then a draft model with each of `assisted`.

  Args:
    directory: of the target.
    eos_ids: that end a text.
    settings: arguments of `generate`.
    new_tokens: at most.
    draft: directory of the draft model.
    assisted: fields of the draft model's `generation_config`.
  """
  import torch
  import transformers
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  torch.set_num_threads(os.cpu_count())
  load = lambda path: transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
  model, options = load(directory), dict(do_sample=False, eos_token_id=list(eos_ids), pad_token_id=eos_ids[0])
  assistant = load(draft) if assisted else None
  make = functools.partial(Contestant, 'transformers', transformers.__version__, prepare=torch.tensor, tokens=_tokens,
                           passes=functools.partial(_count_passes, model))
  found = []
  for drafter, setting in [('none', {}), *(('lookup', setting) for setting in settings)]:
    decode = functools.partial(_generate, model, **options, **setting)
    found.append(make(drafter, dict(setting), decode=functools.partial(decode, max_new_tokens=new_tokens),
                      first=functools.partial(decode, max_new_tokens=1)))
  for setting in assisted:
    decode = functools.partial(_assisted, model, assistant, dict(setting), **options)
    found.append(make('draft', dict(setting), decode=functools.partial(decode, max_new_tokens=new_tokens),
                      first=functools.partial(_both_first, model, assistant, **options)))
  return found


def _generate(model: Any, prompt: Any, **options: Any) -> tuple[int, Any]:
  import torch
  prompt = prompt[None]
  with torch.inference_mode():
    return prompt.shape[1], model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def _assisted(model: Any, assistant: Any, setting: dict[str, Any], prompt: Any, **options: Any) -> tuple[int, Any]:
  # It reads the draft's settings off the draft model, and some schedules write them back.
  for name, value in setting.items():
    setattr(assistant.generation_config, name, value)
  return _generate(model, prompt, assistant_model=assistant, **options)


def _both_first(model: Any, assistant: Any, prompt: Any, **options: Any) -> tuple[int, Any]:
  _generate(assistant, prompt, max_new_tokens=1, **options)
  return _generate(model, prompt, max_new_tokens=1, **options)


def _count_passes(model: Any, decode: Callable[[Any], Any], prepared: Any) -> int:
  """Passes of the target in one call of `decode`, that over the prompt included."""
  passes = []
  handle = model.register_forward_pre_hook(lambda *_: passes.append(1))
  try:
    decode(prepared)
  finally:
    handle.remove()
  return len(passes)


def _tokens(generated: tuple[int, Any]) -> list[int]:
  prompt_length, output = generated
  return output[0, prompt_length:].tolist()
