"""XSum (Narayan et al., 2018): plain and speculative summaries side by side, in ROUGE and in time.

    python -m experiments.xsum --config=configs/smollm2.py:lookup                 news stories that a package ships
    python -m experiments.xsum --config=... --config.data.path=xsum_test.jsonl    XSum itself, or .parquet
    python -m experiments.xsum --config=... --config.data.kind=xsum --limit=0     XSum through the package datasets

Chen et al. (2023) use one worked example: --config.data.form=raw --config.data.shots=1.
"""

from typing import Any

from absl import flags
from ml_collections import ConfigDict
import numpy as np

from experiments import rouge
from experiments.completions import END_OF_TEXT, cut
from experiments.sample_files import write_lines
from experiments.side_by_side import TIMING_COLUMNS, decode_both, facts
from launch import cli, distributed, results
from launch.prompts import Prompt, load_prompts, stop_strings
from launch.session import Session
from launch.table import Column, print_table
from launch.timed import Timed


def main() -> int:
  config = cli.config_of(CONFIG)
  _prepare(config)
  results.check_writable(SUMMARIES_OUT.value)
  prompts = load_prompts(config.data)
  rouge.rouge([], [], STEMMER.value)  # a missing package, before the work
  runs = decode_both(Session.from_config(config), prompts, UNITS_DIR.value)
  if not distributed.speaks():
    return 0
  _write_summaries(runs, prompts)
  rows = [facts(run, runs[0]) for run in runs]
  references = [prompt.reference for prompt in prompts]
  scores = {run.name: rouge.rouge(references, summaries_of(run), STEMMER.value) for run in runs}
  for row in rows:
    row['rouge'] = {variant: rouge.interval(values) for variant, values in scores[row['decoder']].items()}
  _report(rows, comparison(scores), config)
  return 0


def _prepare(config: ConfigDict) -> None:
  """The config as this benchmark needs it: news unless XSum is given, and where a raw summary ends."""
  with config.unlocked():
    if config.data.kind not in ('news', 'xsum'):
      config.data.kind = 'xsum' if config.data.path else 'news'
    if LIMIT.value is not None:
      config.data.limit = LIMIT.value or None
    config.sampling.stop = tuple(config.sampling.stop) or stop_strings(config.data)


def summaries_of(run: Timed) -> list[str]:
  return [cut(text, END_OF_TEXT).strip() for text in run.texts]


def comparison(scores: dict[str, dict[str, np.ndarray]]) -> list[dict[str, Any]]:
  """A row for each variant: the interval of each decoder and, where there are two, of their difference."""
  rows = []
  for variant in rouge.VARIANTS:
    values = {decoder: by_variant[variant] for decoder, by_variant in scores.items()}
    if len(values) == 2:
      plain, speculative = values.values()
      values['difference'] = speculative - plain
    rows.append({'variant': variant} | {name: rouge.interval(array) for name, array in values.items()})
  return rows


def _write_summaries(runs: list[Timed], prompts: list[Prompt]) -> None:
  if SUMMARIES_OUT.value is None:
    return
  write_lines(SUMMARIES_OUT.value, [
      {'decoder': run.name, 'id': prompt.id, 'reference': prompt.reference, 'summary': summary}
      for run in runs for prompt, summary in zip(prompts, summaries_of(run), strict=True)])


def _report(rows: list[dict[str, Any]], compared: list[dict[str, Any]], config: ConfigDict) -> None:
  setting = rouge.setting(STEMMER.value)
  names = [name for name in compared[0] if name != 'variant']
  stories = f'{config.data.kind}, {rows[0]["prompts"]} stories'
  print_table(rows, [Column('decoder'), *TIMING_COLUMNS], stories, file=cli.output())
  columns = [Column('variant'), *[Column(name, format=str) for name in names]]
  print_table(compared, columns, f'\n{setting}', file=cli.output())
  cli.write_json({
      'benchmark': config.data.kind, 'setting': setting, 'stemmer': STEMMER.value, 'rows': rows,
      'difference': {row['variant']: row.get('difference') for row in compared}, **results.environment()})


if __name__ == '__main__':
  CONFIG = cli.define_config()
  LIMIT = flags.DEFINE_integer('limit', None, 'Stories, from data.offset on; 0 for all; data.limit when not given.',
                               lower_bound=0)
  STEMMER = flags.DEFINE_bool('stemmer', True, 'Porter stemming before words are compared.')
  SUMMARIES_OUT = flags.DEFINE_string('summaries_out', None, 'Write the summaries to this .jsonl file.')
  UNITS_DIR = flags.DEFINE_string('units_dir', None, 'Keep what is decoded here, batch by batch, and go on from it.')
  cli.run(main)
