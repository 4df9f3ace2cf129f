"""What the enumeration is run on: every kind of draft and of filter, each of which must leave the law exact."""

from collections.abc import Iterator

import numpy as np

from experiments import draft_paths as drafts
from experiments.draft_paths import Law, NoisyDrafter
from experiments.enumeration import Case, table_law, warped
from specdec.adaptive import AdaptiveGamma

FILTERS = {
    'temperature .5': (0.5, 0, 1.0),
    'temperature 2': (2.0, 0, 1.0),
    'top-k 2': (1.0, 2, 1.0),
    'top-p .7': (1.0, 0, 0.7),
    'temperature .7, top-k 3, top-p .8': (0.7, 3, 0.8),
    'greedy': (0.0, 0, 1.0),
}
REPEATING = (0, 1, 2, 0, 1)  # a prompt in which copying finds something


def random_table(vocab: int, order: int, seed: int) -> np.ndarray:
  return np.random.default_rng(seed).dirichlet(np.ones(vocab), (vocab,) * order)


def pair(vocab: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
  """A target that looks two tokens back and a draft that looks one back."""
  return random_table(vocab, 2, 2 * seed), random_table(vocab, 1, 2 * seed + 1)


def without(table: np.ndarray, *tokens: int) -> np.ndarray:
  """The table with some tokens never drawn."""
  table = table.copy()
  table[..., list(tokens)] = 0
  return table / table.sum(axis=-1, keepdims=True)


def all_cases(largest: bool = False) -> list[Case]:
  """Cases of the token rule; `largest` adds one that takes seconds."""
  return [*_sizes(largest), *_point_masses(), *_counts(), *_filters(), *_vocabularies(), *_edges()]


def _sizes(largest: bool) -> Iterator[Case]:
  for vocab, gamma in [(3, 1), (3, 2), (3, 3), (3, 4), (4, 1), (4, 2), (4, 3)] + [(4, 4)] * largest:
    target, draft = map(table_law, pair(vocab, seed=gamma))
    yield Case(f'sampled draft, {vocab} tokens, gamma {gamma}', target, drafts.sampled(draft), gamma, vocab)


def _point_masses() -> Iterator[Case]:
  target, draft = map(table_law, pair(3, seed=5))
  varying = drafts.shortened(drafts.copied, drafts.by_length)
  yield Case('argmax draft', target, drafts.argmax(draft), 3, 3)
  yield Case('argmax draft that reports one-hot laws', target, drafts.argmax(draft, _one_hot_of(draft)), 3, 3)
  yield Case('copied draft', target, drafts.copied, 3, 3, prompt=REPEATING)
  yield Case('copied draft of varying length', target, varying, 3, 3, prompt=REPEATING)


def _counts() -> Iterator[Case]:
  target, draft = map(table_law, pair(3, seed=6))
  honest, likeliest = drafts.sampled(draft), drafts.argmax(draft)
  kept = {
      'drafts of 0 to gamma tokens': (honest, drafts.by_length),
      'no draft': (honest, lambda text, path: 0),
      'draft, look, keep, then stop': (honest, drafts.stop_after_unlikely(draft, 0.3)),
      'stop where the next law is flat': (honest, drafts.stop_before_flat(draft, 0.9)),
      'point mass dropped after looking': (likeliest, drafts.drop_unlikely(draft, 0.5)),
  }
  for name, (drafter, keep) in kept.items():
    yield Case(name, target, drafts.shortened(drafter, keep), 3, 3)
  adaptive = AdaptiveGamma(draft_cost=0.2, verify_cost=(1.0, 1.25, 1.3, 1.4), prior=0.6)
  yield Case('gamma by earlier outcomes', target, honest, 3, 3, adaptive=adaptive)


def _filters() -> Iterator[Case]:
  target, draft = pair(4, seed=7)
  for name, values in FILTERS.items():
    laws = table_law(warped(target, *values)), table_law(warped(draft, *values))
    yield Case(f'filtered: {name}', laws[0], drafts.sampled(laws[1]), 2, 4)
    yield Case(f'filtered: {name}, argmax draft', laws[0], drafts.argmax(laws[1]), 2, 4)
  for name, temperature in (('cooler', 0.5), ('warmer', 2.0), ('greedy', 0.0)):
    law = table_law(warped(draft, temperature))
    yield Case(f'{name} draft', table_law(target), drafts.sampled(law), 2, 4)


def _vocabularies() -> Iterator[Case]:
  padded = random_table(6, 2, 16), random_table(5, 1, 17)
  cut = [table_law(warped(table, num_tokens=4)) for table in padded]
  yield Case('padded vocabularies of different widths', cut[0], drafts.sampled(cut[1]), 2, 4)
  target, draft = pair(4, seed=9)
  tables = {
      'draft over part of the vocabulary': (target, without(draft, 2)),
      'target that forbids tokens': (without(target, 1), draft),
      'nothing in common': (without(target, 0, 1), without(draft, 2, 3)),
  }
  for name, (target, draft) in tables.items():
    yield Case(name, table_law(target), drafts.sampled(table_law(draft)), 2, 4)


def _edges() -> Iterator[Case]:
  target, draft = map(table_law, pair(3, seed=10))
  almost = drafts.sampled(lambda text: nudged(target(text)))
  certain = lambda text: np.eye(3)[0] if text[-1] == 1 else target(text)
  yield Case('draft equal to the target', target, drafts.sampled(target), 3, 3)
  yield Case('draft equal to the target but for the last bit', target, almost, 3, 3)
  yield Case('certain after one token, free after the others', certain, drafts.sampled(draft), 3, 3)


def _one_hot_of(law: Law) -> Law:
  return lambda text: np.eye(len(law(text)))[np.argmax(law(text))]


def nudged(law: np.ndarray) -> np.ndarray:
  """The next float64 up for the first token, down for the last."""
  return np.concatenate([np.nextafter(law[:1], 2), law[1:-1], np.nextafter(law[-1:], -1)])


def coupled_cases() -> list[tuple[Case, NoisyDrafter]]:
  """Cases of the coupled rule, whose text must be that of plain decoding under every noise."""
  target, draft = map(table_law, pair(3, seed=11))
  dropped = drafts.shortened(drafts.argmax(draft), drafts.drop_unlikely(draft, 0.5))
  proposers = {
      'shared noise': drafts.shared_noise(draft),
      'shared noise, draft equal to the target': drafts.shared_noise(target),
      'argmax draft': drafts.noiseless(drafts.argmax(draft)),
      'copied draft': drafts.noiseless(drafts.copied),
      'drafts of 0 to gamma tokens': drafts.noiseless(dropped),
  }
  cases = [(Case(f'{name}, gamma {gamma}', target, drafts.copied, gamma, 3, prompt=REPEATING), propose)
           for name, propose in proposers.items() for gamma in (1, 2, 3)]
  for name, values in FILTERS.items():
    target, draft = (table_law(warped(table, *values)) for table in pair(3, seed=12))
    cases.append((Case(f'filtered: {name}', target, drafts.copied, 2, 3), drafts.shared_noise(draft)))
  return cases
