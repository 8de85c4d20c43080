#!/usr/bin/env bash
# Install a real SGLang server for a CPU-only machine into its own virtual environment.
#
#   scripts/install_sglang_cpu.sh [VENV]        default: .venv-sglang
#
# SGLang pins a CUDA build of torch and about thirty CUDA-only packages, so it goes in without its dependencies
# and the ones that a CPU server needs come from scripts/sglang-cpu-requirements.txt. About two minutes, 3.4 GB.
# A stamp makes a second call a no-op; change any pin and the next call installs afresh.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-.venv-sglang}
python=${PYTHON:-python3}
torch=2.13.0
sglang=0.5.23
torchvision=0.28.0

want=$(cat "$here/install_sglang_cpu.sh" "$here/sglang-cpu-requirements.txt" | sha256sum | cut -d' ' -f1)
stamp="$venv/.agentrl-sglang"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  echo "SGLang $sglang is already installed in $venv"
  exit 0
fi

"$python" -m venv "$venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1
pip=("$venv/bin/python" -m pip install --quiet)
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
# Never pull the CUDA build in: on Linux the CPU build is the one with the local version label.
echo "torch==$torch+cpu" > "$constraints"
if ! PIP_CONSTRAINT="$constraints" "${pip[@]}" "torch==$torch"; then
  PIP_CONSTRAINT="$constraints" "${pip[@]}" --extra-index-url https://download.pytorch.org/whl/cpu "torch==$torch"
fi
"${pip[@]}" --no-deps "sglang==$sglang" "torchvision==$torchvision"
"${pip[@]}" --no-deps -r "$here/sglang-cpu-requirements.txt"
echo "$want" > "$stamp"
echo "SGLang $sglang installed in $venv"
