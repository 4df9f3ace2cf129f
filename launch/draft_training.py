"""Training of a draft on a corpus of the target's answers, from a config: Medusa heads, an EAGLE head, a small model.

Sections besides `train` and `mesh`: `target` (as of a command that decodes), `draft` (what is trained), `loss` (the
fields of the objective), `data` (`corpus`, a directory that `experiments.make_corpus` wrote, `row_tokens`, and `learn`:
the answers, or all of a text) and, where the target is trained too, `backbone` (how). Such a target lies in
model/target, a checkpoint of ours. One process trains, on the devices of its host.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from pathlib import Path
import shutil
import sys
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import optax

from launch import distributed
from launch.build import build_model, check_layers, given_by
from launch.convert import copy_tokenizer
from launch.corpus import Text, check_ids, check_made_by, frequent_tokens, read_texts, rows, whole
from launch.evaluation_texts import check_clean
from launch.recipe import Recipe, train_config
from models.config import EagleConfig, MedusaConfig
from models.decoder import Decoder
from models.eagle import EagleHead
from models.errors import InputError
from models.heads import MedusaHeads
from models.loading import embedded_model, orbax
from models.loading.eagle import save_eagle
from models.loading.load import float_dtype
from models.loading.medusa import save_medusa
from models.loading.reduced import head_rows, is_reduced, load_reduced, save_reduced
from models.sequence import stack, unstack
from models.sharding import put_whole, shardings
from specdec.training.acceptance import measured_ranks, simulated_tokens_per_pass
from specdec.training.config import TrainConfig
from specdec.training.distill import DistillObjective
from specdec.training.eagle import EagleObjective, read_only
from specdec.training.frozen import Frozen, split
from specdec.training.held_out import HeldOut
from specdec.training.kept_vectors import with_vectors
from specdec.training.lora import new_adapter
from specdec.training.medusa import BACKBONE, HEADS, JointObjective, MedusaObjective, learning_rates
from specdec.training.optimizer import adamw, clip
from specdec.training.rows import Row
from specdec.training.schedule import learning_rate
from specdec.training.step import cast
from specdec.tree import TreeSpec

STREAM = 30.0  # size of the residual stream before the last layer: 24 to 35 in SmolLM2-135M
# Of token, feature and what the layer adds, at the start. After 30 steps 22 % of first guesses are right, 14 % of a
# head that begins with random weights, 17 % of one that begins with the whole of each.
BEGIN = (0.2, 0.15, 0.3)
MARK = 'config.json'  # a directory of a draft that has it is finished
TARGET = 'target'  # in it, where the target was trained too


@dataclasses.dataclass(frozen=True)
class Trained:
  """What one kind of draft brings to a recipe.

  Attributes:
    objective, trainable, frozen: of the `Trainer`.
    levels: guesses in a row.
    save: trained parameters and directory.
    optimizer: from the schedule.
    changed: the target that was trained too, from the trained parameters.
  """

  objective: Any
  trainable: Any
  frozen: Frozen
  levels: int
  save: Callable[[Any, Path], None]
  optimizer: Callable[[TrainConfig], optax.GradientTransformation] = adamw
  changed: Callable[[Any], Decoder] | None = None


def recipe(make: Callable[[ConfigDict, Decoder, int, np.ndarray | None], Trained], config: ConfigDict) -> Recipe:
  """All of a run that trains a draft.

  Args:
    make: from config, target, number of real tokens and draft vocabulary to what is trained; one of `MAKERS`.
    config: see above.

  Raises:
    InputError: one line about the field at fault.
  """
  schedule, row_tokens = train_config(config.train), config.data.row_tokens
  _check(config)
  texts = read_texts(config.data.corpus)
  target, tokenizer = build_model(config.target, 0, taps=tuple(config.draft.get('taps', ())))
  if not isinstance(target, Decoder):
    raise InputError(f'target.source={config.target.source!r} has an encoder, and drafts are trained for decoders: '
                     'name one')
  check_ids(config.data.corpus, texts, tokenizer.num_tokens)
  check_clean((text.id, tokenizer.decode(text.tokens)) for text in texts)
  training, held_out = ([text for text in texts if text.held_out is part] for part in (False, True))
  kept_whole = whole(held_out, row_tokens)
  if not training or not kept_whole:
    raise InputError(f'{config.data.corpus}: {len(training)} texts to train on and {len(kept_whole)} held out that fit '
                     f'into data.row_tokens={row_tokens} are too few: make a larger corpus, or raise data.row_tokens')
  ids_U = None
  if config.draft.vocab:
    ids_U = frequent_tokens(training, config.draft.vocab, tokenizer.num_tokens)
  trained = make(config, target, tokenizer.num_tokens, ids_U)
  packed, kept_back = rows(training, row_tokens, config.data.learn), rows(kept_whole, row_tokens)
  _say(training, held_out, packed, ids_U, row_tokens)
  if config.data.keep_vectors:
    if target.config.taps:
      raise InputError('data.keep_vectors: of a head that reads taps the vectors are not kept; set it to False')
    keep = functools.partial(with_vectors, target, tokenizer.num_tokens, batch=schedule.batch)
    packed, kept_back = (keep(some, f'{config.data.corpus}/vectors_{name}_{row_tokens}')
                         for name, some in (('training', packed), ('held_out', kept_back)))
  return Recipe(
      objective=trained.objective, optimizer=trained.optimizer(schedule), trainable=trained.trainable,
      frozen=trained.frozen, rows=packed, config=schedule, evaluate=evaluation(trained, kept_back, schedule),
      save=functools.partial(_save, trained, str(config.target.source)))


def _check(config: ConfigDict) -> None:
  """What can be said before anything large is read."""
  if distributed.joined():
    raise InputError('drafts are trained in one process, on all devices of its host: start launch.train on one host')
  for name, value, least in (('data.row_tokens', config.data.row_tokens, 2),
                             ('draft.levels', config.draft.get('levels', 1), 1)):
    if value < least:
      raise InputError(f'{name}={value} must be {least} or more')
  float_dtype(config.draft.dtype)  # of the file, which is written at the end
  check_made_by(config.data.corpus, str(config.target.source))


def evaluation(trained: Trained, held_out: Sequence[Row], schedule: TrainConfig) -> Callable[[Any], dict[str, float]]:
  """Losses on held-out rows, and the tokens per pass that a chain of the draft's guesses would give there."""
  batch = min(schedule.batch, len(held_out))
  losses = HeldOut(trained.objective, trained.frozen, held_out, batch, schedule.dtype)
  ranks = measured_ranks(trained.objective, trained.frozen, held_out, batch, trained.levels)

  def evaluate(trainable: Any) -> dict[str, float]:
    chain = TreeSpec.chain(trained.levels)
    return losses(trainable) | {'held_out_tokens_per_pass': simulated_tokens_per_pass(chain, ranks(trainable))}

  return evaluate


