# Two commands: `make quickstart` runs the whole loop here, `make test` runs the tests. Each installs what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=

.PHONY: quickstart test lint docs install install-dev clean

quickstart: install
	$(BIN)/sandlot quickstart $(ARGS)

test: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

docs: install-dev
	$(BIN)/mkdocs build --strict

$(VENV)/.installed: pyproject.toml constraints/run.txt tools/prepare.sh
	sh tools/prepare.sh "$(PYTHON)" "$(VENV)"
	$(BIN)/python -m pip install --quiet --require-hashes -r constraints/run.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed constraints/dev.txt
	sh tools/prepare.sh "$(PYTHON)" "$(VENV)" shellcheck newuidmap:uidmap linux.uml:user-mode-linux
	$(BIN)/python -m pip install --quiet --require-hashes -r constraints/dev.txt
	touch $@

clean:
	rm -rf $(VENV) build dist site
