# Every command the README promises. Set-up happens by itself and is safe to repeat.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A process for each core, and each file of tests in one of them.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

.PHONY: setup run test slow check bench clean

setup: $(READY)

# The stamp is written last, so a set-up that was interrupted starts again. pip compiles on one core, compileall on all.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "halfstep needs Python 3.11 or newer, this is %d.%d: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[torch,dev]'
	@$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $(READY)

run: $(READY)
	$(BIN)/halfstep compare charlm --json report.json --html report.html

test: $(READY)
	$(PYTEST)

slow: $(READY)
	$(PYTEST) -m slow

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/halfstep lint .
	$(PYTEST)

bench: $(READY)
	@for file in benchmarks/bench_*.py benchmarks/memory.py benchmarks/peer_table.py benchmarks/log_probs.py benchmarks/planner.py benchmarks/lint_precision.py; do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf $(VENV) report.html report.json