def _say(training: Sequence[Text], held_out: Sequence[Text], packed: Sequence[Row], ids_U: np.ndarray | None,
         row_tokens: int) -> None:
  answered = sum(len(text.tokens) - text.prompt_length for text in training)
  known = ''
  if ids_U is not None:
    said = np.concatenate([text.tokens[text.prompt_length:] for text in held_out])
    known = f'; {len(ids_U):,} tokens can be drafted, {np.isin(said, ids_U).mean():.1%} of held-out ones'
  cut, left_out = (len(some) - len(whole(some, row_tokens)) for some in (training, held_out))
  print(f'{len(training):,} texts in {len(packed):,} rows, {answered:,} answered tokens; {len(held_out):,} texts held '
        f'out{known}; longer than data.row_tokens={row_tokens}: {cut:,} texts, trained on without their beginning, and '
        f'{left_out:,} held out, left out', file=sys.stderr, flush=True)


def _save(trained: Trained, source: str, parameters: Any, directory: Path) -> None:
  """A directory that is there is finished."""
  unfinished = directory.with_name(f'{directory.name}.part')
  shutil.rmtree(unfinished, ignore_errors=True)
  if trained.changed is not None:
    _save_target(trained.changed(parameters), source, unfinished / TARGET)
  trained.save(parameters, unfinished)
  unfinished.rename(directory)


def _save_target(target: Decoder, source: str, directory: Path) -> None:
  """With the tokenizer of the target that it was."""
  orbax.prepare(directory)
  copy_tokenizer(embedded_model() if source == 'embedded' else Path(source), directory / orbax.TOKENIZER)
  orbax.save_decoder(directory, target)


# What is trained


def medusa(config: ConfigDict, target: Decoder, num_tokens: int, ids_U: np.ndarray | None,
           made_for: str | None = None) -> Trained:
  """Heads that borrow the target's LM head; their files name the target, or what else they are made for."""
  section, made_for = config.draft, made_for or str(config.target.source)
  with given_by('draft'):
    shape = MedusaConfig(section.num_heads, target.config.width, target.vocab_size, section.num_layers, False,
                         config.train.dtype, None if ids_U is None else len(ids_U))
  heads = _placed(_with_ids(MedusaHeads(shape, nnx.Rngs(config.train.seed)), ids_U))
  graph, trainable, rest = _parts(heads, config.train.dtype)
  objective = _objective(MedusaObjective, config, graph, num_tokens)
  save = lambda parameters, directory: save_medusa(
      cast(nnx.merge(graph, parameters, rest), section.dtype), directory, made_for)
  return Trained(objective, trainable, Frozen(target, rest), section.num_heads, save)


