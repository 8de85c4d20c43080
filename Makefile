# Everything that people and CI do here. Needs Python 3.11 or newer with pip; PYTHON=... picks another one.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: venv demo example-search example-retool test test-nightly test-sglang lint bench clean
.DEFAULT_GOAL := test

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agentrl needs Python 3.11 or newer: make venv PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv
	$(BIN)/python -m agentrl.demo

example-search: venv
	$(BIN)/python -m examples.search_r1.run --seed $(or $(SEED),0)

example-retool: venv
	$(BIN)/python -m examples.retool.run --seed $(or $(SEED),0)

test: venv
	$(BIN)/python -m pytest -m 'not slow and not sglang'

test-nightly: venv
	$(BIN)/python -m pytest -m 'not sglang'

test-sglang: venv
	scripts/install_sglang_cpu.sh .venv-sglang
	$(BIN)/python -m pytest -m sglang

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: venv
	for name in rollout_client rollout_path chat_delta embedded_engine packing search sandbox graders; do \
		echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
