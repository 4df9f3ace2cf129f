"""Records EAGLE heads as PyTorch computes them, for tests/fixtures: `python -m experiments.peers.record_eagle`.

One small random checkpoint in each layout that is published, with what went in and what came out: the guesses from true
features, and the guesses from these. The decoder layer is that of transformers. Needs the `peers` extra and nothing of
this project.
"""

import argparse
import json
from pathlib import Path
import shutil

import numpy as np
import safetensors.torch
import torch
from torch import nn
import transformers
from transformers.models.llama import modeling_llama

VOCAB, TARGET_WIDTH, PAIRS, DRAFTED = 48, 32, 9, 20
COMMON = dict(vocab_size=VOCAB, hidden_size=TARGET_WIDTH, intermediate_size=40, num_hidden_layers=1,
              num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, rms_norm_eps=1e-6)
FIELDS = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads',
          'num_key_value_heads', 'max_position_embeddings', 'rms_norm_eps')


class Head(nn.Module):
  """Names and forward pass of the published heads."""

  def __init__(self, version: int, config: transformers.LlamaConfig, bias: bool, drafted: int | None):
    super().__init__()
    width = config.hidden_size
    config._attn_implementation = 'eager'
    layer = modeling_llama.LlamaDecoderLayer(config, 0)
    self.version, self.config = version, config
    self.embed_tokens = nn.Embedding(config.vocab_size, width)
    self.rotary = modeling_llama.LlamaRotaryEmbedding(config)
    if version == 1:
      layer.input_layernorm = nn.Identity()
      self.fc = nn.Linear(2 * width, width, bias=bias)
      self.layers = nn.ModuleList([layer])
      return
    head_dim = width // config.num_attention_heads
    for name, heads in (('q', config.num_attention_heads), ('k', config.num_key_value_heads),
                        ('v', config.num_key_value_heads)):
      setattr(layer.self_attn, f'{name}_proj', nn.Linear(2 * width, heads * head_dim, bias=False))
    layer.hidden_norm = modeling_llama.LlamaRMSNorm(width, config.rms_norm_eps)
    self.fc = nn.Linear(3 * TARGET_WIDTH, width, bias=False)
    self.midlayer = layer
    self.norm = modeling_llama.LlamaRMSNorm(width, config.rms_norm_eps)
    self.lm_head = nn.Linear(width, drafted or config.vocab_size, bias=False)
    if drafted:
      ids = torch.randperm(config.vocab_size)[:drafted].sort().values
      self.register_buffer('d2t', ids - torch.arange(drafted))
      self.register_buffer('t2d', torch.isin(torch.arange(config.vocab_size), ids))

  def forward(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """[T, D]: what follows each of T pairs, which stand one after the other."""
    embedded = self.embed_tokens(tokens)[None]
    features = features[None]
    positions = torch.arange(len(tokens))[None]
    mask = torch.full((len(tokens), len(tokens)), float('-inf')).triu(1)[None, None]
    if self.version == 1:
      layer, x = self.layers[0], self.fc(torch.cat([embedded, features], dim=-1))
      read = x
    else:
      layer, x = self.midlayer, self.fc(features) if features.shape[-1] != self.config.hidden_size else features
      read = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(x)], dim=-1)
    mixed, _ = layer.self_attn(
        hidden_states=read, position_embeddings=self.rotary(x, positions), attention_mask=mask)
    x = x + mixed
    return (x + layer.mlp(layer.post_attention_layernorm(x)))[0]


def randomize(head: Head):
  """Weights that make attention sharp and norms uneven."""
  with torch.no_grad():
    for name, parameter in head.named_parameters():
      noise = torch.randn(parameter.shape)
      if 'norm' in name:
        parameter.copy_(1 + 0.3 * noise)
      elif 'embed' in name or name.endswith('bias'):
        parameter.copy_(0.5 * noise)
      else:
        gain = 2.0 if 'q_proj' in name or 'k_proj' in name else 1.0
        parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)


def record(directory: Path, version: int, dtype: torch.dtype, *, keeps_embedding: bool, bias: bool = False,
           drafted: int | None = None, **changes) -> dict[str, torch.Tensor]:
  """Writes config.json and what the head computes; returns the tensors, which are left to be written."""
  shutil.rmtree(directory, ignore_errors=True)
  directory.mkdir(parents=True)
  config = transformers.LlamaConfig(**COMMON | changes)
  head = Head(version, config, bias, drafted)
  randomize(head)
  head = head.to(dtype).float()
  head.rotary = modeling_llama.LlamaRotaryEmbedding(config)  # its frequencies are not part of a checkpoint
  width = config.hidden_size
  lm_head = torch.randn(VOCAB, TARGET_WIDTH) / TARGET_WIDTH ** 0.5
  tokens = torch.randint(0, VOCAB, (2, PAIRS))
  features = torch.randn(PAIRS, TARGET_WIDTH * (3 if version == 3 else 1))
  score = (lambda x: head.lm_head(head.norm(x))) if version == 3 else (lambda x: x @ lm_head.T)
  with torch.no_grad():
    guessed = head(tokens[0], features)
    again = head(tokens[1], guessed)
    logits = score(guessed)
  embedding = head.embed_tokens.weight.detach() if width == TARGET_WIDTH else torch.randn(VOCAB, TARGET_WIDTH)
  np.savez_compressed(
      directory / 'recorded.npz', embedding=embedding.numpy(), lm_head=lm_head.numpy(), tokens=tokens.numpy(),
      features=features.numpy(), guessed=guessed.numpy(), again=again.numpy(), logits=logits.numpy(),
      ids=np.arange(drafted) + head.d2t.numpy() if drafted else np.arange(VOCAB))
  fields = {name: getattr(config, name) for name in FIELDS} | dict(
      architectures=['LlamaForCausalLM' + ('Eagle3' if version == 3 else '')], model_type='llama', hidden_act='silu')
  if 'rope_parameters' in changes:
    fields['rope_theta'] = changes['rope_parameters']['rope_theta']
  if version == 1:
    fields['bias'] = bias
  else:
    fields['draft_vocab_size'] = drafted or VOCAB
    if width != TARGET_WIDTH:
      fields['target_hidden_size'] = TARGET_WIDTH
  (directory / 'config.json').write_text(json.dumps(fields, indent=2) + '\n')
  dropped = () if keeps_embedding else ('embed_tokens.weight',)
  return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor
          for name, tensor in head.state_dict().items() if name not in dropped}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--target', type=Path, default=Path('tests/fixtures/eagle'))
  target = parser.parse_args().target
  torch.manual_seed(0)
  save = lambda tensors, name: safetensors.torch.save_file(tensors, target / name / 'model.safetensors')
  torch.save(record(target / 'eagle1', 1, torch.float16, keeps_embedding=True, bias=True),
             target / 'eagle1' / 'pytorch_model.bin')
  save(record(target / 'eagle2', 1, torch.float32, keeps_embedding=False, num_key_value_heads=4), 'eagle2')
  torch.save(record(target / 'eagle3', 3, torch.float32, keeps_embedding=False, drafted=DRAFTED,
                    rope_parameters=dict(rope_type='default', rope_theta=5e5)),
             target / 'eagle3' / 'pytorch_model.bin')
  save(record(target / 'eagle3-narrow', 3, torch.bfloat16, keeps_embedding=True, drafted=DRAFTED, hidden_size=24,
              intermediate_size=28), 'eagle3-narrow')
  save(record(target / 'eagle3-full', 3, torch.float32, keeps_embedding=False), 'eagle3-full')


if __name__ == '__main__':
  main()
