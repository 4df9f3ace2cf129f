"""A static tree in a file, as `experiments.plan_tree` writes it: {"tree": [[0], [1], [0, 0]], ...}."""

import json

from models.errors import InputError


def read_tree(path: str) -> tuple[tuple[int, ...], ...]:
  """The paths of the tree.

  Raises:
    InputError: a file that cannot be read, or that holds none.
  """
  try:
    with open(path, encoding='utf-8') as file:
      content = json.load(file)
  except (OSError, ValueError, RecursionError) as error:
    raise InputError(f'drafter.tree={path!r}: {error}: name a file that experiments.plan_tree wrote, or write the '
                     'paths into the config') from error
  paths = content.get('tree') if isinstance(content, dict) else None
  is_path = lambda path: isinstance(path, list) and path and all(type(rank) is int and rank >= 0 for rank in path)
  if not isinstance(paths, list) or not paths or not all(map(is_path, paths)):
    raise InputError(f"drafter.tree={path!r} holds no 'tree' of paths such as [[0], [1], [0, 0]]")
  return tuple(map(tuple, paths))
