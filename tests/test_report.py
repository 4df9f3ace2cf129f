"""The report page, as text: what it says, where its figures stand, and that nothing in it can act."""

import html.parser
import json
import pathlib
import re
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from experiments.report.cells import cell, figure, visible
from experiments.report.figures import figures_of
from experiments.report.inputs import Run, runs_of, traces_of, verdicts_of
from experiments.report.page import render
from experiments.report.provenance import Group, group_of
from experiments.report.tables import full_table, labels, main_table
from launch import results
from models.errors import InputError

RESULTS = pathlib.Path(__file__).parents[1] / 'experiments' / 'results'
HOSTILE = ('</script><script>alert(1)</script>', '<img src=x onerror=alert(1)>', '"><svg onload=alert(1)>',
           "' autofocus onfocus=alert(1) '", '{{ 7 * 7 }}', '\x00\ud800\u202e\x1b[31m', 'javascript:alert(1)', ']]>')
ROW = {'task': 'news', 'drafter': 'lookup', 'gamma': 7, 'speedup': 0.5, 'predicted_speedup': 0.6, 'ms_per_token': 20.0,
       'published_speedup': 2.0, 'backend': 'cpu'}
LOADING = {'img', 'link', 'iframe', 'object', 'embed', 'base', 'form', 'image', 'use', 'foreignobject', 'video'}
VERDICT = {'rung': 'equality', 'check': 'c', 'measured': 'm', 'value': 0.0, 'limit': '<= 0', 'passed': True, 'note': ''}


def token(text: str, origin: str = 'accepted') -> dict:
  return {'text': text, 'origin': origin, 'token_id': 1, 'target_prob': 0.25, 'target_rank': 2, 'draft_prob': 1.0,
          'draft_rank': None}


def trace(*texts: str) -> dict:
  return {'id': texts[0], 'prompt': texts[0], 'drafter': 'lookup', 'gamma': 7, 'steps': [{
      'drafted': 3, 'tokens': [*map(token, texts), token('end', 'corrected')], 'refused': [token(texts[0])],
      'unused': [token(texts[0])]}]}


class Outline(html.parser.HTMLParser):
  """Elements with their attributes, and the text outside of the style sheet and the script."""

  def __init__(self, page: str):
    super().__init__()
    self.elements: list[tuple[str, dict]] = []
    self.words: list[str] = []
    self._open: list[str] = []
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))
    if tag in ('style', 'script'):
      self._open.append(tag)

  def handle_endtag(self, tag):
    if self._open[-1:] == [tag]:
      self._open.pop()

  def handle_data(self, data):
    if not self._open:
      self.words.append(data)

  @property
  def text(self) -> str:
    return ''.join(self.words)


@pytest.fixture(scope='module')
def page() -> str:
  names = ('reproduce_cpu.jsonl', 'sweep_batch.jsonl', 'plan_chinchilla.jsonl', 'peers_cpu.jsonl', 'tree_cost.json')
  runs = [run for name in names for run in runs_of(str(RESULTS / name))]
  return render('A report', runs, verdicts_of(str(RESULTS / 'exactness_tiny.json')), [trace(' def', 'x\n  ')])


def assert_inert(page: str, what: object = '') -> None:
  """One style sheet, one script, no handler, nothing that is fetched from anywhere."""
  outline = Outline(page)
  tags = [tag for tag, _ in outline.elements]
  assert tags.count('script') == tags.count('style') == 1, what
  assert not LOADING & set(tags), what
  for tag, attributes in outline.elements:
    assert not [name for name in attributes if name.startswith('on') or name in ('src', 'srcdoc', 'style')], (tag, what)
    assert attributes.get('href', '#').startswith('#'), (tag, attributes)
  page.encode()  # no half of a character


def test_nothing_is_loaded(page):
  assert_inert(page)
  assert not re.findall(r'(?i)(https?:|//[a-z]|url\(|@import)', page.replace('http-equiv', ''))
  policy = next(attributes['content'] for tag, attributes in Outline(page).elements
                if attributes.get('http-equiv') == 'Content-Security-Policy')
  assert "default-src 'none'" in policy and 'unsafe' not in policy


@pytest.mark.parametrize('text', HOSTILE)
def test_hostile_text_is_only_text(text):
  row = ROW | {'task': text, 'drafter': text, text: text, 'target': text, 'commit': text, 'deep': {text: [text]}}
  verdict = VERDICT | {name: text for name in ('rung', 'check', 'measured', 'limit', 'note')}
  made = render(text, [Run(text, [row, row | {'gamma': 3, 'name': text}])], [verdict], [trace(text, text)])
  assert_inert(made, text)
  assert visible(text) in Outline(made).text and '\x00' not in made and '\u202e' not in made


