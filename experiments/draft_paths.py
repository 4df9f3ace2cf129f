"""Drafters as lists of what they can draw, for the enumeration."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import itertools

import numpy as np

Text = tuple[int, ...]
Law = Callable[[Text], np.ndarray]  # of the token after a text


@dataclasses.dataclass(frozen=True)
class Path:
  """One outcome of a drafter's randomness.

  Attributes:
    tokens: the drafted ids, all that the rule gets to see.
    prob: of this outcome.
    laws: what the drafter reports its tokens were drawn from, one [V] each; None is a point mass.
  """

  tokens: Text
  prob: float
  laws: tuple[np.ndarray, ...] | None


Drafter = Callable[[Text, int], Iterator[Path]]  # the paths after a text, of at most so many tokens
Keep = Callable[[Text, Path], int]  # how many drafted tokens are handed to the rule


def sampled(law: Law, reported: Law | None = None) -> Drafter:
  """Tokens drawn one after the other from `law`; an honest drafter reports that same law."""
  reported = reported or law

  def paths(text: Text, count: int) -> Iterator[Path]:
    if count == 0:
      yield Path((), 1.0, ())
      return
    for token in np.flatnonzero(law(text)):
      for rest in paths((*text, int(token)), count - 1):
        yield Path((int(token), *rest.tokens), law(text)[token] * rest.prob, (reported(text), *rest.laws))

  return paths


def argmax(law: Law, reported: Law | None = None) -> Drafter:
  """The likeliest token each time: a point mass, unless it (wrongly) reports a law."""

  def paths(text: Text, count: int) -> Iterator[Path]:
    tokens, laws = (), ()
    for _ in range(count):
      laws += (reported(text + tokens),) if reported else ()
      tokens += (int(np.argmax(law(text + tokens))),)
    yield Path(tokens, 1.0, laws if reported else None)

  return paths


def copied(text: Text, count: int) -> Iterator[Path]:
  """What followed the first occurrence of the newest token; as many tokens as there are, maybe none."""
  start = text.index(text[-1]) + 1
  yield Path(text[start:start + count], 1.0, None)


def shortened(drafter: Drafter, keep: Keep) -> Drafter:
  """Drafts in full, then keeps the first `keep(text, path)` tokens."""

  def paths(text: Text, count: int) -> Iterator[Path]:
    for path in drafter(text, count):
      kept = keep(text, path)
      laws = None if path.laws is None else path.laws[:kept]
      yield dataclasses.replace(path, tokens=path.tokens[:kept], laws=laws)

  return paths


def by_length(text: Text, path: Path) -> int:
  """A count known before the draft: 0, 1, 2, ... in turn. Harmless."""
  return len(text) % (len(path.tokens) + 1)


def stop_after_unlikely(law: Law, threshold: float) -> Keep:
  """Keeps everything up to and including the first unlikely token. Harmless: the token itself stays and is tested."""

  def keep(text: Text, path: Path) -> int:
    unlikely = (i for i, prob in enumerate(_probs(law, text, path)) if prob < threshold)
    return next(unlikely, len(path.tokens) - 1) + 1

  return keep


def stop_before_flat(law: Law, entropy: float) -> Keep:
  """Drafts no token from a law of large entropy. Harmless: what was drawn stays."""

  def keep(text: Text, path: Path) -> int:
    flat = (i for i in range(len(path.tokens)) if _entropy(law(text + path.tokens[:i])) > entropy)
    return next(flat, len(path.tokens))

  return keep


def drop_unlikely(law: Law, threshold: float) -> Keep:
  """Drops the first unlikely token and all behind it. Biased, unless the tokens were not drawn at random."""
  return lambda text, path: sum(itertools.takewhile(bool, (p >= threshold for p in _probs(law, text, path))))


def drop_before_flat(law: Law, entropy: float) -> Keep:
  """Drops the first token behind which the law has a large entropy. Biased: that depends on the token."""

  def keep(text: Text, path: Path) -> int:
    flat = (i for i in range(len(path.tokens)) if _entropy(law(text + path.tokens[:i + 1])) > entropy)
    return next(flat, len(path.tokens))

  return keep


def _probs(law: Law, text: Text, path: Path) -> list[float]:
  return [law(text + path.tokens[:i])[token] for i, token in enumerate(path.tokens)]


def _entropy(law: np.ndarray) -> float:
  return float(-np.sum(law[law > 0] * np.log(law[law > 0])))


NoisyDrafter = Callable[[Text, Sequence[np.ndarray]], Text]  # drafted tokens, given the noise of their positions


def shared_noise(law: Law) -> NoisyDrafter:
  """Each token is the draft's own choice under the noise that the target will use."""

  def propose(text: Text, noises: Sequence[np.ndarray]) -> Text:
    tokens = ()
    for noise_V in noises:
      with np.errstate(divide='ignore'):
        tokens += (int(np.argmax(np.log(law(text + tokens)) + noise_V)),)
    return tokens

  return propose


def noiseless(drafter: Drafter) -> NoisyDrafter:
  """A drafter that draws nothing: lookup, argmax."""
  return lambda text, noises: next(drafter(text, len(noises))).tokens
