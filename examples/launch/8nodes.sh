#!/usr/bin/env bash
# Eight nodes of eight GPUs: a 35B-A3B mixture of experts on SWE tasks with Claude Code, 96k tokens of context.
# The cluster first: `ray-node.sh head` on one node, `ray-node.sh HEAD_ADDRESS` on the others.
# Then, with the variables that `--dry-run` names: 8nodes.sh slime|vime [--dry-run]
# shellcheck disable=SC2034
set -euo pipefail

MODEL="${MODEL:-qwen3.5-35B-A3B}"
NODES="${NODES:-8}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR="${TENSOR:-2}"
CONTEXT_PARALLEL="${CONTEXT_PARALLEL:-8}"
EXPERT="${EXPERT:-8}"
CONTEXT="${CONTEXT:-96000}"
TURN_TOKENS="${TURN_TOKENS:-32768}"
PROMPTS="${PROMPTS:-8}"
ATTEMPTS="${ATTEMPTS:-8}"
ENGINE_GPUS="${ENGINE_GPUS:-8}"
ENGINE_MEMORY="${ENGINE_MEMORY:-0.75}"

source "$(dirname -- "${BASH_SOURCE[0]}")/train.sh" "$@"
