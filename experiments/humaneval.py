"""HumanEval (Chen et al., 2021): plain and speculative decoding side by side, in score and in time.

    python -m experiments.humaneval --config=configs/smollm2.py:lookup --limit=20 --allow_code_execution
    python -m experiments.humaneval --config=... --samples_per_problem=9 --k=1,9 --config.sampling.temperature=0.8
    python -m experiments.humaneval --config=... --generate_only --samples_out=samples.jsonl
    python -m experiments.humaneval --samples=samples.plain.jsonl --allow_code_execution

Scoring runs model-written code, in a sandbox (`experiments/sandbox.py`), and only with --allow_code_execution. Sample
files have the benchmark's own format; --samples_out=x.jsonl writes x.plain.jsonl and x.speculative.jsonl.
"""

import pathlib
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from experiments import score
from experiments.completions import completion
from experiments.sample_files import Sample, read_samples, write_lines
from experiments.score import Scores
from experiments.side_by_side import SPECULATIVE, TIMING_COLUMNS, decode_both, facts
from launch import cli, distributed, results
from launch.prompts import Prompt, humaneval_problems, load_prompts, stop_strings
from launch.session import Session
from launch.table import Column, print_table
from launch.timed import PLAIN, Timed
from models.errors import InputError

KIND_COLUMNS = [Column(f'counts.{kind}', kind.replace('_', ' ')) for kind in
                ('passed', 'wrong', 'exception', 'timeout', 'harness_error')]


def main() -> int:
  k = _k()
  for path in (path_for(SAMPLES_OUT.value, PLAIN), path_for(SAMPLES_OUT.value, SPECULATIVE), RESULTS_OUT.value):
    results.check_writable(path)
  if not GENERATE_ONLY.value:
    score.require_consent(ALLOW.value)
  return _score_file(k) if SAMPLES.value is not None else _decode_and_score(k)


def _k() -> list[int]:
  try:
    return [int(number) for number in K.value]
  except ValueError as error:
    raise InputError(f'--k={",".join(K.value)} must be whole numbers, comma separated') from error


def path_for(path: str | None, decoder: str) -> str | None:
  """samples.jsonl -> samples.plain.jsonl"""
  if path is None:
    return None
  return str(pathlib.Path(path).with_suffix(f'.{decoder}{pathlib.Path(path).suffix}'))


def _score_file(k: list[int]) -> int:
  scores = score.score_samples(read_samples(SAMPLES.value), ALLOW.value, k, TIMEOUT.value, WORKERS.value)
  _report([{'samples_file': SAMPLES.value, **_score_facts(scores)}], {'samples': scores}, k)
  return 0


def _decode_and_score(k: list[int]) -> int:
  config = cli.config_of(CONFIG)
  _prepare(config)
  prompts = [prompt for prompt in load_prompts(config.data) for _ in range(SAMPLES_PER_PROBLEM.value)]
  if not GENERATE_ONLY.value:
    score.check_samples([Sample(prompt.id, '') for prompt in prompts], [prompt.id for prompt in prompts], k)
    score.prepare(TIMEOUT.value, WORKERS.value)
  runs = decode_both(Session.from_config(config), prompts, UNITS_DIR.value)
  if not distributed.speaks():
    return 0
  samples = {run.name: samples_of(run, prompts) for run in runs}
  if SAMPLES_OUT.value is not None:
    for decoder, decoded in samples.items():
      write_lines(path_for(SAMPLES_OUT.value, decoder), map(vars, decoded))
  rows, scores = [facts(run, runs[0]) for run in runs], {}
  if not GENERATE_ONLY.value:
    for row in rows:
      scores[row['decoder']] = score.score_samples(
          samples[row['decoder']], ALLOW.value, k, TIMEOUT.value, WORKERS.value)
      row |= _score_facts(scores[row['decoder']])
  _report(rows, scores, k)
  return 0


def _prepare(config: ConfigDict) -> None:
  """The config as this benchmark needs it: its prompts, and where its raw completions end."""
  with config.unlocked():
    config.data.kind = 'humaneval'
    if LIMIT.value is not None:
      config.data.limit = LIMIT.value or None
    config.sampling.stop = tuple(config.sampling.stop) or stop_strings(config.data)
  if SAMPLES_PER_PROBLEM.value > 1 and config.sampling.temperature == 0:
    raise InputError('--samples_per_problem above 1 needs --config.sampling.temperature above 0: '
                     'greedy samples are all the same')


def samples_of(run: Timed, prompts: list[Prompt]) -> list[Sample]:
  problems = {problem.task_id: problem for problem in humaneval_problems()}
  return [Sample(prompt.id, completion(text, problems[prompt.id], prompt.chat))
          for prompt, text in zip(prompts, run.texts, strict=True)]


def _score_facts(scores: Scores) -> dict[str, Any]:
  pass_at = {f'pass@{k}': value for k, value in scores.pass_at.items()}
  return {**pass_at, 'problems': scores.problems, 'samples': len(scores.results), 'counts': scores.counts,
          'isolation': scores.isolation}


def _report(rows: list[dict[str, Any]], scores: dict[str, Scores], k: list[int]) -> None:
  """Shows and writes the rows, then fails the run where they mean nothing."""
  if RESULTS_OUT.value is not None:
    write_lines(RESULTS_OUT.value, [
        {'decoder': name, **row} for name, scored in scores.items() for row in scored.results])
  columns = [Column('decoder'), *[Column(f'pass@{number}', format='.3f') for number in k], *KIND_COLUMNS]
  print_table(rows, columns, _title(rows[0]), file=cli.output())
  if 'speedup' in rows[0]:  # decoded here
    print_table(rows, [Column('decoder'), *TIMING_COLUMNS], '\nTime', file=cli.output())
  cli.write_json({'benchmark': 'humaneval', 'rows': rows, **results.environment()})
  for scored in scores.values():
    scored.check()


def _title(row: dict[str, Any]) -> str:
  if 'isolation' not in row:
    return f'HumanEval, {row["prompts"]} samples, not scored'
  return f'HumanEval, {row["problems"]} of 164 problems, {row["samples"]} samples\n{row["isolation"]}'


if __name__ == '__main__':
  CONFIG = cli.define_config()
  SAMPLES = flags.DEFINE_string('samples', None, 'Score this file of samples instead of decoding.')
  SAMPLES_PER_PROBLEM = flags.DEFINE_integer('samples_per_problem', 1, 'Completions of each problem.', lower_bound=1)
  LIMIT = flags.DEFINE_integer('limit', None, 'Problems, from data.offset on; 0 for all; data.limit when not given.',
                               lower_bound=0)
  ALLOW = flags.DEFINE_bool('allow_code_execution', False, 'Run what the model wrote, in a sandbox.')
  GENERATE_ONLY = flags.DEFINE_bool('generate_only', False, 'Decode and time, but run nothing.')
  SAMPLES_OUT = flags.DEFINE_string('samples_out', None, 'Write the samples to this .jsonl file.')
  RESULTS_OUT = flags.DEFINE_string('results_out', None, 'Write how each sample ended to this .jsonl file.')
  K = flags.DEFINE_list('k', ['1'], 'The k of pass@k, comma separated.')
  TIMEOUT = flags.DEFINE_float('timeout', score.TIMEOUT_SECONDS, 'Seconds for each program.', lower_bound=0.1)
  WORKERS = flags.DEFINE_integer('workers', None, 'Programs at a time; one for each core when not given.',
                                 lower_bound=1)
  UNITS_DIR = flags.DEFINE_string('units_dir', None, 'Keep what is decoded here, batch by batch, and go on from it.')
  cli.run(main)
