#!/usr/bin/env bash
# Install agents and clients of other people in a folder, and test the gateway with them: scripts/live_agents.sh PYTHON [FOLDER]
set -euo pipefail
python=$1
folder=${2:-$(mktemp -d)}
mkdir -p "$folder"
npm install --no-fund --no-audit --prefix "$folder" \
  @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0 opencode-ai@1.18.33
(cd "$folder/node_modules/@anthropic-ai/claude-code" && node install.cjs)
(cd "$folder/node_modules/opencode-ai" && node postinstall.mjs)

# A virtual environment on top of PYTHON's own, which stays as it is.
"$python" -m venv --without-pip "$folder/venv"
"$python" -c 'import site; print(site.getsitepackages()[0])' >"$("$folder/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/base.pth"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --disable-pip-version-check \
  openai-agents==0.24.0 'pydantic-ai-slim[anthropic,openai]==2.68.0' langgraph==1.2.24 langchain==1.5.2 \
  langchain-openai==1.7.4 langchain-anthropic==1.7.10 'smolagents[openai]==1.26.0' mini-swe-agent==2.4.6
PATH="$folder/node_modules/.bin:$PATH" "$folder/venv/bin/python" -m pytest -m slow \
  tests/gateway/test_live_clients.py tests/gateway/test_live_agents.py
