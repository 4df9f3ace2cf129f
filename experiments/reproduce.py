"""Plain and speculative decoding of HumanEval and news prompts on the embedded model: `make reproduce`.

    python -m experiments.reproduce --rows=results/reproduce.jsonl --plot=results/reproduce.png

The settings are those of Chen et al. (2023), section 5: HumanEval at temperature 0.8 with top-p 0.95, summaries with
top-p 0.8, and both greedy. One process, batch 1, drafters in turns with plain decoding prompt by prompt. The published
speed-ups are of a 70B target on sixteen TPU v4 chips and are never mixed with the rows measured here.

A speed-up is the time of all prompts decoded plainly over their time with drafts, each decoded once: prompts differ
more than repeats of one do, so that in the same ten minutes six prompts once say more than the median of three runs
of two. What slows the machine for a moment slows all that is timed on that prompt, parts of the step included.
"""

from typing import Any

from absl import flags
from ml_collections import ConfigDict

from configs import smollm2
from experiments import plot
from launch import bench, cli, results
from launch.prompts import load_prompts
from launch.session import Session

TASKS = {
    'humaneval greedy': ('humaneval', {'temperature': 0.0, 'top_p': 1.0}),
    'humaneval sampled': ('humaneval', {'temperature': 0.8, 'top_p': 0.95}),
    'news greedy': ('news', {'temperature': 0.0, 'top_p': 1.0}),
    'news sampled': ('news', {'temperature': 1.0, 'top_p': 0.8}),
}
VARIANTS = ('lookup', 'model', 'medusa', 'hybrid')


def task_config(variant: str, kind: str, sampling: dict, limit: int, max_new_tokens: int) -> ConfigDict:
  config = smollm2.get_config(variant)
  config.data.kind, config.data.limit = kind, limit
  config.sampling.update(sampling, max_new_tokens=max_new_tokens)
  return config


def run_tasks() -> list[dict[str, Any]]:
  """All rows, each task's written as soon as it is done."""
  rows, model = [], None
  for task, (kind, sampling) in TASKS.items():
    sessions = {}
    for variant in VARIANTS:
      config = task_config(variant, kind, sampling, PROMPTS.value, MAX_NEW_TOKENS.value)
      sessions[variant] = Session.from_config(config, model)
      model = sessions[variant].params.target, sessions[variant].tokenizer
    cli.say(f'{task}: {PROMPTS.value} prompts, {MAX_NEW_TOKENS.value} new tokens each')
    for row in bench.compare(sessions, load_prompts(config.data), REPEATS.value):
      rows.append({'task': task} | row)
      results.append_row(ROWS.value, rows[-1])
  return rows


def main() -> int:
  cli.refuse_job()
  results.check_rows(ROWS.value)
  plot.check(PLOT.value)
  rows = run_tasks()
  bench.show(rows, cli.output())
  plot.draw(rows, PLOT.value)
  cli.say(f'rows: {ROWS.value}   plot: {PLOT.value}')
  cli.write_json(rows)
  return 0


if __name__ == '__main__':
  ROWS = flags.DEFINE_string('rows', 'results/reproduce.jsonl', 'Rows are appended here.')
  PLOT = flags.DEFINE_string('plot', 'results/reproduce.png', 'The plot is drawn here.')
  PROMPTS = flags.DEFINE_integer('prompts', 6, 'Prompts per task.', lower_bound=1)
  MAX_NEW_TOKENS = flags.DEFINE_integer('max_new_tokens', 48, 'New tokens per prompt.', lower_bound=1)
  REPEATS = flags.DEFINE_integer('repeats', 1, 'Timed runs of each prompt.', lower_bound=1)
  cli.run(main)
