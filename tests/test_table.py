"""Tables line up, and are plain text away from a terminal."""

import io
import math

from launch import table
from launch.table import Column

ROWS = [
    {'drafter': 'none', 'speedup': 1.0, 'gamma': 0, 'nested': {'c': None}},
    {'drafter': 'lookup', 'speedup': 0.5, 'gamma': 10, 'nested': {'c': 0.25}},
    {'drafter': 'draft', 'speedup': math.nan, 'a.b': 3},
]
COLUMNS = [Column('drafter'), Column('gamma', 'γ'), Column('speedup', format='.2f'), Column('nested.c', 'c', '.3f'),
           Column('nowhere')]


class _Terminal(io.StringIO):

  def isatty(self):
    return True


def test_lines():
  assert table.lines(ROWS, COLUMNS) == [
      'drafter   γ  speedup      c',
      '-------  --  -------  -----',
      'none      0     1.00      -',
      'lookup   10     0.50  0.250',
      'draft     -        -      -',
  ]


def test_dotted_keys_and_functions():
  columns = [Column('a.b'), Column('speedup', 'note', lambda value: 'slower' if value < 1 else '')]
  assert table.lines(ROWS, columns)[2:] == ['  -', '  -  slower', '  3       -']


def test_no_rows():
  assert table.lines([], COLUMNS) == ['(no rows)']


def test_plain_text_elsewhere():
  file = io.StringIO()
  table.print_table(ROWS, COLUMNS, title='Title', marked=lambda row: row['speedup'] < 1, file=file)
  assert file.getvalue() == '\n'.join(['Title', *table.lines(ROWS, COLUMNS), ''])


def test_terminal_marks_rows(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.delenv('NO_COLOR', raising=False)
  file = _Terminal()
  table.print_table(ROWS, COLUMNS, marked=lambda row: row['speedup'] < 1, file=file)
  red = [line for line in file.getvalue().splitlines() if line.startswith(table.RED)]
  assert len(red) == 1
  assert 'lookup' in red[0]
  monkeypatch.setenv('NO_COLOR', '1')
  file = _Terminal()
  table.print_table(ROWS, COLUMNS, file=file)
  assert '\x1b' not in file.getvalue()
