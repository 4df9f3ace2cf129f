"""The best static tree for trained heads: by what they get right on held-out texts, and what a pass costs here.

    python -m experiments.plan_tree --config=configs/smollm2.py:eagle \
        --config.drafter.source=results/train_eagle/model --corpus=results/corpus --out=tree.json
    python -m launch.bench --config=configs/smollm2.py:eagle --config.drafter.source=results/train_eagle/model \
        --config.drafter.tree=tree.json --config.engine.gamma=NODES

One pass over the held-out texts of a corpus gives the acceptance table (`specdec.training.acceptance`); target passes
of some widths and drafts of the config's own tree are timed, other widths interpolated; `specdec.tree_planner.plan`
does the rest. The texts are simulated with the tree that it finds, and with a chain as deep. With --most_tokens nothing
is timed: the tree is the best of --max_nodes where all passes cost alike, as they nearly do on an accelerator.
"""

from collections.abc import Sequence
import functools
from typing import Any

from absl import flags
import numpy as np

from launch import cli, results
from launch.corpus import check_ids, read_texts, rows, whole
from launch.evaluation_texts import check_clean
from launch.parts import PASSES, Parts
from launch.session import Session
from launch.table import Column, print_table
from launch.timing import measure
from models.eagle import EagleWeights
from models.errors import InputError
from specdec.drafters import MedusaParams
from specdec.engine import Params, Request
from specdec.training.acceptance import acceptance_table, measured_ranks, simulated_tokens_per_pass
from specdec.training.eagle import EagleObjective
from specdec.training.frozen import Frozen, split
from specdec.training.medusa import MedusaObjective
from specdec.tree import TreeSpec
from specdec.tree_planner import Plan, plan
from specdec.warp import Sampling

TIMED_WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MOST_LEVELS = 5
PROMPT_LENGTH, ROW_TOKENS, ROW_BATCH = 256, 768, 4  # longer texts are left out


def held_out_ranks(params: Params, num_tokens: int, some_rows: Sequence[dict[str, np.ndarray]],
                   levels: int | None) -> np.ndarray:
  """[N, T, M]: which choices of the heads the texts' tokens are; M is `MOST_LEVELS`, or all heads, unless given.

  Raises:
    InputError: a drafter without heads, or with fewer than there are levels.
  """
  match params.draft:
    case EagleWeights():
      graph, trainable, rest = split(params.draft.head)
      objective, levels = EagleObjective(graph, num_tokens), levels or MOST_LEVELS
    case MedusaParams():
      graph, trainable, rest = split(params.draft.heads)
      objective = MedusaObjective(graph, num_tokens)
      levels = levels or min(MOST_LEVELS, params.draft.heads.config.num_heads)
      if levels > params.draft.heads.config.num_heads:
        raise InputError(f'--levels={levels}, and there are {params.draft.heads.config.num_heads} medusa heads: ask '
                         'for fewer levels')
    case _:
      raise InputError('trees are planned for heads: use a config with the drafter medusa or eagle')
  return measured_ranks(objective, Frozen(params.target, rest), some_rows, ROW_BATCH, levels)(trainable)


def takes_likeliest(session: Session) -> bool:
  """Whether what the heads rank is what they draft: drawn children are accepted by another law."""
  return not session.engine.drafter.draws or session.config.sampling.temperature == 0


def costs(session: Session, max_nodes: int, repeats: int) -> tuple[list[float], float]:
  """v(1), ... v(max_nodes + 1) and the draft, in plain passes of one batch."""
  batch = session.config.engine.batch
  request = Request([[0] * min(PROMPT_LENGTH, session.engine.capacity - 1)] * batch, range(batch),
                    Sampling.create(session.config.sampling.temperature), 1)
  parts = Parts(session.engine, session.params, session.engine.start(session.params, request))
  widths = [width for width in TIMED_WIDTHS if width <= max_nodes] + [max_nodes + 1]
  functions = {width: functools.partial(parts.target_passes, width) for width in widths} | {'draft': parts.drafts}
  seconds = {part: timing.median for part, timing in measure(functions, repeats).items()}
  relative = [seconds[width] / seconds[1] for width in widths]
  verify_cost = np.interp(np.arange(1, max_nodes + 2), widths, relative)
  return verify_cost.tolist(), seconds['draft'] / parts.drafts_per_call / (seconds[1] / PASSES)


