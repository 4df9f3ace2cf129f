"""Charts as SVG without colours of their own: the page's style sheet knows the classes, so that both themes fit.

What was measured is filled, what was predicted dashed or a diamond, what was published a square. A mark tells its
figures when it is pointed at; the whole chart tells them to who cannot see it.
"""

from collections.abc import Sequence
import dataclasses
import math
from xml.etree import ElementTree

from markupsafe import Markup

from experiments.report.cells import figure, visible

WIDTH = 360  # of the view: what a telephone shows without shrinking
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 14, 40
PLOT_HEIGHT = 190
BAR, LINE_OF_BAR = 12, 34
TITLE_CHARACTERS = 52
LEAST, MOST = 1e-300, 1e300  # ends of scales
SERIES = 6  # colours of the style sheet, used again after the last


@dataclasses.dataclass(frozen=True)
class Bar:
  """One setting; what is None is not drawn.

  Attributes:
    label: above the bar.
    measured, predicted, published: on one scale.
    slower: drawn and said as such.
  """

  label: str
  measured: float | None
  predicted: float | None = None
  published: float | None = None
  slower: bool = False


@dataclasses.dataclass(frozen=True)
class Series:
  """One line.

  Attributes:
    label: in the legend; '' for the only line.
    kind: 'measured', 'predicted' or 'published'.
    points: (x, y), by growing x.
    place: which colour; lines of one setting share it.
    band: (x, low, high), around the line.
  """

  label: str
  kind: str
  points: Sequence[tuple[float, float]]
  place: int = 0
  band: Sequence[tuple[float, float, float]] = ()


def bars(title: str, scale: str, entries: Sequence[Bar], baseline: float | None = None) -> Markup:
  """Horizontal bars, each under its label.

  Args:
    title: of the figure.
    scale: what the bars are long in.
    entries: from the top.
    baseline: a dashed line at this value.
  """
  drawn = [value for bar in entries for value in (bar.measured, bar.predicted, bar.published) if value is not None]
  top = _top(drawn, baseline, 1.15)
  height = TOP + LINE_OF_BAR * len(entries) + BOTTOM
  at = lambda value: 8 + (WIDTH - 8 - RIGHT - 40) * min(max(value, 0.0), top) / top
  root = _root(title, '; '.join(map(_said, entries)), height)
  bottom = height - BOTTOM + 4
  for tick in _ticks(top):
    _line(root, at(tick), TOP, at(tick), bottom, 'grid')
    _text(root, at(tick), bottom + 14, f'{tick:,.10g}', 'tick', 'middle')
  if baseline is not None:
    _line(root, at(baseline), TOP, at(baseline), bottom, 'baseline')
  for place, bar in enumerate(entries):
    _bar(root, bar, TOP + LINE_OF_BAR * place, at)
  _text(root, (8 + at(top)) / 2, height - 6, scale, 'axis', 'middle')
  return _markup(root)


def _bar(root: ElementTree.Element, bar: Bar, y: float, at) -> None:
  group = ElementTree.SubElement(root, 'g')
  _tip(group, _said(bar))
  _text(group, 8, y + 11, bar.label, 'label')
  ends = [8.0]
  if bar.measured is not None:
    _shape(group, 'rect', x=8, y=y + 16, width=max(at(bar.measured) - 8, 1), height=BAR,
           **{'class': 'bar slower' if bar.slower else 'bar'})
    ends.append(at(bar.measured))
  if bar.predicted is not None:
    _diamond(group, at(bar.predicted), y + 16 + BAR / 2)
    ends.append(at(bar.predicted) + 5)
  if bar.published is not None:
    _square(group, at(bar.published), y + 16 + BAR / 2)
    ends.append(at(bar.published) + 5)
  shown = next((value for value in (bar.measured, bar.predicted, bar.published) if value is not None), None)
  if shown is not None:
    _text(group, max(ends) + 5, y + 16 + BAR - 2, figure(shown) + (' ▼' if bar.slower else ''), 'value')


def _said(bar: Bar) -> str:
  parts = [f'{kind} {figure(value)}' for kind in ('measured', 'predicted', 'published')
           if (value := getattr(bar, kind)) is not None]
  return f'{bar.label}: {", ".join(parts)}' + (', slower than plain' if bar.slower else '')


