#!/bin/bash
# A job on machines that are reached by ssh: containers/ssh.sh JOB STORE HEAD HOST… [-- OPTION…]. HEAD is the address
# of this machine for the others. It runs the job, they sample, score and train. Not run over ssh:
# tests/unit/test_cluster_files.py runs it with stand-ins for ssh and ray.
set -euo pipefail

job=$1 store=$2 head=$3
shift 3
hosts=()
while (($#)) && [[ $1 != -- ]]; do
  hosts+=("$1")
  shift
done
(($# == 0)) || shift
port=${MOPD_RAY_PORT:-6379}
RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE RAY_AUTH_TOKEN

on_host() { # HOST COMMAND: variables go through stdin, since arguments can be read by every user of a machine
  { declare -px | grep -E '^declare -x (AWS_|RAY_AUTH_)'; echo "$2"; } | ssh "$1" bash -ls
}
stop() {
  for host in "${hosts[@]}"; do on_host "$host" "ray stop" || true; done
  ray stop
}
trap stop EXIT

ray start --head --node-ip-address="$head" --port="$port" --num-cpus=0 --num-gpus=0 --include-dashboard=false
for host in "${hosts[@]}"; do on_host "$host" "ray start --address='$head:$port'"; done

mopd run "$job" --store "$store" --ray "$head:$port" "$@"
