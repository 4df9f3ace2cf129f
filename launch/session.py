"""A model, a drafter and an engine, ready to decode prompts: what every command runs on."""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import sys
import time

import jax
from ml_collections import ConfigDict
import numpy as np

from launch import distributed
from launch.build import (
  AnyTokenizer,
  build_engine,
  build_model,
  build_sampling,
  check_capacity,
  check_fields,
  check_source,
)
from launch.build_drafter import build_drafter
from launch.costs import measured_costs
from launch.drafter_fields import taps_of
from launch.errors import RunError
from launch.mesh import set_mesh
from launch.prompts import Prompt
from launch.up_to_stop import UpToStop
from models.abstract import AnyModel
from models.errors import InputError
from models.tokenizer import StreamDecoder
from specdec.adaptive import AdaptiveGamma
from specdec.commit import Reason
from specdec.drafters import Empty, Simulated
from specdec.engine import Engine, Params, Request, Result, bucket_for, run, source_bucket_for, to_result
from specdec.metrics import Metrics
from specdec.state import DecodeState
from specdec.stops import stop_table

COSTS_LENGTH = 256  # tokens per row at which the costs of an adaptive γ are measured, where the capacity allows


@dataclasses.dataclass(frozen=True)
class Completion:
  """What one prompt came to.

  Attributes:
    prompt_id: of the `Prompt`.
    text: cut where a stop string begins.
    token_ids: emitted, up to and including the one that ended the row.
    reason: 'eos', 'stop', 'max_tokens', 'length' or 'error'.
    metrics: of this row.
    logprobs: raw target log-probability of each token; None unless `engine.logprobs`.
  """

  prompt_id: str
  text: str
  token_ids: list[int]
  reason: str
  metrics: Metrics
  logprobs: list[float] | None


