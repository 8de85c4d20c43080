#!/usr/bin/env bash
# Runs tests in a copy of this checkout without agentrl/compat: nothing else may need it. No package imports it
# (`lint-imports`), so these are the tests of what could look for it by name: settings, commands, runs.
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$(mktemp -d)
chmod 755 "$copy" # a test starts programs there as an ordinary user
trap 'rm -rf "$copy"' EXIT
git ls-files -z | grep -zvE '^(agentrl|tests)/compat/' | xargs -0 cp --parents -t "$copy"
cd "$copy"
git init -q
PYTHONPATH=$copy "$1" -m pytest -m 'not slow and not sglang and not browser' "${@:2}" \
    tests/config tests/cli tests/run tests/check tests/cluster tests/rollout tests/buffer tests/data tests/test_*.py
