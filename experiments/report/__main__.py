"""One HTML page of any runs: charts, tables, what became of each token, and whether it was exact.

    python -m experiments.report --rows=experiments/results/reproduce_cpu.jsonl --out=report.html
    python -m experiments.report --rows=A.jsonl,B.jsonl --verdicts=exactness.json --traces=trace.json --out=report.html

The page is one file that loads nothing from anywhere. --rows takes the JSON lines of any command, and the JSON that
--json_out wrote; --verdicts that of experiments.exactness, --traces that of experiments.trace. Measured, predicted and
published figures stand in columns of their own.
"""

from absl import flags

from experiments.report.inputs import runs_of, traces_of, verdicts_of
from experiments.report.page import render
from launch import cli, results
from models.errors import InputError


def main() -> None:
  if not (ROWS.value or VERDICTS.value or TRACES.value):
    raise InputError('nothing to show: pass --rows=FILE, --verdicts=FILE or --traces=FILE')
  if not OUT.value:
    raise InputError('pass --out=FILE.html')
  results.check_writable(OUT.value)
  page = render(
      TITLE.value, [run for path in ROWS.value for run in runs_of(path)],
      [row for path in VERDICTS.value for row in verdicts_of(path)],
      [trace for path in TRACES.value for trace in traces_of(path)])
  results.write_text(OUT.value, page)
  cli.say(f'wrote {OUT.value}: {len(page.encode()) / 1024:.0f} KiB')


if __name__ == '__main__':
  ROWS = flags.DEFINE_list('rows', [], 'Files of rows: JSON lines, or what --json_out wrote.')
  VERDICTS = flags.DEFINE_list('verdicts', [], 'What experiments.exactness --json_out wrote.')
  TRACES = flags.DEFINE_list('traces', [], 'What experiments.trace --json_out wrote.')
  OUT = flags.DEFINE_string('out', None, 'The page.')
  TITLE = flags.DEFINE_string('title', 'Speculative decoding: a report', 'Of the page.')
  cli.run(main, alone=True)
