"""Checkpoints of other software: Hugging Face directories and GGUF files."""

from models.loading.embedded import embedded_model
from models.loading.export import export_gguf, export_hf
from models.loading.load import load_decoder

__all__ = ['embedded_model', 'export_gguf', 'export_hf', 'load_decoder']