def test_figures_stand_under_their_heads(page):
  """Measured, predicted and published never share a column."""
  table = main_table([ROW, ROW | {'gamma': 3}])
  assert [(name, span) for name, _, span in table.heads] == [
      ('setting', 1), ('measured', 2), ('predicted', 1), ('published', 1)]
  assert table.shared == [('task', 'news'), ('drafter', 'lookup')]
  for path in sorted(RESULTS.glob('*.jsonl')):
    for run in runs_of(str(path)):
      for column in full_table(run.rows).columns:
        prefix = column.key.partition('_')[0]
        assert (prefix == 'predicted') <= (column.group is Group.PREDICTED)
        assert (prefix == 'published') == (column.group is Group.PUBLISHED)
        assert not (column.group is Group.MEASURED and 'topology' in run.rows[0]), column
  assert 'published' in Outline(page).text


@pytest.mark.parametrize('key, row, group', [
    ('speedup', {'backend': 'cpu'}, Group.MEASURED), ('speedup', {}, Group.MEASURED),
    ('temp_mib', {'topology': 'v4-8'}, Group.COMPILED), ('tokens_per_pass', {'topology': 'v4-8'}, Group.SETTING),
    ('tokens_per_pass', {'backend': 'cpu'}, Group.MEASURED), ('anything', {}, Group.RECORDED),
    ('measured_ms_per_token', {'topology': 'v4-8'}, Group.MEASURED), ('most_batch', {'backend': 'cpu'}, Group.SETTING),
    ('engine.rows', {'backend': 'cpu'}, Group.SETTING)])
def test_groups(key, row, group):
  assert group_of(key, row) is group


def test_what_loses_time_is_said_in_words(page):
  """Fault 43: below 1 is marked, also for who sees no colour; plain decoding is in the table."""
  slow = render('x', [Run('run', [ROW, ROW | {'gamma': 3, 'speedup': 1.5}, ROW | {'drafter': 'none', 'gamma': 0}])])
  assert slow.count('▼ slower') == 1
  assert '1 of 2 settings is slower than plain' in slow
  rows = map(json.loads, (RESULTS / 'reproduce_cpu.jsonl').read_text().splitlines())
  speedups = [row['speedup'] for row in rows if row['gamma']]
  slower = sum(speedup < 1 for speedup in speedups)
  assert f'{slower} of {len(speedups)} settings are slower than plain' in page and '216 of 216 verdicts hold' in page


def test_failed_verdicts_are_open_and_counted():
  made = render('x', [], [VERDICT, VERDICT | {'passed': False, 'check': 'lost'}])
  assert '1 of 2 failed' in made and '<details class="more" open>' in made
  assert made.index('lost') < made.index('>c<')


def test_tables_and_charts_can_be_read_aloud(page):
  outline = Outline(page)
  of = lambda name: [attributes for tag, attributes in outline.elements if tag == name]
  assert len(of('caption')) == len(of('table')) > 8
  assert all('scope' in attributes for attributes in of('th'))
  assert {attributes['role'] for attributes in of('svg')} == {'img'}
  assert all(len(attributes['aria-label']) > 40 for attributes in of('svg'))
  ids = [attributes['id'] for _, attributes in outline.elements if 'id' in attributes]
  assert len(ids) == len(set(ids))
  targets = [attributes['aria-describedby'] for attributes in of('button') if 'aria-describedby' in attributes]
  assert len(targets) == 4 and set(targets) <= set(ids)


def test_trace_stands_in_order():
  words = Outline(render('x', [], [], [trace('one', ' two')])).text
  shown = re.findall(r'(?:∅|one| two|end)(?=drafted|corrected)', words)
  assert shown == ['one', ' two', 'one', 'end']  # the refused token before what came instead
  assert 'target: probability 0.250, rank 2' in words and 'draft: probability 1.00' in words


def test_charts_follow_what_was_swept():
  rows = [ROW | {'gamma': gamma, 'tokens_per_pass': 2.0, 'ms_per_round': 4.0} for gamma in (1, 2, 3)]
  plain = ROW | {'drafter': 'none', 'gamma': 0, 'speedup': 1.0}
  titles = [figure.title for figure in figures_of([plain, *rows])]
  assert titles == ['Speed-up', 'Time of 128 tokens, band: 10–90 %', 'Acceptance', 'Time of a step']
  assert ', 0: 1.00 (measured)' in figures_of([plain, *rows])[0].chart
  assert [figure.title for figure in figures_of(rows[:2])] == ['Speed-up: news']
  assert figures_of([{'planted': 'nothing'}]) == []


