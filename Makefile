# PYTHON makes the virtual environment: make PYTHON=python3.12 venv
PYTHON ?= python3
NPROC ?= 2
ifndef RUN_DIR
RUN_DIR := runs/gpt-$(shell date +%Y%m%d-%H%M%S)
endif

TORCHES ?= 2.13.0 2.14.1 2.15.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-for
PEERS := build/peers
ZOO := build/zoo
CODE := src tests examples benchmarks website
# Tests wait for processes and for time: 3 workers keep two cores busy (98%), and 4 only make each
# test slower.
TESTED := $(BIN)/python -m pytest -q --durations=10 -n 3 --dist loadfile --no-loadscope-reorder

# Processes share the bytecode of what they import. Without it, each of them compiles all modules of lockstep.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv train test compiled commands both slow slurm verify matrix check sizes docs bench peers zoo dist clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## make .venv and install lockstep in it, under constraints.txt (again only where something changed)

# The stamp holds the folder that the installation is for. A virtual environment does not work elsewhere: in a copied or moved checkout it
# is made anew.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

# pip does not compile all modules, of which most are never imported: it takes half a minute.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11, which lockstep needs; name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@grep -qs '$(CURDIR)/$(BIN)/python' $(BIN)/pip && $(BIN)/pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV) (torch and what the tests need: some minutes the first time)"
	@$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@echo '$(CURDIR)' > $(STAMP)

train: venv ## train a small GPT on the text of Python's standard library, on NPROC=2 processes
	$(BIN)/lockstep run --nproc $(NPROC) --run-dir $(RUN_DIR) examples/gpt.py
	@echo
	@echo "The results are in $(RUN_DIR):"
	@ls -1 $(RUN_DIR) | sed 's/^/  /'

test: venv ## the tests, in a few minutes
	$(TESTED)

# pytest compiles the tests for itself. With -n, each process would do so at the same time.
compiled: venv
	@$(BIN)/python -m pytest -q --collect-only -m ''

commands: venv ## the tests of whole commands that take many seconds each
	$(TESTED) -m 'command and not slow' $$(grep -rl --include='test_*.py' 'mark\.command' tests)

both: venv ## test and commands in one session: while some wait, others compute
	$(TESTED) -m 'not slow'

slow: venv ## the slow tier: more than 3 processes, all launchers, all loader workers, the compiler
	$(BIN)/python -m pytest -q -m slow -o timeout=900 -o faulthandler_timeout=960

slurm: venv ## the tests on a real Slurm, which they start; says what is missing for it
	@for program in sbatch munged; do command -v $$program >/dev/null || { echo "no $$program here: the tests need Debian's packages slurm-wlm and munge (apt-get install slurm-wlm munge), and root" >&2; exit 2; }; done
	$(BIN)/python -m pytest -q -m '' -o timeout=400 tests/cli/test_slurm.py

verify: venv ## every plan verified on every model of tests/scripts/models.py, in fp32 and bf16: a table
	$(BIN)/python tests/matrix.py

matrix: ## the tests on each version of torch in TORCHES, one after another: a table
	$(PYTHON) tests/torch_matrix.py $(TORCHES)

check: venv ## ruff, mypy --strict, and the floors
	$(BIN)/ruff check $(wildcard $(CODE))
	$(BIN)/ruff format --check $(wildcard $(CODE))
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

sizes: ## the largest functions, classes, files and folders of the package: advice
	@$(PYTHON) tests/sizes.py

# A warning, a broken link, or a page that is not in the navigation fails it. Nothing is fetched.
docs: venv ## the documentation site, in build/site: open build/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file website/mkdocs.yml
	@echo "build/site/index.html"

bench: venv ## every benchmark: a table each, and JSON in build/benchmarks
	@mkdir -p build/benchmarks
	@for script in benchmarks/*.py; do \
		name=$$(basename $$script .py); echo "== $$name"; \
		$(BIN)/python $$script --json build/benchmarks/$$name.json || exit 1; \
	done

peers: $(PEERS)/.made ## lockstep beside loops by hand and other frameworks, in an environment of their own: tables, JSON and a picture
	@mkdir -p build/benchmarks
	$(PEERS)/bin/python benchmarks/peers --json build/benchmarks/peers.json
	$(PEERS)/bin/python benchmarks/peers/plot.py build/benchmarks/peers.json build/benchmarks/peers.svg

$(PEERS)/.made: benchmarks/peers/requirements.txt pyproject.toml
	@echo "installing what lockstep is compared with into $(PEERS) (some minutes)"
	@$(PYTHON) -m venv --clear $(PEERS)
	@$(PEERS)/bin/python -m pip install --quiet --requirement benchmarks/peers/requirements.txt --editable .
	@touch $@

zoo: $(ZOO)/.made ## lockstep audit on scripts with one fault each and their clean twins, in an environment of their own: a table
	$(ZOO)/bin/python tests/zoo/run.py

$(ZOO)/.made: tests/zoo/requirements.txt pyproject.toml
	@echo "installing what the scripts of the zoo are written with into $(ZOO) (some minutes)"
	@$(PYTHON) -m venv --clear $(ZOO)
	@$(ZOO)/bin/python -m pip install --quiet --requirement tests/zoo/requirements.txt --editable .
	@touch $@

dist: venv ## the sdist and the wheel in dist/, checked: installed into an empty environment, they train the README's recipe
	rm -rf dist src/*.egg-info  # the list of files in the latter would go on being used
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/dist.py dist

clean: ## remove the virtual environment, caches and built files (not runs/)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache src/*.egg-info
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +
