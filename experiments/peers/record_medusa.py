"""Records Medusa heads as PyTorch computes them, for tests/fixtures: `python -m experiments.peers.record_medusa`.

One small checkpoint in each layout that is published, with the vectors that went in and the logits that came out. Needs
the `peers` extra and nothing of this project.
"""

import argparse
import json
from pathlib import Path
import shutil

import numpy as np
import safetensors.torch
import torch

WIDTH, VOCAB, ROWS = 24, 40, 7


class Block(torch.nn.Module):
  """The residual block."""

  def __init__(self):
    super().__init__()
    self.linear = torch.nn.Linear(WIDTH, WIDTH)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    return x + torch.nn.functional.silu(self.linear(x))


def make_heads(num_heads: int, num_layers: int, own_head: bool) -> torch.nn.ModuleList:
  """All heads; one that borrows its LM head ends with the last block."""
  last = lambda: [torch.nn.Linear(WIDTH, VOCAB, bias=False)] if own_head else []
  return torch.nn.ModuleList(
      torch.nn.Sequential(*(Block() for _ in range(num_layers)), *last()) for _ in range(num_heads))


def write_config(directory: Path, num_heads: int, num_layers: int):
  fields = dict(medusa_num_heads=num_heads, medusa_num_layers=num_layers, base_model_name_or_path='some/model')
  (directory / 'config.json').write_text(json.dumps(fields, indent=2) + '\n')


def record(directory: Path, num_heads: int, num_layers: int, own_head: bool, dtype: torch.dtype) -> dict:
  """Writes config.json and the recorded logits [K, T, V]; returns the tensors, which are left to be written."""
  shutil.rmtree(directory, ignore_errors=True)
  directory.mkdir(parents=True)
  heads = make_heads(num_heads, num_layers, own_head).to(dtype)
  tensors = heads.state_dict()
  lm_head = torch.randn(VOCAB, WIDTH).to(dtype)
  hidden = torch.randn(ROWS, WIDTH)
  with torch.no_grad():
    out = torch.stack([head(hidden) for head in heads.float()])
    logits = out if own_head else out @ lm_head.float().T
  np.savez_compressed(directory / 'logits.npz', hidden=hidden.numpy(), lm_head=lm_head.float().numpy(),
                      logits=logits.numpy())
  write_config(directory, num_heads, num_layers)
  return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--target', type=Path, default=Path('tests/fixtures/medusa'))
  target = parser.parse_args().target
  torch.manual_seed(0)
  torch.save(record(target / 'own', 5, 1, True, torch.float16), target / 'own' / 'medusa_lm_head.pt')
  write_config(target / 'own', 2, 1)  # as published: fewer heads than the file holds
  safetensors.torch.save_file(
      record(target / 'shared', 3, 2, False, torch.float32), target / 'shared' / 'medusa_lm_head.safetensors')
  inside = {f'medusa_head.{name}': tensor
            for name, tensor in record(target / 'inside', 4, 1, True, torch.bfloat16).items()}
  inside['model.norm.weight'] = torch.ones(WIDTH)
  names, parts = sorted(inside), ('pytorch_model-00001-of-00002.bin', 'pytorch_model-00002-of-00002.bin')
  places = {name: parts[i % 2] for i, name in enumerate(names)}
  for part in parts:
    torch.save({name: inside[name] for name in names if places[name] == part}, target / 'inside' / part)
  (target / 'inside' / 'pytorch_model.bin.index.json').write_text(json.dumps(dict(weight_map=places), indent=2) + '\n')


if __name__ == '__main__':
  main()
