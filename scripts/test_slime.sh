#!/usr/bin/env bash
# Get slime's example with images, and run its files as they are: scripts/test_slime.sh PYTHON [FOLDER OF A CHECKOUT]
set -euo pipefail
python=$1
slime=${2:-}

if [ -z "$slime" ]; then
	slime=$(mktemp -d)
	git -C "$slime" init --quiet
	git -C "$slime" fetch --quiet --depth 1 https://github.com/THUDM/slime 624b824a898ab0ec1fcb4d373004c7f3852bf515
	git -C "$slime" checkout --quiet FETCH_HEAD
fi
AGENTRL_SLIME=$slime "$python" -m pytest tests/compat/test_geo3k.py
