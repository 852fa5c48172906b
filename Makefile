# `make demo` and `make test` do all of their own set-up, into .venv. See README.md.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
export PYTHON

.PHONY: help demo test coverage e2e-quick e2e lint format setup clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       agent sessions through HBM, DRAM and SSD with a real vLLM server: one table, one picture"
	@echo "make test       the tests that need no vLLM"
	@echo "make coverage   the same, and fails where a line or branch of policy/ or storage/ was not run"
	@echo "make e2e-quick  short tests with a real vLLM server;  make e2e: all of them"
	@echo "make lint       ruff and mypy;  make format: ruff format"
	@echo "make clean      remove .venv and everything built or made here"

$(READY): pyproject.toml CMakeLists.txt scripts/setup.sh e2e/vllm_stub.py $(wildcard csrc/*)
	@scripts/setup.sh

setup: $(READY)

demo: $(READY)
	@$(BIN)/python e2e/demo.py $(ARGS)

test: $(READY)
	$(BIN)/pytest tests -n 2 $(ARGS)

coverage: $(READY)
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest tests -n 2 $(ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

e2e-quick: $(READY)
	$(BIN)/pytest e2e/sched -n 2 $(ARGS)
	$(BIN)/pytest e2e --ignore=e2e/sched $(ARGS)

e2e: $(READY)
	$(BIN)/pytest e2e --slow $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist out models .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find saria_vllm -name '*.so' -delete