def lines(title: str, x_title: str, y_title: str, series: Sequence[Series], baseline: float | None = None,
          log_x: bool = False) -> Markup:
  """Lines from zero up; `log_x` puts powers of two at equal distances."""
  xs = sorted({x for one in series for x, _ in one.points})
  highs = [high for one in series for _, _, high in one.band] + [y for one in series for _, y in one.points]
  top = _top(highs, baseline, 1.08)
  warp = (lambda x: math.log2(x) if x > 0 else 0.0) if log_x else float
  low, high = warp(xs[0]), warp(xs[-1])
  x_at = lambda x: LEFT + (WIDTH - LEFT - RIGHT) * ((warp(x) - low) / (high - low) if high > low else 0.5)
  y_at = lambda y: TOP + PLOT_HEIGHT * (1 - min(max(y, 0.0), top) / top)
  root = _root(title, f'{y_title} by {x_title}. ' + '; '.join(map(_told, series)), TOP + PLOT_HEIGHT + BOTTOM)
  for tick in _ticks(top):
    _line(root, LEFT, y_at(tick), WIDTH - RIGHT, y_at(tick), 'grid')
    _text(root, LEFT - 5, y_at(tick) + 4, f'{tick:,.10g}', 'tick', 'end')
  for x in xs if len(xs) <= 9 else xs[::-(-len(xs) // 9)]:
    _text(root, x_at(x), TOP + PLOT_HEIGHT + 15, f'{x:g}', 'tick', 'middle')
  if baseline is not None:
    _line(root, LEFT, y_at(baseline), WIDTH - RIGHT, y_at(baseline), 'baseline')
  for one in series:
    _series(root, one, x_at, y_at)
  _text(root, (LEFT + WIDTH - RIGHT) / 2, TOP + PLOT_HEIGHT + 34, x_title, 'axis', 'middle')
  return _markup(root)


def _series(root: ElementTree.Element, one: Series, x_at, y_at) -> None:
  group = ElementTree.SubElement(root, 'g', {'class': f'{one.kind} colour-{one.place % SERIES}'})
  if one.band:
    upper = [(x, high) for x, _, high in one.band]
    lower = [(x, low) for x, low, _ in reversed(one.band)]
    _shape(group, 'polygon', points=_points([*upper, *lower], x_at, y_at), **{'class': 'band'})
  if one.kind != 'published':
    _shape(group, 'polyline', points=_points(one.points, x_at, y_at), **{'class': 'line'})
  for x, y in one.points:
    mark = ElementTree.SubElement(group, 'g')
    _tip(mark, f'{one.label or one.kind}, {x:g}: {figure(y)} ({one.kind})')
    if one.kind == 'measured':
      _shape(mark, 'circle', cx=x_at(x), cy=y_at(y), r=3.5, **{'class': 'dot'})
    else:
      (_diamond if one.kind == 'predicted' else _square)(mark, x_at(x), y_at(y))


def _told(one: Series) -> str:
  points = ', '.join(f'{x:g}: {figure(y)}' for x, y in one.points)
  return f'{one.label or "line"}, {one.kind}: {points}'


def _top(values: Sequence[float], baseline: float | None, margin: float) -> float:
  """Of the scale; not so far from 1 that a tick would overflow or vanish."""
  highest = max([*values, baseline or 0.0])
  return min(max(margin * highest, LEAST), MOST) if highest > 0 else 1.0


def _ticks(top: float) -> list[float]:
  """Round values from 0 to below `top`: 3 to 6 of them."""
  magnitude = 10 ** math.floor(math.log10(top))
  step = next(step for step in (0.2 * magnitude, 0.25 * magnitude, 0.5 * magnitude, magnitude, 2 * magnitude)
              if top / step <= 5.5)
  return [step * n for n in range(int(top / step) + 1)]


def _root(title: str, description: str, height: float) -> ElementTree.Element:
  return ElementTree.Element('svg', {
      'viewBox': f'0 0 {WIDTH} {height:g}', 'role': 'img', 'class': 'chart',
      'aria-label': visible(f'{title}. {description}')})


def _tip(parent: ElementTree.Element, text: str) -> None:
  ElementTree.SubElement(parent, 'title').text = visible(text)


def _line(root: ElementTree.Element, x1: float, y1: float, x2: float, y2: float, name: str) -> None:
  _shape(root, 'line', x1=x1, y1=y1, x2=x2, y2=y2, **{'class': name})


def _text(root: ElementTree.Element, x: float, y: float, text: str, name: str, anchor: str = 'start') -> None:
  made = _shape(root, 'text', x=x, y=y, **{'class': name, 'text-anchor': anchor})
  text = visible(text)
  made.text = text if len(text) <= TITLE_CHARACTERS else text[:TITLE_CHARACTERS - 1] + '…'


def _diamond(root: ElementTree.Element, x: float, y: float) -> None:
  corners = ((x, y - 5), (x + 5, y), (x, y + 5), (x - 5, y))
  _shape(root, 'polygon', points=' '.join(f'{a:.1f},{b:.1f}' for a, b in corners), **{'class': 'mark diamond'})


def _square(root: ElementTree.Element, x: float, y: float) -> None:
  _shape(root, 'rect', x=x - 4, y=y - 4, width=8, height=8, **{'class': 'mark square'})


def _shape(root: ElementTree.Element, name: str, **attributes: float | str) -> ElementTree.Element:
  return ElementTree.SubElement(root, name, {
      key: value if isinstance(value, str) else f'{value:.1f}' for key, value in attributes.items()})


def _points(points: Sequence[tuple[float, float]], x_at, y_at) -> str:
  return ' '.join(f'{x_at(x):.1f},{y_at(y):.1f}' for x, y in points)


def _markup(root: ElementTree.Element) -> Markup:
  return Markup(ElementTree.tostring(root, encoding='unicode'))