def medusa2(config: ConfigDict, target: Decoder, num_tokens: int, ids_U: np.ndarray | None) -> Trained:
  """Heads, and the target that they borrow the LM head of: its weights, or an adapter that is merged at the end."""
  _check_backbone(config)
  section, alone, base = config.backbone, medusa(config, target, num_tokens, ids_U, TARGET), stack(target)
  adapter, save_heads = section.get('adapter'), alone.save
  with given_by('backbone'):
    objective = JointObjective(
        alone.objective, adapter and adapter.alpha / adapter.rank, section.labels, section.weight,
        config.train.steps if section.ramp else 0, section.remat)
  if config.data.keep_vectors and not objective.reads_law:
    raise InputError("data.keep_vectors: nothing is learnt from the target's vectors here; set it to False")
  part = jax.tree.map(jnp.copy, cast(base, 'float32'))
  if adapter:
    part = new_adapter(base, adapter.rank, jax.random.key(config.train.seed))
  frozen = Frozen(base if adapter or objective.reads_law else None, alone.frozen.rest)
  return Trained(
      objective, {HEADS: alone.trainable, BACKBONE: part}, frozen, alone.levels,
      save=lambda parameters, directory: save_heads(parameters[HEADS], directory),
      optimizer=lambda schedule: optax.chain(clip(schedule), learning_rates(
          learning_rate(schedule), section.heads_rate,
          functools.partial(adamw, dataclasses.replace(schedule, clip_norm=0.0)), section.heads_first,
          schedule.warmup_steps)),
      changed=lambda parameters: cast(unstack(objective.target(parameters[BACKBONE], frozen)), section.dtype))


def _check_backbone(config: ConfigDict) -> None:
  if 'backbone' not in config:
    raise InputError("train.objective='medusa2' reads the section backbone: see configs/train_medusa.py:medusa2")
  section, source = config.backbone, str(config.target.source)
  if source.startswith('random:'):
    raise InputError(f'target.source={source!r} has no tokenizer to go with the changed target: name a model on disk')
  positive = ['weight', 'heads_rate'] + ['adapter.rank', 'adapter.alpha'] * ('adapter' in section)
  for name in positive:
    if not 0 < section[name] < float('inf'):
      raise InputError(f'backbone.{name}={section[name]} must be positive')
  if not 0 <= section.heads_first <= config.train.steps:
    raise InputError(f'backbone.heads_first={section.heads_first} must lie in 0..train.steps={config.train.steps}')
  float_dtype(section.dtype)


def eagle(config: ConfigDict, target: Decoder, num_tokens: int, ids_U: np.ndarray | None) -> Trained:
  """A head whose layer begins as the target's last one; its projection lets the feature through, and the token."""
  section, taps = config.draft, tuple(config.draft.taps)
  if (section.version == 3) != bool(taps) or not all(0 <= tap < target.config.num_layers for tap in taps):
    raise InputError(f'draft.version={section.version} and draft.taps={taps}: a head of version 3 reads some of the '
                     f"target's layers 0..{target.config.num_layers - 1}, others read none")
  layer = dataclasses.replace(target.config, num_layers=1, windows=(), taps=(), tied_embedding=False,
                              dtype=config.train.dtype)
  with given_by('draft'):
    shape = EagleConfig(layer, section.version, None if ids_U is None else len(ids_U), fc_bias=section.version == 1,
                        num_taps=max(1, len(taps)))
  head = cast(_with_ids(EagleHead(shape, nnx.Rngs(config.train.seed)), ids_U), 'float32')
  if section.version == 1:
    begin_as_last_layer(head, target)
    head.fc[...] = read_only(head.fc[...], config.loss.get('inputs', 'both'))
  graph, trainable, rest = _parts(_placed(head), config.train.dtype)
  objective = _objective(EagleObjective, config, graph, num_tokens)
  if objective.steps > 1 and objective.unroll_from >= config.train.steps:
    raise InputError(f'loss.unroll_from={objective.unroll_from}, and train.steps={config.train.steps}: the head would '
                     f'never read its own guesses; lower it, to {config.train.steps * 7 // 10} say')
  if section.version == 3 and objective.feature_weight:
    raise InputError('loss.feature_weight must be 0 for a head of version 3, which has no feature to be like')
  if section.version == 3 and objective.inputs != 'both':
    raise InputError("loss.inputs must be 'both' for a head of version 3, which projects features alone")
  save = lambda parameters, directory: save_eagle(
      cast(nnx.merge(graph, parameters, rest), section.dtype), directory, taps)
  return Trained(objective, trainable, Frozen(target, rest), section.levels, save)