def test_a_plan_and_a_run_in_one_file():
  """A field that is chosen in one and measured in the other has a column of each."""
  plan = {'drafter': 'lookup', 'topology': 'v4-8', 'tokens_per_pass': 3.0, 'temp_mib': 7.0}
  bench = {'drafter': 'lookup', 'backend': 'cpu', 'tokens_per_pass': 2.0, 'temp_mib': 5.0}
  for rows in ([plan, bench], [bench, plan]):
    table = full_table(rows)
    for key, groups in (('tokens_per_pass', {Group.SETTING: 3.0, Group.MEASURED: 2.0}),
                        ('temp_mib', {Group.COMPILED: 7.0, Group.MEASURED: 5.0})):
      places = {column.group: place for place, column in enumerate(table.columns) if column.key == key}
      assert places.keys() == groups.keys()
      for group, place in places.items():
        assert sorted(cells[place].text for cells, _ in table.lines) == sorted(['–', cell(groups[group], key).text])


def test_the_plain_row_beside_a_line():
  """Of the same target, dtype and capacity, and the newest of several."""
  its = {'target': 'big', 'dtype': 'float32', 'capacity': 64}
  rows = [ROW | its | {'gamma': gamma} for gamma in (1, 2, 3)]
  plain = ROW | its | {'drafter': 'none', 'gamma': 0}
  others = [plain | {'speedup': 7.0, name: 'other'} for name in its]
  chart = figures_of([plain | {'speedup': 8.0}, plain | {'speedup': 1.0}, *others, *rows])[0].chart
  assert ', 0: 1.00 (measured)' in chart and '8.00' not in chart and '7.00' not in chart


def test_bars_that_are_left_out_are_said():
  rows = [{'name': f'setting {number}', 'speedup': 1.0} for number in range(30)]
  assert [figure.title for figure in figures_of(rows)] == [
      'Speed-up (the first 24 of 30 settings; all are in the table)']
  assert [figure.title for figure in figures_of(rows[:24])] == ['Speed-up']


@pytest.mark.parametrize('value', [5e-324, 1e-310, 1.7e308])
def test_charts_of_extreme_values(value):
  for rows in ([ROW | {'speedup': value}], [ROW | {'gamma': gamma, 'speedup': value} for gamma in (1, 2, 3)]):
    assert all('nan' not in figure.chart and 'inf"' not in figure.chart for figure in figures_of(rows))


def test_labels_tell_apart():
  assert labels([ROW, ROW | {'gamma': 3}, ROW | {'gamma': 3, 'batch': 8}]) == ['γ 7', 'γ 3', 'γ 3, batch 8']


@pytest.mark.parametrize('value, text', [
    (0.0, '0'), (1.5, '1.50'), (12.34, '12.3'), (1234.5, '1,234'), (2e-5, '2.0e-05'), (0.05, '0.050')])
def test_figure(value, text):
  assert figure(value) == text


@pytest.mark.parametrize('value, text', [
    (None, '–'), (float('nan'), '–'), (True, 'yes'), (10**400, 'about 10^400'), ({'a': [1, None]}, 'a 1, –'),
    ('', '–')])
def test_cell(value, text):
  assert cell(value).text == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=5)
FIELDS = st.sampled_from([
    'task', 'drafter', 'gamma', 'batch', 'speedup', 'predicted_speedup', 'ms_per_token', 'overrides',
    'ms_per_token_p10', 'tokens_per_pass', 'topology', 'workloads',
    'accepted_per_position', 'x.y', 'predicted_ms_per_token', 'backend'])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.dictionaries(FIELDS, JSON, max_size=6), min_size=1, max_size=4))
def test_any_rows_make_a_page(tmp_path_factory, rows):
  path = tmp_path_factory.mktemp('rows') / 'rows.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  assert_inert(render('x', runs_of(str(path))))


@pytest.mark.parametrize('reader, content, said', [
    (runs_of, '[1]', 'has no rows'), (runs_of, '[' * 100_000, 'is not JSON'), (runs_of, '"a"', 'has no rows'),
    (verdicts_of, '[{"rung": "a"}]', 'holds no verdicts'), (verdicts_of, '{}', 'holds no verdicts'),
    (traces_of, '[{"steps": 1}]', 'holds no traces'), (traces_of, '[{"steps": [{"drafted": 1}]}]', 'holds no traces'),
    (traces_of, 'nonsense', 'is not JSON')])
def test_other_files_are_refused(reader, content, said, tmp_path):
  path = tmp_path / 'file.json'
  path.write_text(content)
  with pytest.raises(InputError, match=said):
    reader(str(path))


def test_command(tmp_path):
  out = tmp_path / 'new' / 'report.html'
  results.append_row(str(tmp_path / 'rows.jsonl'), ROW)
  run = lambda *flags: subprocess.run([sys.executable, '-m', 'experiments.report', *flags], capture_output=True,
                                      text=True, cwd=RESULTS.parents[1])
  done = run(f'--rows={tmp_path}/rows.jsonl', f'--out={out}')
  assert (done.returncode, done.stderr) == (0, '') and out.read_text().startswith('<!doctype html>')
  assert run(f'--out={out}').returncode == 2
