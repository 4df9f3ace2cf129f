"""Texts from the real jitted loop on table models, and Pearson's χ² against their exact law."""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from experiments import exact_cases, tree_cases
from experiments.draft_paths import Text
from experiments.enumeration import law_of_length, table_law, warped
from experiments.table_tree import TableTree
from models.table import TableModel
from specdec.accept.protocol import AcceptRule
from specdec.drafters import Empty, Lookup, Model, ReducedModel, Simulated, children
from specdec.drafters.protocol import Drafter
from specdec.engine import Engine, Params, Request, run
from specdec.metrics import Metrics
from specdec.warp import Sampling

LEAST_EXPECTED = 5.0
CAPACITY = 32
PADDING_WEIGHT = 9.0  # padding ids are likelier than any real token: drawing one would show


@dataclasses.dataclass(frozen=True)
class ChiSquare:
  """Counts against a law.

  Attributes:
    statistic, freedom: of Pearson's test, cells that expect fewer than 5 pooled.
    p_value: 0 if anything was drawn that the law forbids.
    max_deviation: largest difference of a frequency from its probability, over cells before pooling.
    draws: how many.
  """

  statistic: float
  freedom: int
  p_value: float
  max_deviation: float
  draws: int


def chi_square(counts: np.ndarray, law: np.ndarray) -> ChiSquare:
  """Tests the counts of independent draws against the law, both of any shape."""
  counts, law = counts.ravel(), law.ravel()
  draws = int(counts.sum())
  deviation = float(np.abs(counts / draws - law).max())
  observed, expected = _pool(counts, law * draws)
  freedom = len(expected) - 1
  if counts[law == 0].any():
    return ChiSquare(np.inf, freedom, 0.0, deviation, draws)
  statistic = float(np.sum((observed - expected)**2 / expected))
  p_value = float(special.chdtrc(freedom, statistic)) if freedom else 1.0
  return ChiSquare(statistic, freedom, p_value, deviation, draws)


def _pool(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Puts the rarest cells together until none expects fewer than 5."""
  order = np.argsort(expected, kind='stable')
  counts, expected = counts[order], expected[order]
  rare = int(np.searchsorted(expected, LEAST_EXPECTED))
  while 0 < rare < len(expected) and expected[:rare].sum() < LEAST_EXPECTED:
    rare += 1
  if rare == 0:
    return counts, expected
  return np.append(counts[rare:], counts[:rare].sum()), np.append(expected[rare:], expected[:rare].sum())


@dataclasses.dataclass(frozen=True)
class Loop:
  """A compiled loop and what it runs on. The batch is part of its shape.

  Attributes:
    engine, params: what decodes.
    table: the target's [.., V] laws over the real tokens.
    prompt: the same in every row.
    batch: rows per run.
  """

  engine: Engine
  params: Params
  table: np.ndarray
  prompt: Text
  batch: int

  def law(self, length: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """[V, ..., V]: the exact law of the first `length` tokens."""
    law = table_law(warped(self.table, temperature, top_k, top_p))
    return law_of_length(law, self.prompt, length, self.engine.num_tokens)


@dataclasses.dataclass(frozen=True)
class Sample:
  """Texts [draws, length] of rows with different seeds, and the sum of their metrics."""

  texts: np.ndarray
  metrics: Metrics

  def counts(self, vocab: int) -> np.ndarray:
    """[V, ..., V]: how often each text was drawn."""
    counts = np.zeros((vocab,) * self.texts.shape[1])
    np.add.at(counts, tuple(self.texts.T), 1)
    return counts


def sample(loop: Loop, draws: int, length: int, sampling: Sampling, seed: int = 0) -> Sample:
  """Decodes at least `draws` rows of `length` tokens each; row i has the seed `seed` + i."""
  texts, metrics = [], []
  for start in range(seed, seed + draws, loop.batch):
    request = Request([loop.prompt] * loop.batch, range(start, start + loop.batch), sampling, length)
    state = run(loop.engine, loop.params, loop.engine.start(loop.params, request))
    tokens_BL, counters = jax.device_get((state.tokens_BL, state.counters))
    texts.append(tokens_BL[:, len(loop.prompt):][:, :length])
    metrics.append(Metrics.from_counters(counters))
  return Sample(np.concatenate(texts), Metrics.total(metrics))


def make_engine(drafter: Drafter, rule: AcceptRule, gamma: int, vocab: int, **options) -> Engine:
  return Engine(drafter, rule, gamma, CAPACITY, vocab, **options)


def model_drafter(vocab: int, gamma: int) -> Model:
  return Model(vocab)


def padded_models(tables: Sequence[np.ndarray]) -> list[TableModel]:
  """Target and draft with different numbers of padding ids."""
  return [TableModel.create(table, 2 - i, PADDING_WEIGHT) for i, table in enumerate(tables)]


def fewer_tokens(draft: TableModel, vocab: int) -> ReducedModel:
  """A draft that says every other token, and one that only pads the vocabulary."""
  ids_U = jnp.asarray([*range(0, vocab, 2), vocab], jnp.int32)
  return ReducedModel(draft.replace(weights=draft.weights[..., ids_U]), ids_U)


def loops(rule: AcceptRule, batch: int, vocab: int = 4, gamma: int = 3, seed: int = 0) -> dict[str, Loop]:
  """One loop for each drafter, with padded vocabularies and a prompt in which lookup finds something."""
  tables = exact_cases.pair(vocab, seed)
  target, draft = padded_models(tables)
  prompt = exact_cases.REPEATING
  recorded = np.random.default_rng(seed).integers(0, vocab, (batch, CAPACITY), np.int32)
  drafters = {
      'none': (Empty(), None, 0),
      'model': (model_drafter(vocab, gamma), draft, gamma),
      'model, fewer tokens': (model_drafter(vocab, gamma), fewer_tokens(draft, vocab), gamma),
      'lookup': (Lookup(partial=True), None, gamma),
      'simulated': (Simulated(0.5), jnp.asarray(recorded), gamma),
  }
  return {name: Loop(make_engine(drafter, rule, width, vocab), Params(target, params), tables[0], prompt, batch)
          for name, (drafter, params, width) in drafters.items()}


def tree_loops(rule: AcceptRule, batch: int, vocab: int = 4, seed: int = 0) -> dict[str, Loop]:
  """One loop for each kind of children, with padded vocabularies; none for rules that judge chains only.

  The tree has three levels, and shallow leaves: after some steps the text goes on where the tree has gone deeper.
  """
  if not rule.trees:
    return {}
  tables = exact_cases.pair(vocab, seed)
  target, draft = padded_models(tables)
  trees = [TableTree(tree_cases.DEEP, vocab, kind) for kind in children.KINDS if rule.laws or kind == 'top']
  return {f'tree, {tree.kind}': Loop(make_engine(tree, rule, tree.tree.num_nodes, vocab), Params(target, draft),
                                     tables[0], exact_cases.REPEATING, batch) for tree in trees}


def three_tokens(rule: AcceptRule, batch: int) -> Loop:
  """Draft .1 .6 .3 against target .5 .2 .3: sum min(target, draft) = .6, the residual is token 0."""
  target, draft = np.array([0.5, 0.2, 0.3]), np.array([0.1, 0.6, 0.3])
  models = [TableModel.create(table) for table in (target, draft)]
  return Loop(make_engine(model_drafter(3, 1), rule, 1, 3), Params(*models), target, (0, 1), batch)
