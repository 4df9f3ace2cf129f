"""TPU slices: the table, the JobSet manifest, and the scripts that start runs."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from configs import smollm2
from launch import banner
from launch.slices.jobset import manifest
from launch.slices.place import Place, first_host, found_place, given_place
from launch.slices.table import SLICES, slice_of
from models.errors import InputError

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / 'launch' / 'slices').glob('*.sh'))
TPU_VM = ROOT / 'launch' / 'slices' / 'tpu_vm.sh'


@pytest.mark.parametrize('name, topology, chips, hosts, accelerator', [
    ('v4-8', '2x2x1', 4, 1, 'tpu-v4-podslice'), ('v4-32', '2x2x4', 16, 4, 'tpu-v4-podslice'),
    ('v4-128', '4x4x4', 64, 16, 'tpu-v4-podslice'), ('v5litepod-16', '4x4', 16, 4, 'tpu-v5-lite-podslice'),
    ('v5p-32', '2x2x4', 16, 4, 'tpu-v5p-slice'), ('v6e-16', '4x4', 16, 4, 'tpu-v6e-slice'),
    ('v6e-256', '16x16', 256, 64, 'tpu-v6e-slice')])
def test_table(name, topology, chips, hosts, accelerator):
  made = slice_of(name)
  assert (made.topology, made.chips, made.hosts, made.gke_accelerator) == (topology, chips, hosts, accelerator)
  assert made.hosts * made.chips_per_host == made.chips


def test_names():
  assert slice_of('v5e-16') is slice_of('v5litepod-16')
  assert (slice_of('v4-32').aot_name, slice_of('v4-32').aot_chip_config) == ('v4:2x2x4', 'megacore')
  assert slice_of('v5e-16').aot_name == 'v5e:4x4'
  with pytest.raises(InputError, match=r'v4-33.*unknown.*v4-32.*v6e-16'):
    slice_of('v4-33')


@pytest.mark.parametrize('made', SLICES.values(), ids=list(SLICES))
def test_manifest(made):
  """Through YAML and back, every field that makes the slice one job."""
  written = yaml.safe_load(yaml.safe_dump(manifest(made, 'run', 'image:1', ['python', '-m', 'x'])))
  assert (written['apiVersion'], written['kind']) == ('jobset.x-k8s.io/v1alpha2', 'JobSet')
  assert written['metadata']['annotations'] == {
      'alpha.jobset.sigs.k8s.io/exclusive-topology': 'cloud.google.com/gke-nodepool'}
  assert 'labels' not in written['metadata']
  policy = written['spec']['failurePolicy']
  assert policy['maxRestarts'] == 3
  assert policy['rules'] == [{'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}]
  (replicated,) = written['spec']['replicatedJobs']
  job = replicated['template']['spec']
  assert replicated['replicas'] == 1 and job['backoffLimit'] == 0
  assert job['parallelism'] == job['completions'] == made.hosts
  (rule,) = job['podFailurePolicy']['rules']
  exits = rule['onExitCodes']
  assert (rule['action'], exits['operator']) == ('FailJob', 'NotIn')
  assert {42, 137, 143, 255} <= set(exits['values']) and not {1, 2} & set(exits['values'])
  assert exits['values'] == sorted(exits['values']) and len(exits['values']) <= 255  # Kubernetes wants them so
  pod = job['template']['spec']
  assert pod['restartPolicy'] == 'Never' and pod['hostNetwork'] and pod['dnsPolicy'] == 'ClusterFirstWithHostNet'
  assert pod['nodeSelector'] == {
      'cloud.google.com/gke-tpu-accelerator': made.gke_accelerator, 'cloud.google.com/gke-tpu-topology': made.topology}
  assert pod['tolerations'] == [{'key': 'google.com/tpu', 'operator': 'Exists'}]
  (container,) = pod['containers']
  assert exits['containerName'] == container['name'] and container['command'] == ['python', '-m', 'x']
  assert container['resources'] == {'limits': {'google.com/tpu': made.chips_per_host}}
  assert [port['containerPort'] for port in container['ports']] == [8471, 8482]
  assert container['volumeMounts'] == [{'mountPath': '/dev/shm', 'name': 'dshm'}]
  assert pod['volumes'] == [{'name': 'dshm', 'emptyDir': {'medium': 'Memory'}}]


def test_manifest_options():
  made = manifest(slice_of('v4-8'), 'run', 'image:1', ['x'], spot=True, queue='mine', max_restarts=0)
  assert made['metadata']['labels'] == {'kueue.x-k8s.io/queue-name': 'mine'}
  pod = made['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']
  assert pod['nodeSelector']['cloud.google.com/gke-spot'] == 'true'
  assert made['spec']['failurePolicy']['maxRestarts'] == 0


def test_manifest_volume():
  """What is written to /results outlives the pods."""
  made = manifest(slice_of('v4-8'), 'run', 'image:1', ['x'], volume='mine')
  pod = made['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']
  assert pod['volumes'][1] == {'name': 'results', 'persistentVolumeClaim': {'claimName': 'mine'}}
  assert pod['containers'][0]['volumeMounts'][1] == {'mountPath': '/results', 'name': 'results'}


def jobset(*flags: str) -> subprocess.CompletedProcess:
  return subprocess.run([sys.executable, '-m', 'launch.slices.jobset', *flags], capture_output=True, text=True,
                        cwd=ROOT, env=os.environ | {'PYTHONPATH': str(ROOT)})


def test_jobset_command(tmp_path):
  path = tmp_path / 'manifest.json'
  done = jobset('--topology=v4-32', '--image=image:1', '--command=python -m launch.generate --prompt="a b"',
                f'--json_out={path}')
  assert done.returncode == 0, done.stderr
  written = yaml.safe_load(done.stdout)
  assert written == json.loads(path.read_text())
  assert done.stderr.startswith('note: without --volume') and done.stderr.count('\n') == 1
  (container,) = written['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']['containers']
  assert container['command'] == ['python', '-m', 'launch.generate', '--prompt=a b']


@pytest.mark.parametrize('flags, message', [
    (['--topology=v4-33', '--image=x', '--command=x'], "slice 'v4-33' is unknown"),
    (['--image=x', '--command=x'], '--topology is missing'),
    (['--topology=v4-32', '--image=x', '--command=x "y'], '--command: no closing quotation'),
    (['--topology=v4-32', '--image=x', '--command=x', '--name=A_b'], "--name='A_b' must be")])
def test_jobset_bad_input(flags, message):
  done = jobset(*flags)
  assert done.returncode == 2 and done.stdout == ''
  assert message in done.stderr and done.stderr.count('\n') == 1


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_scripts(script):
  """They parse, and shellcheck finds nothing where it is installed."""
  assert os.access(script, os.X_OK)
  subprocess.run(['bash', '-n', script], check=True)
  shellcheck = shutil.which('shellcheck', path=f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}')
  if shellcheck:
    subprocess.run([shellcheck, script], check=True)


def tpu_vm(*arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run([TPU_VM, *arguments], capture_output=True, text=True)


def test_dry_run():
  """Prints gcloud's commands in order and runs none of them."""
  done = tpu_vm('all', '--slice=v4-32', '--zone=zone-b', '--spot', '--dry_run', '--', 'python', '-m', 'x', '--y=a b')
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  wanted = ['queued-resources create', 'queued-resources describe', 'tpu-vm scp', 'tpu-vm ssh', 'tpu-vm ssh',
            'tpu-vm ssh', 'mkdir', 'tpu-vm scp --recurse', 'cp -R', 'rm -rf', 'queued-resources delete']
  assert len(lines) == len(wanted)
  assert all(part in line for part, line in zip(wanted, lines, strict=True))
  assert '--accelerator-type=v4-32' in lines[0] and '--spot' in lines[0] and '--runtime-version=' in lines[0]
  assert all('--zone=zone-b' in line for line in lines if 'gcloud' in line)
  assert all('--worker=all' in line for line in lines if 'tpu-vm ssh' in line)
  assert r'exec\ python\ -m\ x\ --y=a\\\ b' in lines[5]


