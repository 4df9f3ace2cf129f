"""A conditional that keeps its operands in place."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import Array

Carry = TypeVar('Carry')


def run_if(condition: Array, function: Callable[[Carry], Carry], carry: Carry) -> Carry:
  """`function(carry)` where the condition holds, else `carry`.

  A loop of at most one trip: XLA updates a loop's carry in place, but copies what passes through `lax.cond`, here
  every key/value cache.
  """
  return jax.lax.fori_loop(0, condition.astype('int32'), lambda _, carry: function(carry), carry)
