"""Records what speculation did to each token of a text, for `experiments.report`.

    python -m experiments.trace --config=configs/smollm2.py:lookup --config.data.limit=2 --json_out=trace.json

Prompts are decoded one at a time, step by step, by the loop's own step; before each step its draft and the target's
scores of it are read. The file is a list with one trace for each prompt:

    id, prompt, drafter, rule, lossless, gamma, temperature, top_k, top_p, target, reason    what was decoded, and how
    passes, emitted, drafted, accepted                                       counts of the loop (specdec/metrics.py)
    steps           one for each target pass: drafted (how many tokens), tokens, refused, unused
    jax_version, backend, ...    where it ran

Of a step, `tokens` are emitted: text, origin (`Origin`), token_id. `refused` were drafted where the last of them stands
and not kept (of a tree all children there, tried or not); `unused` elsewhere: behind a refused one, or in another
branch. Each says what the target gave it where it stands: target_prob (softmax of the raw logits, before any filter)
and target_rank (1 is the likeliest); an unused token, whose text never came to be, says neither. Drafted tokens say
draft_prob and draft_rank too: in the law that they were drawn from, after all filters; a point mass has 1 and no rank.
"""

from collections.abc import Iterable, Sequence
import functools
from typing import Any

import jax
import numpy as np

from launch import cli, results
from launch.progress import track
from launch.prompts import Prompt, load_prompts
from launch.session import Session, reason_name
from models.tokenizer import StreamDecoder
from specdec.commit import Origin
from specdec.draft import AnyDraft, TreeDraft
from specdec.engine import Engine, Params, Result, context_of, to_result
from specdec.state import DecodeState
from specdec.verify import verify

Token = dict[str, Any]


@functools.partial(jax.jit, static_argnames=('engine',))
def look(engine: Engine, params: Params, state: DecodeState) -> tuple[AnyDraft, jax.Array]:
  """The draft that the next step will make of this state, and the target's [B, T, V] log-probabilities of it."""
  draft, _ = engine.drafter.propose(params.draft, state.draft_state, context_of(engine, state), engine.gamma)
  scores, _ = verify(
      params.target, state.cache, state.newest_B, draft, state.sampling, num_tokens=engine.num_tokens,
      widths=engine.verify_widths, rows=engine.rows, logprobs=True, reads=engine.drafter.reads)
  return draft, scores.logprobs_BTV


class Step:
  """One step of a single row: its draft, and what the target says of each of its places."""

  def __init__(self, draft: AnyDraft, logprobs_BTV: np.ndarray, pieces: Sequence[bytes]):
    count = int(draft.count_B[0])
    self.tokens_M = draft.tokens_BM[0][:count].tolist()
    is_tree = isinstance(draft, TreeDraft)
    self._parents_M = draft.parents_BM[0][:count].tolist() if is_tree else list(range(count))
    laws = draft.laws_BRV if is_tree else draft.probs_BMV
    drawn = draft.num_drawn if is_tree else count
    law_of = lambda node: laws[0][draft.internal.index(self._parents_M[node]) if is_tree else node]
    self._laws_M = [law_of(node) if laws is not None and node < drawn else None for node in range(count)]
    self._logprobs_TV, self._pieces = logprobs_BTV[0], pieces

  def read(self, emitted: Sequence[int], origins: Sequence[Origin], texts: Sequence[str]) -> dict[str, Any]:
    """What became of the draft; see the module."""
    row, tokens, kept = 0, [], set()
    for token, origin, text in zip(emitted, origins, texts, strict=True):
      node = self._child(row, token) if origin == Origin.ACCEPTED else None
      tokens.append({'text': text, 'origin': origin.name.lower()} | self._token(token, row, node))
      if node is None:
        break
      kept.add(node)
      last, row = row, node + 1
    else:  # the text ended at an accepted token
      row = last
    refused = [node for node, parent in enumerate(self._parents_M) if parent == row and node not in kept]
    unused = [node for node in range(len(self.tokens_M)) if node not in kept and node not in refused]
    return {'drafted': len(self.tokens_M), 'tokens': tokens,
            'refused': [self._drafted(node, row) for node in refused],
            'unused': [self._drafted(node, None) for node in unused]}

  def _child(self, row: int, token: int) -> int:
    """The first node under `row` that says `token`."""
    return next(node for node, parent in enumerate(self._parents_M)
                if parent == row and self.tokens_M[node] == token)

  def _drafted(self, node: int, row: int | None) -> Token:
    token = self.tokens_M[node]
    return {'text': self._pieces[token].decode(errors='replace')} | self._token(token, row, node)

  def _token(self, token: int, row: int | None, node: int | None) -> Token:
    """What target and draft gave a token that stands after `row`; None leaves either out."""
    facts: Token = {'token_id': token}
    if row is not None:
      logprob_V = self._logprobs_TV[row]
      facts |= {'target_prob': float(np.exp(logprob_V[token])), 'target_rank': _rank(logprob_V, token)}
    if node is not None:
      law_V = self._laws_M[node]
      facts |= {'draft_prob': 1.0 if law_V is None else float(law_V[token]),
                'draft_rank': None if law_V is None else _rank(law_V, token)}
    return facts


