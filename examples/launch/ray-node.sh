#!/usr/bin/env bash
# One node of the Ray cluster, in the foreground: run it on every node by whatever starts your jobs (Slurm, Kubernetes,
# systemd). It ends when that ends it, and touches nothing that it did not start.
#
#   ray-node.sh head            on the first node
#   ray-node.sh HEAD_ADDRESS    on the others
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

HEAD="${1:-}"
shift || true
parse_arguments "$@"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
RAY_PORT="${RAY_PORT:-6379}"

[[ -n "$HEAD" ]] || PROBLEMS+=("say 'head', or the address of the head node")
need_command ray "it comes with the trainer's environment"
need_command sandlot "install Sandlot into the trainer's environment on every node"
check_all

if [[ "$HEAD" == head ]]; then
  run ray start --head --block --port "$RAY_PORT" --num-gpus "$GPUS_PER_NODE" --disable-usage-stats \
    --dashboard-host 127.0.0.1 --dashboard-port 8265
else
  run ray start --block --address "$HEAD:$RAY_PORT" --num-gpus "$GPUS_PER_NODE" --disable-usage-stats
fi
