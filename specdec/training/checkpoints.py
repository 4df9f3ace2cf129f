"""The checkpoints of a run: one directory per step, the newest finished one to go on from, old ones removed.

A step holds the whole state of a training run: any tree of arrays and a few facts.
"""

from collections.abc import Iterator
import os
from pathlib import Path
import re
import shutil
import sys
from typing import Any

import jax

from models.errors import InputError
from models.loading import orbax
from models.loading.safetensors import read_json


class Checkpoints:
  """Saves into DIR/step_00000200 and the like (`models.loading.orbax`).

  A step whose save never finished is passed over, with a line on standard error, until it is saved again.

  Attributes:
    directory: of the run.
    keep: how many finished checkpoints to keep at least; older ones are removed once a newer one is finished.
  """

  def __init__(self, directory: str | os.PathLike, keep: int):
    if keep < 1:
      raise InputError(f'keep={keep} checkpoints: keep 1 or more')
    self.directory, self.keep = Path(directory), keep

  def path(self, step: int) -> Path:
    return self.directory / f'step_{step:08d}'

  def steps(self) -> list[int]:
    """Finished ones, in order."""
    return sorted(step for step, path in self._found() if orbax.is_finished(path))

  def latest(self) -> int | None:
    """The newest finished step; says which newer ones it passes over."""
    latest = max(self.steps(), default=None)
    for step, path in sorted(self._found()):
      if not orbax.is_finished(path) and (latest is None or step > latest):
        instead = 'there is no earlier one' if latest is None else f'going on from step {latest}'
        print(f'{path} was never finished: {instead}', file=sys.stderr, flush=True)
    return latest

  def save_state(self, step: int, tree: Any, facts: dict[str, Any]) -> None:
    """Writes a tree of arrays, and `facts` as JSON beside it; then removes what is no longer to be kept.

    Every process must call this.

    Raises:
      InputError: if that step is there already.
    """
    arrays = ((name_in_tree(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree))
    orbax.save_arrays(self.path(step), orbax.TRAINING_MARK, facts, arrays)
    self._remove_old()

  def load_facts(self, step: int) -> dict[str, Any]:
    """Those of `save_state`.

    Raises:
      InputError: if that step is no state of a training run.
    """
    return read_json(self.path(step) / orbax.TRAINING_MARK)

  def load_state(self, step: int, like: Any) -> Any:
    """The tree of `save_state`, each array with the dtype and in the place of its counterpart in `like`.

    Raises:
      InputError: if what was saved is another tree.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    targets = {name_in_tree(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
               for path, leaf in leaves}
    loaded = orbax.load_arrays(self.path(step), orbax.TRAINING_MARK, targets)
    return jax.tree.unflatten(structure, [loaded[name] for name in targets])

  def _remove_old(self) -> None:
    if jax.process_index() == 0:
      for old in self.steps()[:-self.keep]:
        shutil.rmtree(self.path(old))

  def _found(self) -> Iterator[tuple[int, Path]]:
    for path in self.directory.glob('step_*'):
      if match := re.fullmatch(r'step_(\d+)', path.name):
        yield int(match[1]), path


def name_in_tree(path: tuple) -> str:
  """Of a leaf, by the keys on the way to it: 'trainable.layers.attn.qkv'."""
  return jax.tree_util.keystr(path, simple=True, separator='.')
