"""The published figures are consistent with themselves and with each other."""

import pytest

from experiments import published

TABLES = (published.CHEN_TABLE_1, published.LEVIATHAN_TABLE_1, published.LEVIATHAN_TABLES_2_AND_4,
          published.LEVIATHAN_TABLE_3)


@pytest.mark.parametrize('table', TABLES)
def test_rows_have_the_columns_and_a_source(table):
  assert '(2023), Table' in table['source']
  assert len(set(table['columns'])) == len(table['columns'])
  assert all(len(row) == len(table['columns']) for row in table['rows'])


def test_alphas_of_the_t5_drafts_agree_between_tables():
  table_3 = {(row[1], row[2]): row[3:] for row in published.LEVIATHAN_TABLE_3['rows'] if row[0] == 'T5-XXL 11B'}
  for task, temperature, draft, _, alpha, *_ in published.LEVIATHAN_TABLES_2_AND_4['rows']:
    assert table_3[task, draft][temperature] == alpha


def test_prediction_is_beaten_in_eight_of_twelve():
  rows = published.LEVIATHAN_TABLES_2_AND_4['rows']
  assert len(rows) == 12
  assert sum(row[5] > row[7] for row in rows) == 8


@pytest.mark.parametrize('task', ['humaneval', 'xsum'])
def test_chen_panels_agree(task):
  """Time is loop time over acceptance: at gamma 0 and 7, where all three panels were read."""
  figure = published.CHEN_FIGURE_1
  for gamma in (0, 7):
    emitted = figure[f'{task}_acceptance'][gamma] * (gamma + 1)
    milliseconds = figure['tokens'] * figure['loop_ms'][gamma] / emitted
    assert figure[f'{task}_ms'][gamma] == pytest.approx(milliseconds, rel=figure['relative_error'])


def test_chen_draft_and_loop():
  figure, setup = published.CHEN_FIGURE_1, published.CHEN_SETUP
  assert figure['loop_ms'][0] == setup['target']['ms_per_token']
  slope = (figure['loop_ms'][7] - figure['loop_ms'][0]) / 7
  assert setup['draft']['ms_per_token'] < slope < 1.2 * setup['draft']['ms_per_token']
  assert {row[5] for row in published.CHEN_TABLE_1['rows']} == {setup['target']['ms_per_token']}
