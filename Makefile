# `make` alone lists the targets. Everything lands in .venv and .tools, both ignored by git.

PYTHON ?= # which Python makes .venv; empty: the newest that will do
INPUT ?=
MESSAGES ?=
OBSERVE ?=
ARGS ?=
BENCH ?= run publisher

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet install

# Floors 1 to 5 of the house, up to the state machine: no branch of them goes untested.
CORE := nsqdedupe/errors.py,nsqdedupe/clock.py,nsqdedupe/discretion.py,nsqdedupe/unstarted.py,nsqdedupe/eager.py,nsqdedupe/store.py,nsqdedupe/metrics.py,nsqdedupe/checks.py,nsqdedupe/pauses.py,$\
nsqdedupe/fingerprint.py,nsqdedupe/ids.py,nsqdedupe/permits.py,nsqdedupe/sizing.py,$\
nsqdedupe/delivery.py,nsqdedupe/ledger.py,nsqdedupe/port.py,$\
nsqdedupe/waiting.py,nsqdedupe/tables/*,nsqdedupe/stores/*,nsqdedupe/memcached/*,nsqdedupe/calls.py,nsqdedupe/offload.py,$\
nsqdedupe/registry.py,nsqdedupe/observer.py,nsqdedupe/outcomes.py,nsqdedupe/keeper.py,nsqdedupe/traces.py,nsqdedupe/shortcut.py,nsqdedupe/together.py,nsqdedupe/unprotected.py,nsqdedupe/deduper.py

# Every recipe that needs servers starts with this line.
SERVERS = NSQ_BIN_DIR="$$($(PY) tools/build-nsq --print-dir)" && \
  MEMCACHED="$$($(PY) tools/get-memcached --print-path)" && export NSQ_BIN_DIR MEMCACHED

.DEFAULT_GOAL := help
.PHONY: help install lint format types wheel test pynsq-tests servers mutants mutmut demo demo-cluster bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: .venv/dev.stamp ## the package and all developer tools into .venv

.venv/python.stamp:
	@python=$$(tools/find-python $(PYTHON)) && \
	  echo "install: .venv with $$("$$python" --version)" && \
	  "$$python" -m venv --clear .venv
	@touch $@

.venv/runtime.stamp: .venv/python.stamp pyproject.toml
	@echo "install: the package"
	@$(PIP) --editable '.[json,cli,memcached]'
	@touch $@

# pip knows dependency groups since 25.1.
.venv/dev.stamp: .venv/runtime.stamp
	@echo "install: the developer tools"
	@$(PIP) --upgrade 'pip>=25.1'
	@$(PIP) --group test --group lint
	@touch $@

.venv/mutation.stamp: .venv/dev.stamp
	@echo "install: mutmut"
	@$(PIP) --group mutation
	@touch $@

.venv/bench.stamp: .venv/dev.stamp
	@echo "install: what the benchmarks compare with and draw with"
	@$(PIP) --group bench
	@touch $@

lint: .venv/dev.stamp types ## ruff, its formatter, mypy, pyright
	@$(PY) -m ruff check . tools/build-nsq tools/get-memcached tools/pynsq-tests
	@$(PY) -m ruff format --check . tools/build-nsq tools/get-memcached tools/pynsq-tests

types: .venv/dev.stamp ## mypy, and pyright on programs as users write them
	@$(PY) -m mypy
	@$(PY) -m mypy --strict --config-file= tests/typing/*.py
	@.venv/bin/basedpyright --pythonpath $(PY) --project tests/typing/pyrightconfig.json
	@$(PY) -m mypy --strict examples/*.py
	@$(PY) -m mypy --strict benchmarks/*.py
	@$(PY) -m mypy --strict tools/mut*.py

format: .venv/dev.stamp ## rewrite the code as the formatter has it
	@$(PY) -m ruff check --quiet --select I --fix . tools/build-nsq tools/get-memcached tools/pynsq-tests
	@$(PY) -m ruff format . tools/build-nsq tools/get-memcached tools/pynsq-tests

servers: .venv/python.stamp ## find nsqd, nsqlookupd 1.3 and memcached, or build and install them
	@$(PY) tools/build-nsq
	@$(PY) tools/get-memcached

wheel: .venv/dev.stamp ## build the wheel, and install it in place of the checkout (until make clean)
	@rm -rf dist && $(PY) -m pip --disable-pip-version-check --quiet wheel --no-deps --wheel-dir dist .
	@$(PIP) --force-reinstall --no-deps dist/*.whl

test: .venv/dev.stamp ## every test, on real servers, with branch coverage (ARGS: pytest options)
	@$(SERVERS) && $(PY) -P -m pytest -n 2 --cov --cov-report=term-missing:skip-covered $(ARGS)
	@seen=$$($(PY) -m coverage report --include='$(CORE)' --show-missing --fail-under=100) || { echo "$$seen"; exit 1; }

pynsq-tests: .venv/dev.stamp ## pynsq's own tests, on its reader and on ours (PYNSQ_SOURCE: where to clone them from)
	@$(SERVERS) && $(PY) tools/pynsq-tests $(if $(PYNSQ_SOURCE),--source '$(PYNSQ_SOURCE)') $(ARGS)

mutants: .venv/dev.stamp ## break the state machine in known ways: do the tests notice? (ARGS: a part of a name)
	@$(SERVERS) && $(PY) tools/mutants.py $(ARGS)

mutmut: .venv/mutation.stamp ## change floors 1 to 5 in every small way: an hour (ARGS: a part of a module's name, --report)
	@$(PY) tools/mutation_score.py '$(CORE)' $(ARGS)

demo: .venv/runtime.stamp ## two nsqds, consumers, kills: what is lost? (INPUT=FILE, MESSAGES=N, OBSERVE=1)
	@$(SERVERS) && $(PY) -m nsqdedupe demo $(if $(INPUT),--input '$(INPUT)') $(if $(MESSAGES),--messages '$(MESSAGES)') \
	  $(if $(filter-out 0,$(OBSERVE)),--observe) $(ARGS)

demo-cluster: .venv/runtime.stamp ## consumers that share a memcached, kills: what is lost? (MESSAGES=N)
	@$(SERVERS) && $(PY) -m nsqdedupe demo-cluster $(if $(MESSAGES),--messages '$(MESSAGES)')

bench: .venv/bench.stamp ## run the benchmarks (BENCH: names of some, ARGS: their options)
	@$(SERVERS) && for name in $(BENCH); do $(PY) benchmarks/$$name.py $(ARGS) || exit 1; done

clean: ## remove all that was installed, built or cached
	@rm -rf .venv .tools build dist .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
