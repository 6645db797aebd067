#!/usr/bin/env bash
# One GPU: a model of 0.8B parameters, to see the whole loop turn.
# The cluster first: `GPUS_PER_NODE=1 ray-node.sh head`.
# Then, with the variables that `--dry-run` names: 1gpu.sh slime|vime [--dry-run]
# shellcheck disable=SC2034
set -euo pipefail

MODEL="${MODEL:-qwen3.5-0.8B}"
NODES="${NODES:-1}"
GPUS_PER_NODE="${GPUS_PER_NODE:-1}"
TENSOR="${TENSOR:-1}"
CONTEXT_PARALLEL="${CONTEXT_PARALLEL:-1}"
EXPERT="${EXPERT:-1}"
CONTEXT="${CONTEXT:-32000}"
TURN_TOKENS="${TURN_TOKENS:-4096}"
PROMPTS="${PROMPTS:-2}"
ATTEMPTS="${ATTEMPTS:-4}"
ENGINE_GPUS="${ENGINE_GPUS:-1}"
ENGINE_MEMORY="${ENGINE_MEMORY:-0.4}"

source "$(dirname -- "${BASH_SOURCE[0]}")/train.sh" "$@"