GCLOUD = """#!/usr/bin/env bash
# Hosts that are one directory, $VM: ssh runs the command there, scp copies to and from it.
set -e
case "$*" in
  *"tpu-vm ssh"*) cd "$VM" && for x; do [[ $x != --command=* ]] || bash -c "${x#--command=}"; done ;;
  *"tpu-vm scp"*)
    paths=()
    for x in "${@:5}"; do [[ $x == --* ]] || paths+=("${x/#run:/$VM/}"); done
    cp -R "${paths[@]}" ;;
  *) exit 1 ;;
esac
"""


def test_a_slice_that_was_taken_away(tmp_path):
  """What a run leaves in results/ comes back, once, and is there again on the next slice."""
  checkout, vm, programs = (tmp_path / name for name in ('checkout', 'vm', 'bin'))
  (checkout / 'launch' / 'slices').mkdir(parents=True)
  programs.mkdir()
  (programs / 'gcloud').write_text(GCLOUD)
  (programs / 'gcloud').chmod(0o755)
  shutil.copy(TPU_VM, checkout / 'launch' / 'slices')
  (checkout / '.gitignore').write_text('/results/\n')
  subprocess.run(['git', 'init', '--quiet', checkout], check=True)

  def do(step: str, *command: str) -> None:
    subprocess.run(
        [checkout / 'launch' / 'slices' / 'tpu_vm.sh', step, '--zone=z', '--name=run', *command], check=True,
        capture_output=True, env=os.environ | {
            'VM': str(vm), 'PATH': f'{programs}:{os.environ["PATH"]}', 'TMPDIR': str(tmp_path)})

  for unit in ('unit-0', 'unit-1'):
    shutil.rmtree(vm, ignore_errors=True)
    (vm / 'specdec' / '.venv' / 'bin').mkdir(parents=True)
    (vm / 'specdec' / '.venv' / 'bin' / 'activate').touch()
    do('copy')
    do('run', '--', 'sh', '-c', f'mkdir -p results/units; ls results/units > results/found; touch results/units/{unit}')
    do('fetch')
    do('fetch')
  fetched = checkout / 'results' / 'run'
  assert sorted(str(path.relative_to(fetched)) for path in fetched.rglob('*')) == [
      'found', 'units', 'units/unit-0', 'units/unit-1']
  assert (fetched / 'found').read_text() == 'unit-0\n'
  assert not list(tmp_path.glob('run-results-*'))


