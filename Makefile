# `make quickstart` trains a first model, `make test` proves the whole. Both first make .venv, with the tested releases.

PYTHON = python3
TESTFLAGS =

STAMP = .venv/.made
PIP = .venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt
OLD = error: $(PYTHON) is missing or older than Python 3.11: install a newer one, or name it: make PYTHON=/path/to/it

.PHONY: env quickstart test clean

env: $(STAMP)

quickstart: $(STAMP)
	.venv/bin/mtm quickstart

test: $(STAMP)
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(TESTFLAGS)

# torch first: it is by far the largest, and whatever goes wrong with it is seen at once
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(OLD)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[test]'
	@touch $@

# runs/ stays: trained models are never removed by a build tool
clean:
	rm -rf .venv build *.egg-info .pytest_cache .hypothesis .ruff_cache
	find mtmegatron tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