def begin_as_last_layer(head: EagleHead, target: Decoder) -> None:
  """The target's last layer, in the measure of features: those are normed, and its residual stream is not.

  A feature is about `final_norm` times a vector of size 1; what attention and MLP add to the stream is brought down by
  the stream's size to that. The token's embedding is brought up to the feature's. All in part only (`BEGIN`).
  """
  last, mine, width = jax.tree.map(jnp.copy, target.layers[-1]), head.layer, target.config.width
  token, feature, added = BEGIN
  size = jnp.sqrt(jnp.mean(jnp.square(target.final_norm[...])))
  embedding = jnp.sqrt(jnp.mean(jnp.square(target.embed[...])))
  mine.attn.qkv[...] = last.attn.qkv[...] * last.attn_norm[...] / size
  mine.attn.out[...] = last.attn.out[...] * (added * size / STREAM)
  mine.mlp.up[...], mine.mlp_norm[...] = last.mlp.up[...], last.mlp_norm[...]
  mine.mlp.down[...] = last.mlp.down[...] * (added * size / STREAM)
  head.fc[...] = jnp.concatenate([jnp.eye(width) * (token * size / embedding), jnp.eye(width) * feature], axis=1)


def draft(config: ConfigDict, target: Decoder, num_tokens: int, ids_U: np.ndarray | None) -> Trained:
  """A model of a few layers, cut from the target, with the target's embedding and, if not trained, its LM head."""
  section = config.draft
  check_layers(section.num_layers, target.config.num_layers, 'draft')
  cut = target.first_layers(section.num_layers)
  known = np.arange(num_tokens, dtype=np.int32) if ids_U is None else ids_U
  model = jax.tree.map(jnp.copy, cut.with_head(head_rows(target, known)))
  borrowed = ('embed', 'head') if section.borrows_head else ('embed',)
  trained = lambda path, _: path[0] not in borrowed
  if section.start:
    _begin_as(model, _trained_before(section, target, known), borrowed)
  graph, trainable, rest = _parts(model, config.train.dtype, trained)
  objective = _objective(DistillObjective, config, graph, num_tokens, section.levels)
  save = lambda parameters, directory: save_reduced(
      cast(nnx.merge(graph, parameters, rest), section.dtype), known, directory, section.borrows_head)
  return Trained(objective, trainable, Frozen(target, rest, put_whole(known)), section.levels, save)


def _trained_before(section: ConfigDict, target: Decoder, known: np.ndarray) -> Decoder:
  if not is_reduced(section.start):
    raise InputError(f'draft.start={section.start!r} holds no draft that launch.train trained: name its model/, or '
                     'leave it empty')
  mesh = jax.sharding.get_mesh()
  before, ids_U = load_reduced(section.start, target, target.config.dtype, None if mesh.empty else mesh,
                               attention_block=None)
  if before.config.num_layers != section.num_layers or not np.array_equal(ids_U, known):
    raise InputError(f'draft.start={section.start!r} has {before.config.num_layers} layers and {len(ids_U)} tokens of '
                     'its corpus: give draft.num_layers, draft.vocab and data.corpus that it was trained with')
  return before


def _begin_as(model: Decoder, before: Decoder, borrowed: tuple[str, ...]) -> None:
  """Takes over all but what is the target's."""
  state = nnx.to_flat_state(nnx.state(before, nnx.Param))
  nnx.update(model, nnx.from_flat_state([(path, leaf) for path, leaf in state if path[0] not in borrowed]))


MAKERS = {'medusa': medusa, 'medusa2': medusa2, 'eagle': eagle, 'distill': draft}  # by train.objective


def _objective(make: Callable[..., Any], config: ConfigDict, *arguments: Any) -> Any:
  with given_by('loss'):
    return make(*arguments, **config.loss)


def _parts(module: nnx.Module, dtype: str, *trained: Any) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
  """`split`, with masters in float32 and the rest in what a pass computes in."""
  graph, trainable, rest = split(module, *trained)
  return graph, cast(trainable, 'float32'), cast(rest, dtype)


def _with_ids(heads: EagleHead | MedusaHeads, ids_U: np.ndarray | None) -> EagleHead | MedusaHeads:
  if ids_U is not None:
    heads.draft_ids[...] = jnp.asarray(ids_U)
  return heads


def _placed(heads: EagleHead | MedusaHeads) -> EagleHead | MedusaHeads:
  """Each array where it belongs on the mesh."""
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return heads
  graph, state = nnx.split(heads)
  return nnx.merge(graph, jax.device_put(state, shardings(state, mesh)))
