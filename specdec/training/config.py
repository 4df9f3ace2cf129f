"""How a model is trained, whatever is minimised."""

import dataclasses

from models.errors import InputError

DTYPES = ('float32', 'bfloat16')


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """Steps, batches, optimiser and what is written when.

  Attributes:
    steps: updates of the parameters.
    batch: rows per step.
    accumulate: micro-batches that a step's rows are cut into, one after the other: memory for time.
    learning_rate: the highest.
    warmup_steps: until it is reached, linearly.
    final_share: of the highest, at the last step, along a cosine (Hoffmann et al., 2022, section B: 10 %).
    beta1, beta2: of AdamW.
    weight_decay: of matrices and embeddings.
    clip_norm: of the gradient of all parameters together; 0 does not clip.
    seed: of the order of the rows, and of what an objective draws.
    log_every, eval_every, save_every: in steps; 0 for eval_every and save_every: at the end only.
    keep: finished checkpoints.
    dtype: that a pass computes in; parameters, gradients' sums and optimiser are float32 always.
  """

  steps: int
  batch: int
  learning_rate: float
  accumulate: int = 1
  warmup_steps: int = 0
  final_share: float = 0.1
  beta1: float = 0.9
  beta2: float = 0.95
  weight_decay: float = 0.1
  clip_norm: float = 1.0
  seed: int = 0
  log_every: int = 10
  eval_every: int = 0
  save_every: int = 0
  keep: int = 1
  dtype: str = 'float32'

  def __post_init__(self):
    for name in ('steps', 'batch', 'accumulate', 'log_every', 'keep'):
      self._need(name, getattr(self, name) >= 1, '1 or more')
    for name in ('warmup_steps', 'weight_decay', 'clip_norm', 'seed', 'eval_every', 'save_every'):
      self._need(name, getattr(self, name) >= 0, '0 or more')
    for name in ('beta1', 'beta2'):
      self._need(name, 0 <= getattr(self, name) < 1, 'in [0, 1)')
    self._need('learning_rate', 0 < self.learning_rate < float('inf'), 'positive')
    self._need('final_share', 0 <= self.final_share <= 1, 'in 0..1')
    self._need('warmup_steps', self.warmup_steps <= self.steps, f'at most train.steps={self.steps}')
    self._need('batch', self.batch % self.accumulate == 0, f'a multiple of train.accumulate={self.accumulate}')
    self._need('dtype', self.dtype in DTYPES, ' or '.join(DTYPES))

  def _need(self, name: str, holds: bool, what: str) -> None:
    if not holds:
      raise InputError(f'train.{name}={getattr(self, name)} must be {what}')
