"""Runs many commands in processes of their own that share what all of them import."""

from collections.abc import Sequence
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
DRIVER = '''
import json, os, runpy, sys
import launch.session, launch.table
for directory, output, module, arguments in json.load(sys.stdin):
  child = os.fork()
  if not child:
    for number, name in ((1, 'stdout'), (2, 'stderr')):
      os.dup2(os.open(f'{output}.{name}', os.O_WRONLY | os.O_CREAT), number)
    os.chdir(directory)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name='__main__', alter_sys=True)
    sys.exit()
  print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
'''


def statuses(cases: Sequence[tuple[str, str, str, Sequence[str]]]) -> list[int]:
  """Of commands one after the other: directory to run in, file that gets .stdout and .stderr, module, arguments."""
  done = subprocess.run(
      [sys.executable, '-c', DRIVER], input=json.dumps(cases), text=True, capture_output=True, cwd=ROOT,
      env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}, check=True)
  return [int(status) for status in done.stdout.split()]
