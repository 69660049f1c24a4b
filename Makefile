# One command from green: `make run` serves, `make test` tests. Both set up what they need first.
# Stamp files remember what is done, so a second `make run` starts the server at once.

VENV ?= .venv
PY := $(VENV)/bin/python
RUN_STAMP := $(VENV)/.set-up-run
DEV_STAMP := $(VENV)/.set-up-dev
AGENT := agent/build/capsule-agent
AGENT_ASAN := agent/build/asan/capsule-agent
AGENT_SOURCES := $(wildcard agent/*.c agent/*.h) agent/flags.txt agent/build_agent.py
PINS := pyproject.toml scripts/setup hatch_build.py
SOURCES := src sdk tests bench examples docs hatch_build.py agent/build_agent.py

export VENV
# Set-up writes nothing outside the clone.
export PIP_CACHE_DIR ?= $(CURDIR)/.cache/pip
export ZIG_GLOBAL_CACHE_DIR ?= $(CURDIR)/.cache/zig
# Tests start Python a thousand times: somebody who keeps it from remembering what it compiled would wait for that.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run test test-docker check fmt bench chaos endure wheel agent agent-asan docs pins clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(DEV_STAMP) $(AGENT)  ## make .venv with all that development needs, and build the agent

run: $(RUN_STAMP) $(AGENT)  ## serve on http://localhost:8080
	@exec $(VENV)/bin/capsule serve $(ARGS)

test: $(DEV_STAMP) $(AGENT) $(AGENT_ASAN)  ## run the tests; with CI=true all of them: installs what is missing
	@$(PY) -m tests.run $(ARGS)

test-docker: $(DEV_STAMP) $(AGENT) $(AGENT_ASAN)  ## run only the tests that need a Docker Engine
	@$(PY) -m tests.run --docker

check: $(DEV_STAMP) $(AGENT) $(wildcard $(AGENT_ASAN))  ## formatting, lint, types and unit tests, in less than a minute
	$(VENV)/bin/ruff format --check -q $(SOURCES)
	$(VENV)/bin/ruff check -q $(SOURCES)
	@$(MAKE) --no-print-directory -j2 --output-sync types units

# What starts sandboxes is no unit test.
.PHONY: types units
types:
	$(VENV)/bin/mypy
units:
	$(VENV)/bin/pytest -q -n 2 -m "not slow and not serial and not real" tests/unit tests/meta

fmt: $(DEV_STAMP)  ## format, and fix what can be fixed
	$(VENV)/bin/ruff format -q $(SOURCES)
	$(VENV)/bin/ruff check -q --fix $(SOURCES)

bench: $(DEV_STAMP) $(AGENT)  ## measure, print a table, write bench/results/
	@$(PY) -m bench.run $(ARGS)

chaos: $(DEV_STAMP) $(AGENT)  ## kill a server under its clients, and check all that it answered; ARGS="--minutes 30 --seed 7"
	@$(PY) -m tests.chaos $(ARGS)

endure: $(DEV_STAMP) $(AGENT)  ## 1,000 sandboxes in a row, and what grows; ARGS="--count 10000"
	@$(PY) -m bench.endure $(ARGS)

wheel: $(DEV_STAMP)  ## self-contained wheels for x86-64 and arm64, and the sdist, in dist/
	@scripts/wheel

docs: $(DEV_STAMP)  ## write the generated pages under docs/ again
	$(PY) docs/generate.py

agent: $(AGENT)  ## build the agent
agent-asan: $(AGENT_ASAN)  ## build the agent with AddressSanitizer and UBSan

$(AGENT): $(AGENT_SOURCES) | $(RUN_STAMP)
	@$(PY) agent/build_agent.py $@

$(AGENT_ASAN): $(AGENT_SOURCES) | $(RUN_STAMP)
	@$(PY) agent/build_agent.py --sanitize $@

$(RUN_STAMP): requirements/run.txt $(PINS)
	@scripts/setup run
	@touch $@

$(DEV_STAMP): requirements/dev.txt $(RUN_STAMP)
	@scripts/setup dev
	@touch $@

# A .venv that another user or another Python made is made again, not stumbled over.
ifeq ($(shell $(PY) -c 'print(1)' 2>/dev/null),)
.PHONY: $(RUN_STAMP) $(DEV_STAMP)
endif

pins:  ## resolve requirements/*.txt anew
	@scripts/pins

clean:  ## remove everything that was built
	rm -rf $(VENV) dist agent/build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
