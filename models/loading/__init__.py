"""Checkpoints of other software: Hugging Face directories and GGUF files."""

from models.loading.load import load_decoder

__all__ = ['load_decoder']
