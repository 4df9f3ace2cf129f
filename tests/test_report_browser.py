"""The report page in a real browser: headless Chromium, through playwright (pip install -e '.[browser]').

The browser is the system's, or the one that `playwright install chromium` fetched; where there is none, all is skipped.
"""

import pathlib
import shutil

import pytest

from experiments.report.inputs import runs_of, verdicts_of
from experiments.report.page import render
from tests.test_report import HOSTILE, RESULTS, trace

sync_api = pytest.importorskip('playwright.sync_api', reason="no playwright: pip install -e '.[browser]'")

NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')
TEXT_CONTRAST = 4.5  # WCAG 2, level AA
SIZES = {'wide': (1280, 900), 'phone': (360, 740)}

# Each text that is shown, with the contrast of its colour to what lies behind it.
CONTRASTS = '''() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((x) => x / 255)
      .map((x) => (x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4))
      .reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > .99) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.body.querySelectorAll('*')) {
    const own = Array.from(element.childNodes).some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || ['SCRIPT', 'STYLE', 'title'].includes(element.tagName) || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const [one, other] = [light(parse(element.ownerSVGElement ? style.fill : style.color)), light(behind(element))];
    found.push([(Math.max(one, other) + .05) / (Math.min(one, other) + .05), element.textContent.slice(0, 40)]);
  }
  return found;
}'''


@pytest.fixture(scope='module')
def browser():
  path = next(filter(None, map(shutil.which, NAMES)), None)
  with sync_api.sync_playwright() as playwright:
    path = path or playwright.chromium.executable_path
    if not pathlib.Path(path).exists():
      pytest.skip('no Chromium: install the package chromium, or run playwright install chromium')
    started = playwright.chromium.launch(executable_path=path, args=['--no-sandbox', '--disable-gpu'], timeout=120_000)
    yield started
    started.close()


@pytest.fixture(scope='module')
def page_file(tmp_path_factory) -> pathlib.Path:
  names = ('reproduce_cpu.jsonl', 'sweep_batch.jsonl', 'plan_trees.jsonl')
  runs = [run for name in names for run in runs_of(str(RESULTS / name))]
  path = tmp_path_factory.mktemp('page') / 'report.html'
  path.write_text(render('A report', runs, verdicts_of(str(RESULTS / 'exactness_tiny.json')), [
      trace('def', ' f(x):\n  ', *HOSTILE), trace('another', ' token')]))
  return path


class Opened:
  """A page with what it asked for and complained about."""

  def __init__(self, browser, path: pathlib.Path, size: str, theme: str = 'light', script: bool = True):
    width, height = SIZES[size]
    self.page = browser.new_page(viewport={'width': width, 'height': height}, color_scheme=theme,
                                 java_script_enabled=script, has_touch=size == 'phone')
    self.page.set_default_timeout(60_000)
    self.requests, self.errors = [], []
    self.page.on('request', lambda request: self.requests.append(request.url))
    self.page.on('console', lambda message: self.errors.append(message.text))
    self.page.on('pageerror', lambda error: self.errors.append(str(error)))
    self.page.goto(path.as_uri())

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.page.close()


@pytest.mark.parametrize('theme', ['light', 'dark'])
@pytest.mark.parametrize('size', SIZES)
def test_shown(browser, page_file, size, theme):
  """Loads nothing, complains of nothing, fits the width, and can be read in either theme; hostile text does nothing."""
  with Opened(browser, page_file, size, theme) as opened:
    page = opened.page
    assert opened.requests == [page_file.as_uri()] and opened.errors == []
    assert page.evaluate('document.documentElement.scrollWidth') <= SIZES[size][0]
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert page.evaluate('document.documentElement.scrollWidth') <= SIZES[size][0]
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 500
    assert [pair for pair in contrasts if pair[0] < TEXT_CONTRAST] == []
    clipped = page.evaluate('''() => Array.from(document.querySelectorAll('svg.chart')).flatMap((chart) => {
      const frame = chart.getBoundingClientRect();
      const outside = (box) => box.left < frame.left - 1 || box.right > frame.right + 1;
      return Array.from(chart.querySelectorAll('text')).filter((text) => outside(text.getBoundingClientRect()))
          .map((text) => text.textContent);
    })''')
    assert clipped == []


def test_themes_switch(browser, page_file):
  with Opened(browser, page_file, 'wide') as opened:
    page = opened.page
    colour = lambda: page.evaluate('getComputedStyle(document.body).backgroundColor')
    light = colour()
    page.click('#theme')
    dark = colour()
    assert dark != light and page.inner_text('#theme') == 'Light theme'
    page.click('#theme')
    assert colour() == light
    page.emulate_media(color_scheme='dark')
    assert colour() == light  # what was chosen stays


def test_tables_sort(browser, page_file):
  with Opened(browser, page_file, 'wide') as opened:
    page = opened.page
    column = lambda: page.evaluate('''() => Array.from(document.querySelector('#table-1').tBodies[0].rows)
        .map((row) => row.querySelector('.measured').dataset.value).map(Number)''')
    before = column()
    head = page.locator('#table-1 thead tr:last-child th.measured .sorter').first
    head.click()
    assert column() == sorted(before) != before
    head.focus()
    page.keyboard.press('Enter')
    assert column() == sorted(before, reverse=True)
    assert page.get_attribute('#table-1 thead tr:last-child th.measured', 'aria-sort') == 'descending'


def test_tokens_tell(browser, page_file):
  """By pointer, by keyboard and by tap, within the window."""
  for size in SIZES:
    with Opened(browser, page_file, size) as opened:
      page = opened.page
      token, tip = page.locator('button.token').first, page.locator('.tip').first
      token.scroll_into_view_if_needed()
      assert not tip.is_visible()
      token.tap() if size == 'phone' else token.hover()
      assert tip.is_visible() and 'target: probability 0.250, rank 2' in tip.inner_text()
      box = tip.bounding_box()
      assert box['x'] >= 0 and box['x'] + box['width'] <= SIZES[size][0]
      if size == 'wide':
        page.mouse.move(1, 1)
        token.focus()
        assert tip.is_visible()
        page.keyboard.press('Tab')
        assert not tip.is_visible() and page.locator('.tip').nth(1).is_visible()


def test_whole_without_scripts(browser, page_file):
  with Opened(browser, page_file, 'wide', theme='dark', script=False) as opened:
    page = opened.page
    assert not page.is_visible('#theme') and page.is_visible('#table-1') and page.is_visible('svg.chart')
    page.locator('button.token').first.hover()
    assert page.locator('.tip').first.is_visible()
    page.locator('summary', has_text='All fields').first.click()
    assert page.is_visible('#table-1-full')