def test_data_packages_are_those_of_the_makefile():
  expression = re.search(r"sed -n '(.*?)' Makefile", TPU_VM.read_text())[1]
  found = subprocess.run(['sed', '-n', expression, ROOT / 'Makefile'], capture_output=True, text=True, check=True)
  assert re.fullmatch(r'(\S+==\S+\s)+', found.stdout)


@pytest.mark.parametrize('script', ['tpu_vm.sh', 'jobset.py'])
def test_examples(script):
  """The command of the example is one that its slice does not refuse."""
  text = re.sub(r'\\+\n[# ]*', '', (ROOT / 'launch' / 'slices' / script).read_text())
  example = re.search(r'python -m experiments.*|python -m launch\.generate.*', text)[0]
  config = smollm2.get_config('lookup')
  for field, value in re.findall(r'--config\.([\w.]+)=(\w+)', example):
    config.update_from_flattened_dict({field: int(value)})
  made = slice_of(re.search(r'--slice=(\S+)', example)[1])
  assert '--config=configs/smollm2.py:lookup ' in example and '--slice=v4-32' in example
  banner.check([made.device_kinds[0]] * made.chips, made.hosts, config.mesh, made)


@pytest.mark.parametrize('arguments, message', [
    ([], 'no step given'), (['create', '--slice=v4-32'], '--zone is missing'),
    (['create', '--zone=z'], '--slice is missing'), (['create', '--zone=z', '--slice=v4-33'], "'v4-33' is unknown"),
    (['run', '--zone=z'], 'no command'), (['walk', '--zone=z'], 'unknown step walk'),
    (['run', '--zone', 'z'], 'unknown option --zone')])
def test_tpu_vm_bad_input(arguments, message):
  done = tpu_vm(*arguments)
  assert done.returncode == 2 and done.stdout == ''
  assert message in done.stderr and done.stderr.count('\n') == 1


def test_given_place():
  assert given_place(None, None, None) is None
  assert given_place('host:1', 1, 0) is None
  assert given_place('host:1', 2, 1) == Place('host:1', 2, 1)
  for wrong in (('host:1', 2, None), (None, 2, 1), ('host', 2, 1), ('host:1', 2, 2)):
    with pytest.raises(InputError):
      given_place(*wrong)


SLURM = {'SLURM_JOB_ID': '5000', 'SLURM_STEP_NODELIST': 'n[03-04]', 'SLURM_NTASKS': '4', 'SLURM_PROCID': '3',
         'SLURM_LOCALID': '1', 'SLURM_STEP_TASKS_PER_NODE': '2(x2)'}
NO_TPU = {'TPU_SKIP_MDS_QUERY': '1'}


@pytest.mark.parametrize('environ, place', [
    (NO_TPU, None),
    (SLURM, Place('n03:62344', 4, 3, (1,))),
    (SLURM | {'SLURM_STEP_TASKS_PER_NODE': '1(x4)', 'SLURM_LOCALID': '0'}, Place('n03:62344', 4, 3)),
    (SLURM | {'SLURM_NTASKS': '1', **NO_TPU}, None),
    ({'TPU_WORKER_HOSTNAMES': 'a.b,c.d', 'TPU_WORKER_ID': '1'}, Place('a.b:8482', 2, 1)),
    ({'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0'}, None),
    ({'TPU_WORKER_HOSTNAMES': 'a.b,c.d', 'TPU_WORKER_ID': '1', 'JAX_PLATFORMS': 'cpu'}, None),
    ({}, Place('10.0.0.1:8482', 2, 1))])
def test_found_place(environ, place):
  vm = {'worker-network-endpoints': 'x:0:10.0.0.1,y:1:10.0.0.2', 'agent-worker-number': '1'}
  assert found_place(environ, vm.get) == place


def test_single_host_vm_is_alone():
  assert found_place({}, {'worker-network-endpoints': '10.0.0.1', 'agent-worker-number': '0'}.get) is None
  assert found_place({}, {}.get) is None


@pytest.mark.parametrize('nodes, first', [
    ('n1', 'n1'), ('n1,n2', 'n1'), ('n[001-004]', 'n001'), ('n[7,9-11],m1', 'n7')])
def test_first_host(nodes, first):
  assert first_host(nodes) == first
