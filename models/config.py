"""Shapes and switches of a model, as a frozen (hence hashable, hence static) dataclass."""

import dataclasses

from models.errors import InputError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are stretched beyond the trained context.

  Attributes:
    kind: 'linear' (Chen et al., 2023, position interpolation), 'llama3' or 'yarn' (Peng et al., 2023).
    factor: by how much the context grows.
    original_max_positions: trained context length; llama3 and yarn.
    low_freq_factor, high_freq_factor: band borders of llama3.
    beta_fast, beta_slow: band borders of yarn, in rotations over the trained context.
    attention_factor: yarn's factor on cos and sin; None means 0.1 ln(factor) + 1.
    truncate: whether yarn rounds its band borders to whole dimensions.
  """

  kind: str
  factor: float
  original_max_positions: int = 0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  truncate: bool = True

  def __post_init__(self):
    if self.kind not in ('linear', 'llama3', 'yarn'):
      raise InputError(f"rope scaling {self.kind!r} is not supported: use 'linear', 'llama3' or 'yarn'")
    if not self.factor >= 1:
      raise InputError(f'rope scaling factor {self.factor} must be at least 1')
    if self.kind != 'linear' and self.original_max_positions < 1:
      raise InputError(f'rope scaling {self.kind!r} needs the trained context: original_max_positions is '
                       f'{self.original_max_positions}')


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """A decoder-only transformer: the Llama family, or Chinchilla / Gopher.

  Attributes:
    vocab_size: rows of the embedding, padding rows included.
    width: D, size of the residual stream.
    num_layers: L.
    num_heads, num_kv_heads: N query heads share K key/value heads (N a multiple of K).
    head_dim: H.
    ff_width: F.
    mlp: 'swiglu' (Llama) or 'gelu' (Chinchilla).
    positions: 'rope', or 'relative' (Dai et al., 2019, Transformer-XL; Gopher and Chinchilla).
    rope_theta, rope_scaling: rotary base and its scaling.
    max_positions: longest sequence the model was made for.
    norm_eps: of RMSNorm.
    tied_embedding: whether the LM head is the transposed embedding.
    qkv_bias: biases on queries, keys and values (Qwen2).
    qk_norm: RMSNorm on each query and key head (Qwen3).
    windows: sliding window per layer (None: full attention); empty means full attention in all layers.
    taps: layers whose outputs a pass returns besides (EAGLE-3), ascending.
    dtype: of weights, activations and cache. Norms, softmax and rotary angles are float32 always.
    attention_block: cache slots read at a time, so that a pass costs what is live rather than what is
      allocated; None reads the whole cache at once (keeps weight prefetch on TPU).
    split: on a mesh, over the `model` axis; else weights and cache lie whole on each of its devices.
  """

  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  ff_width: int
  mlp: str = 'swiglu'
  positions: str = 'rope'
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  max_positions: int = 2048
  norm_eps: float = 1e-5
  tied_embedding: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  windows: tuple[int | None, ...] = ()
  taps: tuple[int, ...] = ()
  dtype: str = 'float32'
  attention_block: int | None = 256
  split: bool = True

  def __post_init__(self):
    for name in ('vocab_size', 'width', 'num_layers', 'num_heads', 'num_kv_heads', 'head_dim', 'ff_width',
                 'max_positions'):
      if getattr(self, name) < 1:
        raise InputError(f'{name}={getattr(self, name)} must be positive')
    if self.head_dim % 2:
      raise InputError(f'head_dim={self.head_dim} must be even: its halves are rotated together')
    if self.num_heads % self.num_kv_heads:
      raise InputError(f'num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}')
    if self.mlp not in ('swiglu', 'gelu'):
      raise InputError(f"mlp={self.mlp!r} is not supported: use 'swiglu' or 'gelu'")
    if self.positions not in ('rope', 'relative'):
      raise InputError(f"positions={self.positions!r} is not supported: use 'rope' or 'relative'")
    if self.windows and len(self.windows) != self.num_layers:
      raise InputError(f'windows names {len(self.windows)} layers, the model has {self.num_layers}')

  @property
  def group_size(self) -> int:
    """G: query heads per key/value head."""
    return self.num_heads // self.num_kv_heads

  def window(self, layer: int) -> int | None:
    return self.windows[layer] if self.windows else None

  @classmethod
  def chinchilla(cls, width: int, num_heads: int, num_layers: int, **changes) -> 'DecoderConfig':
    """Gopher-style block: 4x GELU MLP, head size 128, relative positions (Hoffmann et al., 2022, A)."""
    fields = dict(
        vocab_size=32_000, width=width, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_heads,
        head_dim=128, ff_width=4 * width, mlp='gelu', positions='relative', max_positions=2048,
        tied_embedding=True, dtype='bfloat16', attention_block=None)
    return cls(**(fields | changes))

  @classmethod
  def chinchilla_70b(cls, **changes) -> 'DecoderConfig':
    """The target of Chen et al. (2023)."""
    return cls.chinchilla(8192, 64, 80, **changes)

  @classmethod
  def chinchilla_4b(cls, **changes) -> 'DecoderConfig':
    """The draft of Chen et al. (2023): wide and shallow, for few all-reduces."""
    return cls.chinchilla(6144, 48, 8, **changes)

  @classmethod
  def smollm2_135m(cls, **changes) -> 'DecoderConfig':
    fields = dict(
        vocab_size=49_152, width=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, ff_width=1536,
        rope_theta=100_000.0, max_positions=8192, tied_embedding=True)
    return cls(**(fields | changes))

  @classmethod
  def llama2_7b(cls, **changes) -> 'DecoderConfig':
    fields = dict(
        vocab_size=32_000, width=4096, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128, ff_width=11_008,
        max_positions=4096, dtype='bfloat16')
    return cls(**(fields | changes))

  @classmethod
  def llama2_70b(cls, **changes) -> 'DecoderConfig':
    fields = dict(
        vocab_size=32_000, width=8192, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, ff_width=28_672,
        max_positions=4096, dtype='bfloat16')
    return cls(**(fields | changes))

  @classmethod
  def llama3_8b(cls, **changes) -> 'DecoderConfig':
    """Llama 3.1, with its rope scaling."""
    fields = dict(
        vocab_size=128_256, width=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, ff_width=14_336,
        rope_theta=500_000.0, rope_scaling=RopeScaling('llama3', 8.0, 8192), max_positions=131_072,
        dtype='bfloat16')
    return cls(**(fields | changes))

  @classmethod
  def mistral_7b(cls, **changes) -> 'DecoderConfig':
    """Mistral 7B v0.1, with its sliding window."""
    fields = dict(
        vocab_size=32_000, width=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, ff_width=14_336,
        max_positions=32_768, windows=(4096,) * 32, dtype='bfloat16')
    return cls(**(fields | changes))

  @classmethod
  def tiny(cls, **changes) -> 'DecoderConfig':
    """The toy of tests and `configs/tiny.py`: 13 tokens, two layers, grouped queries."""
    fields = dict(
        vocab_size=13, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ff_width=64,
        max_positions=512)
    return cls(**(fields | changes))


@dataclasses.dataclass(frozen=True)
class EncDecConfig:
  """An encoder-decoder: T5 (Raffel et al., 2020), v1.1 and Flan-T5.

  Attributes:
    vocab_size: rows of the embedding, padding rows included.
    width: D, size of the residual stream.
    num_layers, num_encoder_layers: of the decoder, which is what a decoding step runs, and of the encoder.
    num_heads: N; each has a key and value head of its own.
    head_dim: H, whatever D / N is.
    ff_width: F.
    mlp: 'relu' (v1.0) or 'geglu' (v1.1).
    num_buckets, max_distance: of the scores by distance (`models.distance_bias`).
    norm_eps: of RMSNorm.
    tied_embedding: whether the LM head is the transposed embedding.
    scaled_output: whether vectors are divided by sqrt(D) before the LM head (v1.0).
    start_token: id with which every decoded text begins.
    taps: none; heads that read layers are for decoders alone.
    dtype, attention_block, split: see `DecoderConfig`.
  """

  vocab_size: int
  width: int
  num_layers: int
  num_encoder_layers: int
  num_heads: int
  head_dim: int
  ff_width: int
  mlp: str = 'geglu'
  num_buckets: int = 32
  max_distance: int = 128
  norm_eps: float = 1e-6
  tied_embedding: bool = False
  scaled_output: bool = False
  start_token: int = 0
  taps: tuple[int, ...] = ()
  dtype: str = 'float32'
  attention_block: int | None = 256
  split: bool = True

  def __post_init__(self):
    for name in ('vocab_size', 'width', 'num_layers', 'num_encoder_layers', 'num_heads', 'head_dim', 'ff_width'):
      if getattr(self, name) < 1:
        raise InputError(f'{name}={getattr(self, name)} must be positive')
    if self.mlp not in ('relu', 'geglu'):
      raise InputError(f"mlp={self.mlp!r} is not supported: use 'relu' or 'geglu'")
    if self.num_buckets < 4 or self.num_buckets % 4:
      raise InputError(f'num_buckets={self.num_buckets} must be a multiple of 4: two sides, near and far')
    if self.max_distance <= self.num_buckets // 2:
      raise InputError(f'max_distance={self.max_distance} must be larger than num_buckets / 2, {self.num_buckets // 2}')
    if not 0 <= self.start_token < self.vocab_size:
      raise InputError(f'start_token={self.start_token} must lie in 0..{self.vocab_size - 1}, the ids of the model')
    if self.taps:
      raise InputError(f'taps={self.taps}: a head that reads layers of the target needs a decoder without an encoder')

  @property
  def max_positions(self) -> int:
    return 1 << 30  # all distances from `max_distance` on are alike

  @property
  def num_kv_heads(self) -> int:
    return self.num_heads

  @property
  def group_size(self) -> int:
    return 1

  @classmethod
  def t5_v1_1(cls, width: int, ff_width: int, num_layers: int, num_heads: int, **changes) -> 'EncDecConfig':
    fields = dict(
        vocab_size=32_128, width=width, num_layers=num_layers, num_encoder_layers=num_layers, num_heads=num_heads,
        head_dim=64, ff_width=ff_width, dtype='bfloat16', attention_block=None)
    return cls(**(fields | changes))

  @classmethod
  def t5_small(cls, **changes) -> 'EncDecConfig':
    """77M, a draft of Leviathan et al. (2023)."""
    return cls.t5_v1_1(512, 1024, 8, 6, **changes)

  @classmethod
  def t5_base(cls, **changes) -> 'EncDecConfig':
    """250M, a draft of Leviathan et al. (2023)."""
    return cls.t5_v1_1(768, 2048, 12, 12, **changes)

  @classmethod
  def t5_large(cls, **changes) -> 'EncDecConfig':
    """800M, a draft of Leviathan et al. (2023)."""
    return cls.t5_v1_1(1024, 2816, 24, 16, **changes)

  @classmethod
  def t5_xxl(cls, **changes) -> 'EncDecConfig':
    """11B, the target of Leviathan et al. (2023)."""
    return cls.t5_v1_1(4096, 10_240, 24, 64, **changes)

  @classmethod
  def tiny(cls, **changes) -> 'EncDecConfig':
    """The toy of tests: 13 tokens, two layers on either side."""
    fields = dict(
        vocab_size=13, width=32, num_layers=2, num_encoder_layers=2, num_heads=4, head_dim=12, ff_width=64,
        num_buckets=8, max_distance=20)
    return cls(**(fields | changes))


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
  """Heads on the target's last vector (Cai et al., 2024, Medusa): head k guesses the token k places past the next.

  Attributes:
    num_heads: K.
    num_layers: residual blocks of each head.
    width, vocab_size: the target's D and V.
    own_head: whether each head has an LM head of its own; else all share the target's.
    dtype: of the weights and of what they work on.
    draft_vocab: U, so many of the target's tokens can be guessed, by the target's LM head; None is all V.
  """

  num_heads: int
  width: int
  vocab_size: int
  num_layers: int = 1
  own_head: bool = True
  dtype: str = 'float32'
  draft_vocab: int | None = None

  def __post_init__(self):
    for name in ('num_heads', 'width', 'vocab_size', 'num_layers'):
      if getattr(self, name) < 1:
        raise InputError(f'{name}={getattr(self, name)} must be positive')
    if self.draft_vocab is not None and (self.own_head or not 1 <= self.draft_vocab <= self.vocab_size):
      raise InputError(f'draft_vocab={self.draft_vocab} must lie in 1..{self.vocab_size}, the tokens of the target, '
                       'and is for heads that borrow its LM head')


@dataclasses.dataclass(frozen=True)
class EagleConfig:
  """A head that guesses the target's next feature vector from the last ones and the tokens after them (Li et al., 2024
  and 2025, EAGLE).

  Attributes:
    decoder: of the one layer; its `vocab_size` is the target's.
    version: 1 for EAGLE-1 and -2: features are the vectors before the target's LM head, which is borrowed; 3 for
      EAGLE-3: features are the outputs of several layers, and the LM head is the head's own.
    draft_vocab: U, so many of the target's tokens can be drafted (Zhao et al., 2025, FR-Spec); None is all V.
    fc_bias: whether the projection to the layer's width has a bias.
    target_width: of the target's vectors; 0 is the layer's width.
    num_taps: layers of the target that version 3 reads.
    own_embedding: whether tokens are embedded by the head's own table; else by the target's.
  """

  decoder: DecoderConfig
  version: int = 1
  draft_vocab: int | None = None
  fc_bias: bool = False
  target_width: int = 0
  num_taps: int = 3
  own_embedding: bool = False

  def __post_init__(self):
    if self.version not in (1, 3):
      raise InputError(f'version={self.version} of EAGLE is unknown: use 1 (for EAGLE-1 and EAGLE-2) or 3')
    if self.decoder.num_layers != 1 or self.decoder.positions != 'rope':
      raise InputError(f'an EAGLE head is one layer with rotary positions, not {self.decoder.num_layers} with '
                       f'{self.decoder.positions} positions')
    if self.draft_vocab is not None and not 1 <= self.draft_vocab <= self.decoder.vocab_size:
      raise InputError(f'draft_vocab={self.draft_vocab} must lie in 1..{self.decoder.vocab_size}, the tokens of the '
                       'target')
    if self.version == 1 and self.features != self.decoder.width:
      raise InputError(f'target_width={self.target_width}: an EAGLE-1 head is as wide as the target, and this one is '
                       f'{self.decoder.width} wide')
    if self.num_taps < 1:
      raise InputError(f'num_taps={self.num_taps} must be positive')

  @property
  def features(self) -> int:
    """Width of a feature as the target gives it."""
    return (self.target_width or self.decoder.width) * (self.num_taps if self.version == 3 else 1)

  @property
  def vocab(self) -> int:
    """U, the tokens that can be drafted."""
    return self.draft_vocab or self.decoder.vocab_size

  @staticmethod
  def published_taps(num_layers: int) -> tuple[int, int, int]:
    """The layers whose outputs published EAGLE-3 heads read, in a target of `num_layers`: low, middle, high."""
    return 1, num_layers // 2 - 1, num_layers - 4
