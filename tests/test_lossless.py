"""The promises of the README are those of the code, and the engine refuses what the table refuses."""

import pathlib

import pytest

from experiments.lossless import DRAFTERS, promise, table
from specdec.accept import RULES
from specdec.engine import Engine

README = pathlib.Path(__file__).parents[1] / 'README.md'


def test_the_readme_has_the_table():
  assert table() in README.read_text()


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('name', DRAFTERS)
def test_refused_or_promised(name, rule):
  make = lambda: Engine(DRAFTERS[name], RULES[rule], 4, 64, 8)
  if promise(DRAFTERS[name], RULES[rule]) == '-':
    with pytest.raises(ValueError, match=f"the rule '{rule}' judges"):
      make()
  else:
    assert make().rule.lossless == (promise(DRAFTERS[name], RULES[rule]) == 'exact')
