# Everything runs in .venv, which the first target makes: Python 3.12 or 3.13 from PATH or pyenv, then pip.
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
PYTEST := $(BIN)/python -m pytest
# Tests that start ranks run one after another in one worker, whatever their number (tests/conftest.py).
WORKERS ?= 2
PARALLEL := --numprocesses=$(WORKERS)
RINGS := $(wildcard tests/policy tests/unit tests/property tests/golden tests/hooks tests/distributed tests/examples tests/e2e tests/gpu)

.PHONY: help install demo learn rlhf test test-pure test-gpu lint cross-check format invariance kills bench-instruction bench-search \
	bench-paper bench-estimator bench-speedup bench-realloc bench-realloc-plan clean

help:
	@echo "make demo               pretrain a small GPT, then PPO under a plan on four ranks (CPU; about 10 minutes)"
	@echo "make learn              every algorithm learns a small task (CPU; three seeds each; about 15 minutes)"
	@echo "make learn ALGORITHM=\"grpo dapo\"    these alone"
	@echo "make rlhf               pretrain, SFT, reward model, PPO with it; win rate over SFT (CPU; about 6 minutes)"
	@echo "make test               lint and every test that this machine can run"
	@echo "make test-pure          the tests without processes"
	@echo "make test-gpu           the tests that need CUDA"
	@echo "make lint               ruff, import-linter, mypy"
	@echo "make cross-check        installs TRL; losses and advantages equal its own to 1e-5"
	@echo "make invariance         the same PPO run under many plans, one JSON line per plan (4 minutes)"
	@echo "make invariance ALGORITHM=grpo    that algorithm (or all) under four plans; one table"
	@echo "make kills              runs killed at random moments and resumed: losses as if nothing had been"
	@echo "make bench-instruction  cost of one instruction with null calls"
	@echo "make bench-search       every search strategy on clusters of 16 to 1,024 GPUs (about 40 minutes)"
	@echo "make bench-paper        predicted step times beside those that the ReaL paper published"
	@echo "make bench-estimator    prices and memory against published measurements"
	@echo "make bench-speedup      presets and the searched plan, run for real on 2 and 4 CPU ranks (20 minutes)"
	@echo "make bench-realloc      reallocation beside Megatron's own, a checkpoint and the bare wire (10 minutes)"
	@echo "make bench-realloc-plan planning a reallocation for up to 4,096 ranks"

$(STAMP): setup.py megatron_real.pth .ci/find-python
	@python="$$(PYTHON='$(PYTHON)' .ci/find-python)" && { test -x $(BIN)/python || "$$python" -m venv $(VENV); }
	@echo "installing into $(VENV)"
	@$(BIN)/python -m pip install --quiet --editable '.[megatron,dev]'
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

learn: $(STAMP)
	@$(BIN)/python benchmarks/learn.py $(ALGORITHM)

rlhf: $(STAMP)
	@$(BIN)/python examples/rlhf.py

test: $(STAMP)
	@$(PYTEST) $(PARALLEL) $(RINGS) $(PYTEST_ARGS)

test-pure: $(STAMP)
	@$(PYTEST) $(PARALLEL) $(wildcard tests/policy tests/unit tests/property tests/golden) $(PYTEST_ARGS)

test-gpu: $(STAMP)
	@$(PYTEST) tests/gpu -m gpu $(PYTEST_ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/lint-imports --cache-dir $(VENV)/.import_linter > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@$(BIN)/mypy --no-error-summary

cross-check: $(STAMP)
	@$(BIN)/python -m pip install --quiet --editable '.[trl]'
	@$(PYTEST) tests/unit/algorithms/test_trl.py $(PYTEST_ARGS)

format: $(STAMP)
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

invariance: $(STAMP)
	@$(BIN)/python benchmarks/$(if $(ALGORITHM),algorithm_invariance.py $(ALGORITHM),invariance.py)

kills: $(STAMP)
	@$(BIN)/python benchmarks/kills.py

bench-instruction: $(STAMP)
	@$(BIN)/python benchmarks/instruction_cost.py

bench-search bench-paper bench-estimator bench-speedup bench-realloc: bench-%: $(STAMP)
	@$(BIN)/python benchmarks/$*.py

bench-realloc-plan: $(STAMP)
	@$(BIN)/python benchmarks/realloc_plan.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
