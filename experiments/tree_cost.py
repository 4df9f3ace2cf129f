"""What a target pass costs as a tree and as a chain of the same width, and what moving the accepted path costs.

    python -m experiments.tree_cost --config=configs/smollm2.py:none --json_out=rows.json

All widths, trees and chains, run in one process, in turns, on the first prompt of the config; medians over the repeats.
A tree is filled breadth first, with `--children` under each row. Fields of a row, all measured:

    width               tokens per row: the newest and the drafted ones
    chain_ms, tree_ms   a pass alone, the filters of the law included
    tree_over_chain     their ratio, the median over the repeats
    commit_ms           moving a path that ends in the last branch to where the committed tokens go on
    commit_share        of a step: commit_ms / (tree_ms + commit_ms), so drafts, which would lower it, count nothing
    batch, capacity, jax_version, backend, ...    where it ran
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

from absl import flags
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from launch import cli, results
from launch.parts import PASSES, copy_of, target_passes
from launch.prompts import load_prompts
from launch.session import Session
from launch.table import Column, print_table
from launch.timing import Timing, measure
from models.errors import InputError
from specdec.draft import TreeDraft, Verdict
from specdec.engine import laid_out
from specdec.path import straighten
from specdec.state import DecodeState
from specdec.tree import TreeSpec, rows_to
from specdec.verify import Scores

COLUMNS = (Column('width'), Column('chain_ms', 'chain ms', '.2f'), Column('tree_ms', 'tree ms', '.2f'),
           Column('tree_over_chain', 'tree/chain', '.3f'), Column('commit_ms', 'commit ms', '.3f'),
           Column('commit_share', 'of a step', '.1%'))


def full_tree(width: int, children: int) -> TreeSpec:
  """`width` - 1 nodes, breadth first."""
  return TreeSpec(tuple(node // children for node in range(width - 1)))


@functools.partial(jax.jit, static_argnames=('tree', 'num_tokens'), donate_argnames=('state',))
def commits(tree: TreeSpec, num_tokens: int, state: DecodeState) -> DecodeState:
  """`PASSES` times the way from a verdict to a chain (`specdec.path`), the path ending in the last node."""
  batch, width = state.newest_B.shape[0], tree.num_nodes + 1
  parents_BM = jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), (batch, tree.num_nodes))
  count_B = jnp.full((batch,), tree.num_nodes)
  scores = Scores(jnp.zeros((batch, width, num_tokens)), None, None, jnp.zeros((), jnp.int32))
  draft = TreeDraft(jnp.zeros_like(parents_BM), parents_BM, None, count_B, tree.levels, tree.branching)

  def one(_, state: DecodeState) -> DecodeState:
    path_BP = rows_to(count_B, parents_BM, tree.levels)
    verdict = Verdict(jnp.full((batch,), tree.levels), jnp.zeros((batch,), jnp.int32), path_BP)
    _, _, cache = straighten(draft, verdict, scores, state.cache)
    return laid_out(state.replace(cache=cache))

  return laid_out(jax.lax.fori_loop(0, PASSES, one, state))


class Passes:
  """Passes and commits on one batch, to be timed again and again; owns a copy of the state, which is donated."""

  def __init__(self, session: Session, state: DecodeState):
    self._engine, self._target, self._state = session.engine, session.params.target, copy_of(state)

  def chain(self, width: int) -> Array:
    return self._run(target_passes, self._engine, width, self._target)

  def tree(self, tree: TreeSpec) -> Array:
    return self._run(functools.partial(target_passes, tree=tree), self._engine, tree.num_nodes + 1, self._target)

  def commit(self, tree: TreeSpec) -> Array:
    return self._run(commits, tree, self._engine.num_tokens)

  def _run(self, function: Callable[..., DecodeState], *arguments: Any) -> Array:
    self._state = function(*arguments, self._state)
    return self._state.length_B


def cost_rows(session: Session, widths: Sequence[int], children: int, repeats: int) -> list[dict[str, Any]]:
  """A row for each width.

  Raises:
    InputError: widths below 2, or more rows than the cache has room for behind the prompt.
  """
  config = session.config
  request = session.requests(load_prompts(config.data)[:config.engine.batch])[0][1]
  room = session.engine.slots - max(map(len, request.prompts))
  if min(widths) < 2 or max(widths) > room:
    raise InputError(f'--widths={",".join(map(str, widths))}: a tree has 2 rows or more, and the cache has room for '
                     f'{room} behind the prompt: raise engine.capacity for more')
  state = session.engine.start(session.params_for(request), request)
  passes = Passes(session, state)
  functions: dict[str, Callable[[], Any]] = {}
  for width in widths:
    tree = full_tree(width, children)
    functions |= {f'chain {width}': functools.partial(passes.chain, width),
                  f'tree {width}': functools.partial(passes.tree, tree),
                  f'commit {width}': functools.partial(passes.commit, tree)}
  times = measure(functions, repeats)
  about = results.environment() | {'batch': config.engine.batch, 'capacity': config.engine.capacity}
  return [_row(width, times) | about for width in widths]


def _row(width: int, times: Mapping[str, Timing]) -> dict[str, Any]:
  chain, tree, commit = (times[f'{name} {width}'] for name in ('chain', 'tree', 'commit'))
  ratios = np.array(tree.seconds) / np.array(chain.seconds)
  ms = {f'{name}_ms': 1e3 * timing.median / PASSES
        for name, timing in (('chain', chain), ('tree', tree), ('commit', commit))}
  return {'width': width, **ms, 'tree_over_chain': float(np.median(ratios)),
          'commit_share': ms['commit_ms'] / (ms['tree_ms'] + ms['commit_ms'])}


def main() -> None:
  config = cli.config_of(CONFIG)
  try:
    widths = [int(width) for width in WIDTHS.value]
  except ValueError:
    raise InputError(f'--widths={",".join(WIDTHS.value)}: give numbers, such as 2,8,64') from None
  rows = cost_rows(Session.from_config(config), widths, CHILDREN.value, REPEATS.value)
  print_table(rows, COLUMNS, file=cli.output())
  cli.write_json({'rows': rows})


if __name__ == '__main__':
  CONFIG = cli.define_config('configs/smollm2.py:none')
  WIDTHS = flags.DEFINE_list('widths', ['2', '4', '8', '16', '32', '64'], 'Tokens per row of a pass.')
  CHILDREN = flags.DEFINE_integer('children', 3, 'Children of each row of the tree.', lower_bound=1)
  REPEATS = flags.DEFINE_integer('repeats', 20, 'Timed calls of each.', lower_bound=1)
  cli.run(main)
