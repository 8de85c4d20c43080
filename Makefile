# Everything that people and CI do here. Needs Python 3.11 or newer with pip; PYTHON=... picks another one.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Four tests at a time, those of one file one after another, the longest files first (tests/support/order.py): many of
# them wait for processes, so that four keep two cores busy. They are forked from one that has imported the heavy packages
# (tests/support/warm.py).
AT_ONCE := -n 4 --dist loadfile --warm
# Hundreds of processes start in a test run: each would compile the package anew where the environment forbids a cache.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: venv demo example-search example-retool test test-nightly test-all test-weekly test-agents test-adapters test-slime soak test-sglang test-browser test-without-compat coverage lint docs bench clean
.DEFAULT_GOAL := test

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agentrl needs Python 3.11 or newer: make venv PYTHON=python3.11")'
	@echo "Installing into $(VENV), once: about 2.5 GB on disk, one to five minutes with a fast line. Next times this is skipped."
	@echo "  1/3 a virtual environment"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  2/3 PyTorch (the largest part, quiet until it is there)"
	@$(INSTALL) torch==2.13.0
	@echo "  3/3 agentrl with Ray, megatron-core, transformers and the tools of its tests"
	@$(INSTALL) -e '.[dev]'
	@touch $@
	@echo "Installed. \`source $(VENV)/bin/activate\` puts the command agentrl on your path."

demo: venv
	$(BIN)/python -m agentrl.demo

example-search: venv
	$(BIN)/python -m examples.search_r1.run --seed $(or $(SEED),0)

example-retool: venv
	$(BIN)/python -m examples.retool.run --seed $(or $(SEED),0)

test: venv
	$(BIN)/python -m pytest $(AT_ONCE) -m 'not slow and not sglang and not browser'

# Each part runs to its end; then a list of what failed. Outputs are in build/nightly/.
test-nightly: venv
	$(BIN)/python scripts/nightly.py

test-all: venv
	$(BIN)/python -m pytest $(AT_ONCE) -n auto --hypothesis-profile nightly -m 'not sglang and not soak and not weekly'

# Further forms of slow tests: other seeds, layouts and killed processes.
test-weekly: venv
	$(BIN)/python -m pytest $(AT_ONCE) -n auto --hypothesis-profile nightly -m weekly

# Under an hour; AGENTRL_SOAK_GROUPS=2000 makes it minutes.
soak: venv
	$(BIN)/python -m pytest -m soak --log-cli-level=WARNING tests/run/test_soak.py

test-agents: venv
	scripts/live_agents.sh $(abspath $(BIN)/python)

test-adapters: venv
	scripts/test_adapters.sh $(abspath $(BIN)/python)

# SLIME=DIR names a checkout of slime; else one is fetched.
test-slime: venv
	scripts/test_slime.sh $(abspath $(BIN)/python) $(SLIME)

test-sglang: venv
	scripts/install_sglang_cpu.sh .venv-sglang
	$(BIN)/python -m pytest -m sglang

test-browser: venv
	$(BIN)/python -m pytest -m browser tests/viewer

test-without-compat: venv
	scripts/without_compat.sh $(abspath $(BIN)/python) $(AT_ONCE)

coverage: venv
	$(BIN)/python -m pytest -m 'not slow and not sglang and not browser' --cov --cov-report=term:skip-covered --cov-report=html

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_language.py

docs: venv
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build
	@echo "build/site/index.html; to search in it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

bench: venv
	for name in rollout_client rollout_path chat_delta embedded_engine packing search sandbox graders; do \
		echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

clean:
	rm -rf build dist .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
