# shellcheck shell=bash disable=SC2153
# The training job of slime or vime on a Ray cluster that runs already (see ray-node.sh). Sourced by a size, which names
# the trainer as its first argument; paths and names come from the environment.
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/lib.sh"

ARGUMENTS="slime|vime [--dry-run]"
TRAINER="${1:-}"
[[ "$TRAINER" == slime || "$TRAINER" == vime ]] || usage
shift
parse_arguments "$@"

# ---- what must be there ---------------------------------------------------------------------------------------------

RAY_JOBS="${RAY_JOBS:-http://127.0.0.1:8265}"
ROLLOUT_FILE="${ROLLOUT_FILE:-$HERE/rollout.toml}"
need_path TRAINER_DIR "a checkout of $TRAINER"
need_path MEGATRON_DIR "a checkout of Megatron-LM"
need_path HF_CHECKPOINT "the model as Hugging Face stores it: tokenizer, chat template, weights"
need_path REF_CHECKPOINT "the same model converted for Megatron (torch_dist)"
need_path PROMPT_DATA "the JSONL of tasks; try it with: sandlot tasks check FILE"
need_path ROLLOUT_FILE "settings of the rollouts (TOML)"
need_variable RUN_DIR "a directory that all nodes see, for checkpoints and episodes"
[[ -z "${WANDB_PROJECT:-}" ]] || need_variable WANDB_API_KEY "WANDB_PROJECT is set"
need_command ray "it comes with the trainer's environment"
need_command sandlot "install Sandlot into the trainer's environment on every node"
MODEL_FILE="${TRAINER_DIR:-TRAINER_DIR}/scripts/models/$MODEL.sh"
[[ -z "${TRAINER_DIR:-}" || -f "$MODEL_FILE" ]] || PROBLEMS+=("$MODEL_FILE does not exist: this $TRAINER does not know the model")
check_all

MODEL_ARGS=()
if [[ -f "$MODEL_FILE" ]]; then
  # shellcheck disable=SC1090
  source "$MODEL_FILE"  # sets MODEL_ARGS, the architecture
fi
RUN_DIR="${RUN_DIR:-RUN_DIR}"
GPUS=$((NODES * GPUS_PER_NODE))

# ---- what is run ----------------------------------------------------------------------------------------------------

HOOK_ARGS=(
  --custom-generate-function-path "sandlot.trainers.$TRAINER.generate"
  --custom-reward-post-process-path "sandlot.trainers.$TRAINER.reward_post_process"  # by episode, also when it forked
  --custom-config-path "$RUN_DIR/hook.yaml"
)
DATA_ARGS=(
  --hf-checkpoint "${HF_CHECKPOINT:-HF_CHECKPOINT}"
  --ref-load "${REF_CHECKPOINT:-REF_CHECKPOINT}"
  --load "$RUN_DIR/checkpoints"
  --save "$RUN_DIR/checkpoints"
  --save-interval 10
  --prompt-data "${PROMPT_DATA:-PROMPT_DATA}"
  --input-key prompt
  --label-key label
  --metadata-key metadata
  --rollout-shuffle
)
ROLLOUT_ARGS=(
  --num-rollout "${NUM_ROLLOUT:-100}"
  --rollout-batch-size "$PROMPTS"
  --n-samples-per-prompt "$ATTEMPTS"
  --global-batch-size $((PROMPTS * ATTEMPTS))  # rollouts, not rows: one optimizer step however often episodes fork
  --rollout-max-context-len "$CONTEXT"
  --rollout-max-response-len "$TURN_TOKENS"
  --rollout-temperature 1.0
  --rollout-top-p 1.0
)
LOSS_ARGS=(
  --advantage-estimator grpo
  --kl-loss-coef 0.0
  --entropy-coef 0.0
  --eps-clip 0.2
  --eps-clip-high 0.28
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.98
)
PARALLEL_ARGS=(
  --actor-num-nodes "$NODES"
  --actor-num-gpus-per-node "$GPUS_PER_NODE"
  --colocate
  --tensor-model-parallel-size "$TENSOR"
  --pipeline-model-parallel-size 1
  --context-parallel-size "$CONTEXT_PARALLEL"
  --expert-model-parallel-size "$EXPERT"
  --expert-tensor-parallel-size 1
  --use-dynamic-batch-size
  --max-tokens-per-gpu $((CONTEXT / CONTEXT_PARALLEL))  # one rank's slice of the longest row
  --log-probs-chunk-size 1024
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --accumulate-allreduce-grads-in-fp32
  --attention-softmax-in-fp32
  --attention-backend flash
)
if ((TENSOR > 1)); then
  PARALLEL_ARGS+=(--sequence-parallel)
fi
if ((GPUS > 1)); then
  LOSS_ARGS+=(--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer)
fi
ENGINE_ARGS=(
  --rollout-num-gpus "$GPUS"
  --rollout-num-gpus-per-engine "$ENGINE_GPUS"
)
if [[ "$TRAINER" == slime ]]; then
  ENGINE_ARGS+=(--sglang-mem-fraction-static "$ENGINE_MEMORY")
  if ((EXPERT > 1)); then
    ENGINE_ARGS+=(--sglang-ep-size "$ENGINE_GPUS" --sglang-dp-size "$ENGINE_GPUS" --sglang-enable-dp-attention)
    ENGINE_ARGS+=(--sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1)
  fi
else
  export VLLM_SERVER_DEV_MODE=1  # the engines' routes for pausing and pushing weights
  ENGINE_ARGS+=(--vllm-gpu-memory-utilization "$ENGINE_MEMORY")
  if ((EXPERT > 1)); then
    ENGINE_ARGS+=(--vllm-data-parallel-size "$ENGINE_GPUS" --vllm-enable-expert-parallel)
  fi
fi
TRACKING_ARGS=()
if [[ -n "${WANDB_PROJECT:-}" ]]; then
  TRACKING_ARGS=(--use-wandb --wandb-project "$WANDB_PROJECT" --wandb-group "$(basename -- "$RUN_DIR")")
fi

# Secrets go to the job by their names: Ray takes the values from here, and no command line shows them.
RUNTIME_ENV="$(python3 - <<'PYTHON'
import json, os
names = ("WANDB_API_KEY", "E2B_API_KEY", "VLLM_SERVER_DEV_MODE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "http_proxy", "https_proxy", "no_proxy")
env = {name: os.environ[name] for name in names if os.environ.get(name)}
env["PYTHONPATH"] = ":".join(os.environ.get(name, name) for name in ("MEGATRON_DIR", "TRAINER_DIR"))
env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
print(json.dumps({"env_vars": env}))
PYTHON
)"
RUNTIME_ENV_FILE="$RUN_DIR/runtime-env.json"

if [[ $DRY_RUN == 0 ]]; then
  python3 -m sandlot.trainers.prepare "$ROLLOUT_FILE" "$RUN_DIR" --tasks "$PROMPT_DATA" --model "$HF_CHECKPOINT"
  mkdir -p "$RUN_DIR/checkpoints" "$RUN_DIR/rollouts"
  (umask 077 && printf '%s\n' "$RUNTIME_ENV" >"$RUNTIME_ENV_FILE")
fi
run ray job submit --address "$RAY_JOBS" --runtime-env "$RUNTIME_ENV_FILE" -- \
  python3 -u "${TRAINER_DIR:-TRAINER_DIR}/train.py" \
  "${MODEL_ARGS[@]}" "${HOOK_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${LOSS_ARGS[@]}" \
  "${PARALLEL_ARGS[@]}" "${ENGINE_ARGS[@]}" "${TRACKING_ARGS[@]}"
