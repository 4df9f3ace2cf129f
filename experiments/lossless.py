"""Which rule judges which draft, and what it promises: the table of the README, from the code.

    python -m experiments.lossless
"""

from collections.abc import Mapping

from launch import cli
from specdec.accept import RULES
from specdec.accept.protocol import AcceptRule
from specdec.drafters import Drafter, Eagle, Hybrid, Lookup, LookupTree, Medusa, Model, Ngram, Simulated
from specdec.tree import TreeSpec

TREE = TreeSpec.branches(2, 2)
DRAFTERS: Mapping[str, Drafter] = {
    'lookup': Lookup(), 'simulated': Simulated(0.5), 'model, self': Model(2), 'unigram, bigram': Ngram(2),
    'lookup_tree': LookupTree(), 'medusa': Medusa(TREE, 2), 'eagle, likeliest children': Eagle(2, TREE),
    'eagle, drawn children': Eagle(2, TREE, 'without'), 'eagle, a chain drawn': Eagle(2, TreeSpec.chain(2), 'without'),
    'hybrid of a model': Hybrid(Model(2), Lookup(), 1, 1), 'hybrid of heads': Hybrid(Medusa(TREE, 2), Lookup(), 4, 1)}


def promise(drafter: Drafter, rule: AcceptRule) -> str:
  """'exact' at every temperature, 'greedy only' if exact at temperature 0 alone, '-' if refused."""
  if (drafter.is_tree and not rule.trees) or (drafter.draws and not rule.laws):
    return '-'
  return 'exact' if rule.lossless else 'greedy only'


def table() -> str:
  """In Markdown."""
  lines = [['draft', *RULES], ['---'] * (len(RULES) + 1)]
  lines += [[name, *(promise(drafter, rule) for rule in RULES.values())] for name, drafter in DRAFTERS.items()]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def main() -> int:
  cli.say(table())
  cli.write_json({name: {rule: promise(drafter, RULES[rule]) for rule in RULES} for name, drafter in DRAFTERS.items()})
  return 0


if __name__ == '__main__':
  cli.run(main, alone=True)