class Session:
  """Built once; `generate` may be called any number of times. Programs are compiled when first needed, untimed.

  Attributes:
    config: where it came from.
    tokenizer, engine, params: the parts.
    stops: strings that end a text.
    compile_seconds: spent on compilation so far.
  """

  def __init__(self, config: ConfigDict, tokenizer: AnyTokenizer, engine: Engine, params: Params):
    self.config, self.tokenizer, self.engine, self.params = config, tokenizer, engine, params
    self.stops = tuple(config.sampling.stop)
    self.compile_seconds = 0.0
    self._sampling = build_sampling(config)
    self._warm: set[tuple[int, ...]] = set()

  @classmethod
  def from_config(cls, config: ConfigDict, target: tuple[AnyModel, AnyTokenizer] | None = None) -> 'Session':
    """Loads and checks everything that `config` names; `target` spares loading a model that is there already.

    `engine.precision` and `mesh` become settings of the whole process: the loop, its parts timed alone and texts
    scored again must all multiply alike.

    Raises:
      InputError: whatever is wrong, in one line.
    """
    check_fields(config)
    jax.config.update('jax_default_matmul_precision', config.engine.precision)
    set_mesh(config)
    model, tokenizer = target or build_model(
        config.target, config.engine.attention_block, taps=taps_of(config.drafter))
    check_capacity(config, model.max_positions)
    check_source(config, model.has_encoder)
    drafter, draft = build_drafter(config, model, tokenizer)
    session = cls(config, tokenizer, build_engine(config, drafter, tokenizer.num_tokens), Params(model, draft))
    adaptive = config.engine.adaptive
    if adaptive.enabled and not adaptive.verify_cost:
      session.engine = dataclasses.replace(session.engine, adaptive=session._measured_adaptive())
    return session

  def _measured_adaptive(self) -> AdaptiveGamma:
    """γ by costs that are measured here, and said, so that they can be written into a config."""
    batch, length = self.config.engine.batch, min(COSTS_LENGTH, self.engine.capacity - 1)
    sources = [[0] * self.engine.source_capacity] * batch if self.params.target.has_encoder else None
    request = Request([[0] * length] * batch, range(batch), self._sampling, max_new_tokens=1, sources=sources)
    params = self.params_for(request)
    draft_cost, verify_cost = measured_costs(self.engine, params, self.engine.start(params, request))
    if distributed.speaks():
      print(f'measured: engine.adaptive.draft_cost={draft_cost} engine.adaptive.verify_cost={verify_cost}',
            file=sys.stderr, flush=True)
    return AdaptiveGamma(draft_cost, verify_cost, self.config.engine.adaptive.prior)

  def plain(self) -> 'Session':
    """The same target, rule and sampling with an empty draft: the baseline."""
    engine = dataclasses.replace(self.engine, drafter=Empty(), gamma=0, adaptive=None)
    return Session(self.config, self.tokenizer, engine, Params(self.params.target))

  @functools.cached_property
  def stop_table(self) -> np.ndarray:
    return stop_table(self.stops, self.tokenizer.token_bytes())

  def encode(self, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, chat template applied where it asks for one. An encoder reads them, if there is one.

    Raises:
      InputError: if there are none, or more than there is room for.
    """
    ids = self.token_ids(prompt)
    if not ids:
      raise InputError(f'prompt {prompt.id!r} has no tokens: give it a text')
    if self.params.target.has_encoder and len(ids) > self.engine.source_capacity:
      raise InputError(f'prompt {prompt.id!r} has {len(ids)} tokens, more than engine.source_capacity='
                       f'{self.engine.source_capacity}: raise it or shorten the prompt')
    if not self.params.target.has_encoder and len(ids) >= self.engine.capacity:
      raise InputError(f'prompt {prompt.id!r} has {len(ids)} tokens, which leaves no room in '
                       f'engine.capacity={self.engine.capacity}: raise engine.capacity or shorten the prompt')
    return ids

  def token_ids(self, prompt: Prompt) -> list[int]:
    """As `encode`, however many there are."""
    if not prompt.chat:
      return self.tokenizer.encode(prompt.text, add_special=True)
    text = self.tokenizer.apply_chat([{'role': 'user', 'content': prompt.text}])
    return self.tokenizer.encode(text, parse_special=True)

  def request(self, prompts: Sequence[Prompt], seeds: Sequence[int] | None = None) -> Request:
    """One batch; without `seeds` row i gets `sampling.seed` + i. With an encoder the prompts are what it reads."""
    sampling = self.config.sampling
    if seeds is None:
      seeds = range(sampling.seed, sampling.seed + len(prompts))
    texts, sources = [self.encode(prompt) for prompt in prompts], None
    if self.params.target.has_encoder:
      texts, sources = [[self.params.target.config.start_token]] * len(prompts), texts
    return Request(
        prompts=texts, seeds=list(seeds), sampling=self._sampling, max_new_tokens=sampling.max_new_tokens,
        eos_ids=sorted(self.tokenizer.eos_ids), stop_table=self.stop_table, sources=sources)

  def requests(self, prompts: Sequence[Prompt],
               seeds: Sequence[int] | None = None) -> list[tuple[list[Prompt], Request]]:
    """The prompts in batches of `engine.batch`, all encoded and checked before any is decoded.

    A last batch that is short is filled up with its last prompt, so that one program serves all.
    """
    size = self.config.engine.batch
    if seeds is None:
      seeds = range(self.config.sampling.seed, self.config.sampling.seed + len(prompts))
    batches = []
    for start in range(0, len(prompts), size):
      chunk, chunk_seeds = list(prompts[start:start + size]), list(seeds[start:start + size])
      missing = size - len(chunk)
      batches.append((chunk, self.request(chunk + chunk[-1:] * missing, chunk_seeds + chunk_seeds[-1:] * missing)))
    return batches

  def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int] | None = None) -> list[Completion]:
    """Decodes the prompts in batches of `engine.batch`, in order; a row's text does not depend on its batch."""
    return [completion for chunk, request in self.requests(prompts, seeds)
            for completion in self._complete(chunk, request)]

  def warm_up(self, request: Request) -> None:
    """Compiles what the request needs, by decoding one token of it."""
    key = len(request.prompts), bucket_for(self.engine, request), source_bucket_for(self.engine, request)
    if key in self._warm:
      return
    start = time.perf_counter()
    short = dataclasses.replace(request, max_new_tokens=1)
    params = self.params_for(short)
    jax.block_until_ready(run(self.engine, params, self.engine.start(params, short)))
    self.compile_seconds += time.perf_counter() - start
    self._warm.add(key)

  def stream(self, request: Request) -> Iterator[DecodeState]:
    """The state after the prompts and after each step; see `Engine.stream`."""
    return self.engine.stream(self.params_for(request), request)

  def params_for(self, request: Request) -> Params:
    """The parameters; a simulated draft first records the plain text of the same request."""
    if not isinstance(self.engine.drafter, Simulated):
      return self.params
    plain = self.plain()
    state = run(plain.engine, plain.params, plain.engine.start(plain.params, request))
    return Params(self.params.target, state.tokens_BL)

  def _complete(self, prompts: Sequence[Prompt], request: Request) -> list[Completion]:
    self.warm_up(request)
    params = self.params_for(request)
    result = to_result(run(self.engine, params, self.engine.start(params, request)))
    return [self._completion(prompt, result, row) for row, prompt in enumerate(prompts)]

  def _completion(self, prompt: Prompt, result: Result, row: int) -> Completion:
    return Completion(
        prompt_id=prompt.id, text=self.text(result.tokens[row]), token_ids=result.tokens[row],
        reason=reason_name(result.reasons[row]), metrics=result.metrics[row],
        logprobs=result.logprobs[row] if result.logprobs else None)

  def text(self, token_ids: Sequence[int]) -> str:
    """Decoded as what goes on with a prompt, and cut where the first stop string begins."""
    decoder, cut = StreamDecoder(self.tokenizer, continues=True), UpToStop(self.stops)
    return cut.feed(decoder.feed(token_ids) + decoder.finish()) + cut.finish()


def check_finite(name: str, completions: Sequence[Completion]) -> None:
  """Raises RunError where numbers broke down: what was counted of texts that are none means nothing."""
  failed = sum(completion.reason == reason_name(Reason.ERROR) for completion in completions)
  if failed:
    raise RunError(f'{failed} of {len(completions)} texts ({name}) ended in numbers that are not finite: they mean '
                   'nothing')


def reason_name(reason: Reason) -> str:
  return reason.name.lower()