def by_level(session: Session, draft_cost: float) -> tuple[float, float]:
  """What a level of the session's draft costs, and what the draft costs besides: all levels of Medusa cost as one."""
  if session.config.drafter.name == 'medusa':
    return 0.0, draft_cost
  return draft_cost / session.engine.levels, 0.0


def planned(session: Session, ranks_NTM: np.ndarray, num_ranks: int, verify_cost: list[float],
            draft_cost: float) -> dict[str, Any]:
  """What goes into the file: the best tree of as many nodes as there are costs of wider passes, `costs`."""
  table_KI, max_nodes = acceptance_table(ranks_NTM, num_ranks), len(verify_cost) - 1
  level_cost, overhead = by_level(session, draft_cost)
  best: Plan = plan(table_KI, verify_cost, level_cost, overhead, max_nodes)
  facts = {'tree': best.tree, 'nodes': len(best.tree), 'expected_tokens': best.tokens, 'cost': best.cost,
           'expected_speedup': best.speedup, 'acceptance': table_KI, 'verify_cost': verify_cost,
           'draft_cost': draft_cost, 'level_cost': level_cost, 'drafter': session.config.drafter}
  if best.tree:
    tree = TreeSpec.from_paths(best.tree)
    facts |= {'levels': tree.levels, 'simulated_tokens_per_pass': simulated_tokens_per_pass(tree, ranks_NTM),
              'simulated_chain': simulated_tokens_per_pass(TreeSpec.chain(tree.levels), ranks_NTM)}
  return facts | results.environment()


def main() -> None:
  cli.refuse_job()
  config = cli.config_of(CONFIG)
  results.check_writable(OUT.value)
  texts = whole((text for text in read_texts(CORPUS.value) if text.held_out), ROW_TOKENS)
  session = Session.from_config(config)
  if not takes_likeliest(session):
    raise InputError(f"drafter.children={config.drafter.children!r} are drawn at sampling.temperature="
                     f"{config.sampling.temperature}, and trees are planned for the likeliest: use 'top'")
  check_ids(CORPUS.value, texts, session.tokenizer.num_tokens)
  check_clean((text.id, session.tokenizer.decode(text.tokens)) for text in texts)
  ranks_NTM = held_out_ranks(session.params, session.tokenizer.num_tokens, rows(texts, ROW_TOKENS), LEVELS.value)
  verify_cost, draft_cost = [1.0] * (MAX_NODES.value + 1), 0.0
  if not MOST_TOKENS.value:
    verify_cost, draft_cost = costs(session, MAX_NODES.value, REPEATS.value)
  facts = planned(session, ranks_NTM, RANKS.value, verify_cost, draft_cost)
  results.write_json(OUT.value, facts)
  table = [{'level': level + 1} | {f'rank_{rank}': share for rank, share in enumerate(accept_I[:6])}
           for level, accept_I in enumerate(facts['acceptance'])]
  print_table(table, [Column('level'), *[Column(name, format='.3f') for name in table[0] if name != 'level']],
              'kept, of rows that are kept', file=cli.output())
  cli.say(f'{facts["nodes"]} nodes: {facts["expected_tokens"]:.2f} tokens per pass expected, '
          f'{facts.get("simulated_tokens_per_pass", 1):.2f} simulated ({facts.get("simulated_chain", 1):.2f} by a '
          'chain as deep)' + ('' if MOST_TOKENS.value else
                              f', {facts["expected_speedup"]:.2f} times as fast as plain decoding'))
  if facts['nodes']:
    cli.say(f'--config.drafter.tree={OUT.value} --config.engine.gamma={facts["nodes"]}')
  cli.write_json(facts)


if __name__ == '__main__':
  CONFIG = cli.define_config()
  CORPUS = flags.DEFINE_string('corpus', None, 'Directory that experiments.make_corpus wrote.')
  OUT = flags.DEFINE_string('out', 'tree.json', 'The tree goes here.')
  LEVELS = flags.DEFINE_integer('levels', None, 'Levels of the tree, at most: 5, or as many as there are Medusa heads.',
                                lower_bound=1)
  RANKS = flags.DEFINE_integer('ranks', 8, 'Children of a row, at most.', lower_bound=1)
  MAX_NODES = flags.DEFINE_integer('max_nodes', 31, 'Of the tree.', lower_bound=1)
  MOST_TOKENS = flags.DEFINE_bool('most_tokens', False, 'Plan for the most tokens per pass; costs are not looked at.')
  REPEATS = flags.DEFINE_integer('repeats', 5, 'Timed calls of each part.', lower_bound=1)
  flags.mark_flag_as_required('corpus')
  cli.run(main)
