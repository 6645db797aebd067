#!/usr/bin/env bash
# One node of eight GPUs: the same model and agent with 64k tokens of context and smaller batches.
# The cluster first: `ray-node.sh head`.
# Then, with the variables that `--dry-run` names: 1node.sh slime|vime [--dry-run]
# shellcheck disable=SC2034
set -euo pipefail

MODEL="${MODEL:-qwen3.5-35B-A3B}"
NODES="${NODES:-1}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR="${TENSOR:-2}"
CONTEXT_PARALLEL="${CONTEXT_PARALLEL:-4}"
EXPERT="${EXPERT:-8}"
CONTEXT="${CONTEXT:-64000}"
TURN_TOKENS="${TURN_TOKENS:-16384}"
PROMPTS="${PROMPTS:-4}"
ATTEMPTS="${ATTEMPTS:-8}"
ENGINE_GPUS="${ENGINE_GPUS:-8}"
ENGINE_MEMORY="${ENGINE_MEMORY:-0.6}"

source "$(dirname -- "${BASH_SOURCE[0]}")/train.sh" "$@"
