#!/usr/bin/env bash
# Install verifiers and gymnasium in a folder, and test their adapters: scripts/test_adapters.sh PYTHON [FOLDER]
set -euo pipefail
python=$1
folder=${2:-$(mktemp -d)}

# A virtual environment on top of PYTHON's own, which stays as it is. verifiers needs other versions of openai and mcp.
"$python" -m venv --without-pip "$folder/venv"
"$python" -c 'import site; print(site.getsitepackages()[0])' >"$("$folder/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/base.pth"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --disable-pip-version-check verifiers==0.4.0 'gymnasium==1.4.*'
"$folder/venv/bin/python" -m pytest tests/adapters/test_gymnasium.py tests/adapters/test_verifiers.py tests/examples/test_verifiers_calculator.py
