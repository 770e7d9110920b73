# The verbs of this project. `make demo` and `make test` need Python 3.11, make and git; they fetch the rest.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-

.PHONY: help demo test check unit acceptance gpu clean

help:
	@echo "make demo        train a small FP8 model, break it, watch it being saved (about 3 minutes)"
	@echo "make test        lint, types, import contracts and the suite (under 10 minutes after set-up)"
	@echo "make acceptance  the long proofs, writing bench/results (up to 90 minutes)"
	@echo "make gpu         tests and measurements on a GPU host whose GPU_PYTHON has torch and Transformer Engine"
	@echo "make clean       remove the virtual environment and caches"

demo: $(STAMP)demo
	$(BIN)/fp8watch demo $(DEMO_ARGS)

test: $(STAMP)dev system check unit

check: $(STAMP)dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two at a time, a file on one worker (its launches are shared): half of the time is spent waiting for processes.
unit: $(STAMP)dev
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

acceptance: $(STAMP)dev
	$(BIN)/python bench/scenarios.py
	$(BIN)/python bench/failover.py
	$(BIN)/python bench/faults.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/agreement_stress.py
	$(BIN)/python bench/rollback.py
	$(BIN)/python bench/detection.py
	$(BIN)/python bench/leave_one_source_out.py
	$(BIN)/python bench/replay_throughput.py
	$(BIN)/python bench/replay_fuzz.py
	$(BIN)/python bench/fuzz_wire.py

# The host's own Python, for torch and Transformer Engine are built for its GPU and driver.
GPU_PYTHON ?= python3
gpu:
	PYTHONPATH=.:agent:dashboards $(GPU_PYTHON) -m pytest tests/gpu $(PYTEST_ARGS)
	PYTHONPATH=.:agent:dashboards $(GPU_PYTHON) bench/capture.py

.PHONY: system
system:
	@scripts/system-packages.sh

# One stamp an extra set: installed again when a dependency file changed.
$(STAMP)%: pyproject.toml constraints.txt
	@scripts/make-venv.sh $(PYTHON) $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@

clean:
	rm -rf $(VENV) .fp8watch .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
