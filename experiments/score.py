"""Scores HumanEval completions by running them, each in a sandbox, against the problem's tests.

Nothing runs unless the caller says that model-written code may be executed, and unless reference solutions pass first:
a harness that fails everything must not look like a model that does.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import concurrent.futures
import dataclasses
import functools
import os
from typing import Any

from experiments import sandbox
from experiments.completions import program
from experiments.pass_at_k import mean_pass_at_k, pass_at_k
from experiments.sample_files import Sample
from launch.errors import RunError
from launch.progress import track
from launch.prompts import humaneval_problems
from models.errors import InputError

SELF_CHECKS = 5
TIMEOUT_SECONDS = 3.0  # as the benchmark has it
REMEDIES = {'timeout': 'raise --timeout or lower --workers', 'harness_error': 'see --results_out'}
REFUSAL = ('scoring runs code that a model wrote: add --allow_code_execution to allow that, in a sandbox, '
           'or --generate_only to write the samples without scoring them')


@dataclasses.dataclass(frozen=True)
class Scores:
  """What a set of samples is worth.

  Attributes:
    results: one row for each sample, in order: task_id, completion, result (a kind), passed, detail, seconds.
    counts: of each kind.
    pass_at: k -> mean pass@k over problems.
    problems: how many were attempted.
    isolation: what kept the programs apart from the machine.
  """

  results: list[dict[str, Any]]
  counts: dict[str, int]
  pass_at: dict[int, float]
  problems: int
  isolation: str

  def check(self, remedies: Mapping[str, str] = REMEDIES) -> None:
    """Raises RunError, with a remedy by kind, where more than half of the programs ran out of time or never ran."""
    total = len(self.results)
    for kind, remedy in remedies.items():
      if 2 * self.counts[kind] > total:
        raise RunError(f'{self.counts[kind]} of {total} programs ended in {kind}: scores mean nothing, {remedy}')


def score_samples(samples: Sequence[Sample], allow_execution: bool, k: Sequence[int] = (1,),
                  timeout: float = TIMEOUT_SECONDS, workers: int | None = None) -> Scores:
  """Runs every sample and counts.

  Args:
    samples: any number of each problem.
    allow_execution: the explicit consent to run them.
    k: of pass@k.
    timeout: seconds for each program.
    workers: programs at a time; one for each core when None.

  Raises:
    InputError: without consent, for unknown problems, for k beyond the samples of a problem.
    RunError: where reference solutions fail.
  """
  require_consent(allow_execution)
  workers = workers or usable_cores()
  problems = {problem.task_id: problem for problem in humaneval_problems()}
  check_samples(samples, problems, k)
  prepare(timeout, workers)
  programs = [program(problems[sample.task_id], sample.completion) for sample in samples]
  results = run_programs(programs, timeout, workers, 'running programs')
  rows = [
      {'task_id': sample.task_id, 'completion': sample.completion, 'result': result.kind, 'passed': result.passed,
       'detail': result.detail, 'seconds': round(result.seconds, 3)}
      for sample, result in zip(samples, results, strict=True)]
  return summarise(rows, k)


def summarise(rows: list[dict[str, Any]], k: Sequence[int]) -> Scores:
  by_task = collections.defaultdict(list)
  for row in rows:
    by_task[row['task_id']].append(row['passed'])
  solved = [(len(passed), sum(passed)) for passed in by_task.values()]
  kinds = collections.Counter(row['result'] for row in rows)
  return Scores(
      results=rows, counts={kind: kinds[kind] for kind in sandbox.KINDS},
      pass_at={number: mean_pass_at_k(solved, number) for number in k}, problems=len(by_task),
      isolation=str(sandbox.isolation(sandbox.MODES)))


def require_consent(allow_execution: bool) -> None:
  if not allow_execution:
    raise InputError(REFUSAL)


def prepare(timeout: float = TIMEOUT_SECONDS, workers: int | None = None) -> None:
  """Isolation and self-check: to be called before the work whose samples are scored."""
  sandbox.isolation(sandbox.MODES)
  self_check(timeout, workers or usable_cores())


def check_samples(samples: Sequence[Sample], problems: Iterable[str], k: Sequence[int]) -> None:
  if not samples:
    raise InputError('there are no samples to score')
  counts = collections.Counter(sample.task_id for sample in samples)
  for task_id in counts:
    if task_id not in problems:
      raise InputError(f'sample of an unknown problem {task_id!r}: HumanEval has HumanEval/0 to HumanEval/163')
  for number in k:
    pass_at_k(min(counts.values()), 0, number)


@functools.cache
def self_check(timeout: float, workers: int) -> None:
  """Raises RunError unless the first reference solutions pass."""
  problems = humaneval_problems()[:SELF_CHECKS]
  programs = [program(problem, problem.canonical_solution) for problem in problems]
  for problem, result in zip(problems, run_programs(programs, timeout, workers, 'self-check'), strict=True):
    if not result.passed:
      raise RunError(f'self-check: the reference solution of {problem.task_id} ended in {result.kind} '
                         f'({result.detail}): raise --timeout, or mend the sandbox before scoring a model')


def run_programs(programs: Sequence[str], timeout: float, workers: int, label: str) -> list[sandbox.Result]:
  limits = sandbox.Limits(seconds=timeout)
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    try:
      results = pool.map(lambda source: sandbox.run(source, limits), programs)
      return list(track(results, len(programs), label))
    except BaseException:
      pool.shutdown(wait=False, cancel_futures=True)
      raise


def usable_cores() -> int:
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
