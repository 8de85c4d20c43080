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

want=$( (echo "$torch $sglang $torchvision"; cat "$here/sglang-cpu-requirements.txt") | sha256sum | cut -d' ' -f1)
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
# The local version label keeps the CUDA build of torch out: where the index in use has only that one, this fails.
echo "torch==$torch+cpu" > "$constraints"
if ! PIP_CONSTRAINT="$constraints" "${pip[@]}" "torch==$torch"; then
  echo "no CPU build of torch $torch in your package index: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels" >&2
  exit 1
fi
"${pip[@]}" --no-deps "sglang==$sglang" "torchvision==$torchvision"
"${pip[@]}" --no-deps -r "$here/sglang-cpu-requirements.txt"
echo "$want" > "$stamp"
echo "SGLang $sglang installed in $venv"
