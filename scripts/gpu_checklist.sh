#!/usr/bin/env bash
# 25 minutes on one GPU, the most valuable step first. Each step has its own limit, a log, and one line of output.
#
#   scripts/gpu_checklist.sh OUT [MODEL]
#
# OUT: a folder for logs, an absolute path or below the clone. MODEL: a folder of about 0.6 B parameters (Qwen3-0.6B); without it the steps with SGLang use the
# demo's model. PYTHON: the interpreter with agentrl, default python. SGLANG: one with sglang; without it these steps are skipped.
set -u
out=${1:?usage: gpu_checklist.sh OUT [MODEL]} model=${2:-} python=${PYTHON:-python} sglang=${SGLANG:-}
cd "$(dirname "$0")/.." && mkdir -p "$out" && out=$(realpath "$out")

step() { # NAME SECONDS COMMAND...: run it within its limit, and say how it ended
    local name=$1 limit=$2 start=$SECONDS status=0
    shift 2
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
    echo "$name: status $status after $((SECONDS - start)) s; $out/$name.log"
}

train() { # FLAGS...: three rollouts of the demo's task with SGLang on the shared GPU
    "$python" -m agentrl train --env agentrl.demo.task:CalculatorEnv --engine sglang --engine-python "$sglang" \
        --device cuda --colocate --actor-num-gpus-per-node 1 --sglang-mem-fraction-static 0.5 --num-rollout 3 \
        --hf-checkpoint "${model:-agentrl/tiny/models/calculator}" \
        --prompt-data "$out/train.jsonl" --input-key prompt --label-key label "$@"
}
data='import pathlib, sys; from agentrl.demo.data import write_train_and_test as write; write(pathlib.Path(sys.argv[1]), train_count=64, seed=0)'
"$python" -c "$data" "$out"
export out python sglang model
export -f train

# 1. The trainer's numbers on this GPU: log-probs, gradients, packing, checkpoints.
step tests 240 "$python" -m pytest -q -p no:cacheprovider -m "not slow" tests/train/megatron/test_cuda.py tests/train/fsdp
# 2. The whole loop; the trainer on the GPU, the built-in engine on the CPU.
step demo 120 "$python" -m agentrl.demo --device cuda
# 3. The shared device with SGLang. Each rollout: train/train_rollout_logprob_abs_diff below .05, with LoRA too. First CUDA
#    handles of memory between two processes, bit for bit; `ipc` sends SGLang its weights so.
step handles 60 "$python" -m pytest -q -p no:cacheprovider tests/numerics/test_shared_handle.py
if [ -n "$sglang" ]; then
    step colocate 240 bash -c 'train --output-dir "$0/colocate"' "$out"
    step ipc 180 bash -c 'train --update-weight-mode ipc --output-dir "$0/ipc"' "$out"
    step colocate_lora 180 bash -c 'train --lora-rank 16 --output-dir "$0/lora"' "$out"
else
    echo "colocate, ipc, colocate_lora: skipped, SGLANG is not set"
fi
# 4. A step at 0.6 B beside plain transformers, and long samples: seconds and memory.
step speed 150 "$python" -m benchmarks.trainer_gpu
step long 150 "$python" -m benchmarks.trainer_gpu --groups 2 --per-group 2 --prompt 1024 --answer 31744
# 5. Linear attention and images under FSDP2.
step families 150 "$python" -m pytest -q -p no:cacheprovider tests/train/fsdp/test_vision.py -m "not slow"