def _rank(scores_V: np.ndarray, token: int) -> int:
  return 1 + int((scores_V > scores_V[token]).sum())


def record(session: Session, prompt: Prompt, seed: int) -> dict[str, Any]:
  """Decodes one prompt and tells its steps; see the module."""
  request = session.request([prompt], [seed])
  params, pieces = session.params_for(request), session.tokenizer.token_bytes()
  decoder, steps, seen, step = StreamDecoder(session.tokenizer, continues=True), [], 0, None
  for state in session.engine.stream(params, request):
    result = to_result(state)
    if step is not None and len(result.tokens[0]) > seen:
      emitted = result.tokens[0][seen:]
      steps.append(step.read(emitted, result.origins[0][seen:], [decoder.feed([token]) for token in emitted]))
    seen = len(result.tokens[0])
    step = Step(*jax.device_get(look(session.engine, params, state)), pieces)
  if steps:
    steps[-1]['tokens'][-1]['text'] += decoder.finish()  # of a character that never came to its end
  return _facts(session, prompt, result) | {'steps': steps} | results.environment()


def _facts(session: Session, prompt: Prompt, result: Result) -> dict[str, Any]:
  config, metrics = session.config, result.metrics[0]
  sampling = config.sampling
  return {
      'id': prompt.id, 'prompt': prompt.text, 'drafter': config.drafter.name, 'rule': session.engine.rule.name,
      'lossless': session.engine.rule.lossless, 'gamma': session.engine.gamma, 'temperature': sampling.temperature,
      'top_k': sampling.top_k, 'top_p': sampling.top_p, 'target': config.target.source,
      'reason': reason_name(result.reasons[0]), 'passes': metrics.passes, 'emitted': metrics.emitted,
      'drafted': metrics.drafted, 'accepted': metrics.accepted}


def write_each(traces: Iterable[dict[str, Any]]) -> None:
  """All so far after each one, since a run may be ended; standard output gets them once."""
  found = []
  for trace in traces:
    found.append(trace)
    cli.say(f'{trace["id"]}: {trace["emitted"]} tokens in {trace["passes"]} passes, {trace["accepted"]} of '
            f'{trace["drafted"]} drafted kept')
    if cli.JSON_OUT.value != results.STDOUT:
      cli.write_json(found)
  if cli.JSON_OUT.value == results.STDOUT:
    cli.write_json(found)


def main() -> None:
  cli.refuse_job()
  config = cli.config_of(CONFIG)
  session, prompts = Session.from_config(config), load_prompts(config.data)
  for prompt in prompts:
    session.encode(prompt)  # what is wrong with any is said before the first is decoded
  write_each(record(session, prompt, config.sampling.seed + index)
             for index, prompt in enumerate(track(prompts, len(prompts), 'traces')))


if __name__ == '__main__':
  CONFIG = cli.define_config()
  cli.run(main)
