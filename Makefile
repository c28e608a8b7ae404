# Every target does its own set-up in a virtual environment of this checkout. Needed: Python 3.11 or
# newer, with pip.
#
#   make train [ARGS="--preset ..."]    train the MoE Transformer on 8 simulated devices; resumes when
#                                       interrupted
#   make test [PYTEST_ARGS="-k ..."]    lint, types, import layers, and the cases of the gate
#                                       (tests/gate.py); docs/testing.md says how to run others
#   make test-newest                    the tests of what may change with JAX, on a newer Python with the
#                                       newest supported JAX, where there is one (NEWEST_TESTS="tests examples": all)
#   make test-tpu                       the tests that compile for TPU ahead of time (installs libtpu,
#                                       large; needs no TPU)
#   make test-multiprocess [ARGS="..."] the tests that run in two and in four processes of this machine
#                                       (ARGS: --processes 2, -k train)
#   make screenshots                    reports in JupyterLab, Notebook 7 and Chromium
#   make real [ARGS="--only NAME"]      programs of other packages beside jax.jit (installs the packages)
#   make laws [EXHAUSTIVE=all]          all cases of the tests that other runs sample (tests/slices.py),
#                                       except for these, which it samples, too: conversions on three
#                                       mesh axes, round trips of conversions, paths of conversions,
#                                       meshes of the training step; `all` runs all and takes hours
#   make fuzz [ARGS="--seeds 0:1000"]   random programs on every mesh against one device; failing ones
#                                       are minimised and printed
#   make peer [ARGS="--share 0.25"]     JAX's own tests (tests/peer) with every outermost jax.jit replaced by
#                                       sbp.jit: passed, failed, not applicable with reasons
#   make deep [ONLY="laws test-tpu"]    all tests with all their cases; writes docs/deep.md; resumes when
#                                       interrupted
#   make lock                           the gate's cases of the test files that changes concern; those that
#                                       pass do not run in the gate until something they ran changes
#   make mutants [ARGS="--count 200"]   faults put into the package, and which cases find them
#   make notebooks [PYTEST_ARGS="-k 05"] run the notebooks and write their outputs anew
#   make bench [ARGS="..."]             the benchmarks, compiled for TPU ahead of time
#   make docs                           the documentation site, in build/docs; warnings are errors
#   make format / make lint / make clean

VENV := .venv
NEWEST := .venv-newest
REAL := .venv-real
PY := $(VENV)/bin/python
# The newest JAX: the tests that run with it, and what they need.
NEWEST_TESTS ?= @tests/newest.txt
NEWEST_EXTRAS ?= test
NEWEST_INSTALLED := $(NEWEST)/.installed-$(NEWEST_EXTRAS)
TEST_JOBS ?= 2
EXHAUSTIVE ?= 1
SLICED_TESTS = $(shell grep -rl 'pytest.mark.laws' tests examples --include='test_*.py')

PYENV := $(HOME)/.pyenv/versions
PYTHONS := python3.11 python3.12 python3.13 python3 python $(PYENV)/3.11*/bin/python $(PYENV)/3.1[2-9]*/bin/python
NEWER_PYTHONS := python3.12 python3.13 $(PYENV)/3.12*/bin/python $(PYENV)/3.13*/bin/python python3

# $(call first-python,candidates,minor): the first candidate that runs (a shim may exist and not run)
# and is at least Python 3.minor.
first-python = for p in $(1); do if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, $(2)))' >/dev/null 2>&1; then echo "$$p"; break; fi; done

# $(call make-venv,python,folder): keeps an environment that works; without the ensurepip module, pip is
# installed by the pip of `python`.
make-venv = "$(2)/bin/python" -m pip --version >/dev/null 2>&1 || "$(1)" -m venv "$(2)" \
	|| { "$(1)" -m venv --clear --without-pip "$(2)" && "$(1)" -m pip --python "$(2)/bin/python" install pip; }

# $(call needing,target,reason,command): a command that needs a target whose packages come from the
# network. Without a network the stage says what it leaves out, and ends well.
no-network = ! $(PY) -m pip download --quiet --no-deps --no-cache-dir --dest build/network wheel
needing = @if $(MAKE) --no-print-directory $(1); then $(3); elif $(no-network); then echo "$@: $(2)"; else exit 1; fi

TPU_AOT_ENV := TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v4-8 TPU_WORKER_HOSTNAMES=localhost JAX_PLATFORMS=cpu ALLOW_MULTIPLE_LIBTPU_LOAD=1

PYTEST = pytest -n $(TEST_JOBS) --dist worksteal

.PHONY: docs train test test-all laws lock notebooks test-newest test-on-newest test-tpu test-multiprocess screenshots real fuzz deep mutants peer bench lint format clean

train: $(VENV)/.installed-gshard
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(PY) -m sbp train $(ARGS)

test: lint
	$(PY) -m $(PYTEST) --gate --seconds=build/gate.tsv $(PYTEST_ARGS)

test-all: $(VENV)/.installed
	$(PY) -m $(PYTEST) $(PYTEST_ARGS)

laws: $(VENV)/.installed
	SBP_EXHAUSTIVE=$(EXHAUSTIVE) $(PY) -m $(PYTEST) -m laws $(SLICED_TESTS) $(PYTEST_ARGS)

lock: $(VENV)/.installed
	$(PY) -m tests.lock $(ARGS)

notebooks: $(VENV)/.installed
	SBP_UPDATE_GOLDEN=1 $(PY) -m pytest -q tests/test_notebooks.py -k outputs $(PYTEST_ARGS)

test-newest:
	@python=$$($(call first-python,"$(NEWEST)/bin/python" $(NEWER_PYTHONS),12)); \
	if [ -z "$$python" ]; then \
		echo "test-newest: Python 3.12 or newer is absent here; the newest JAX was not tested"; \
	else \
		$(MAKE) --no-print-directory NEWEST_PYTHON="$$python" test-on-newest; \
	fi

test-on-newest:
	$(call needing,$(NEWEST_INSTALLED),the newest JAX could not be installed and was not tested,\
	$(NEWEST)/bin/python -c 'import jax; print("test-newest: JAX", jax.__version__)' \
	&& $(NEWEST)/bin/python -m $(PYTEST) $(NEWEST_TESTS) $(PYTEST_ARGS))

test-tpu:
	$(call needing,$(VENV)/.installed-tpu,libtpu could not be installed; nothing was compiled for TPU,\
	$(TPU_AOT_ENV) $(PY) -m pytest tests/tpu -m tpu $(PYTEST_ARGS))

test-multiprocess: $(VENV)/.installed
	$(PY) -m tests.multiprocess.run $(ARGS)

screenshots:
	$(call needing,$(VENV)/.installed-screenshots,JupyterLab could not be installed; no layout was tested,\
	$(PY) -m $(PYTEST) tests/screenshots $(PYTEST_ARGS))

real: $(VENV)/.installed-gshard
	$(call needing,$(REAL)/.installed,the packages could not be installed; no program of theirs ran,\
	$(REAL)/bin/python -m benchmarks.real_programs $(ARGS))

deep: $(VENV)/.installed
	$(PY) -m tests.deep $(ONLY)

mutants: $(VENV)/.installed build/lines
	$(PY) -m tests.mutants.run --lines=build/lines --seconds=build/seconds.tsv $(ARGS)

# The lines and the CPU seconds of all cases, which only Python 3.12 and newer can record quickly.
build/lines:
	-$(MAKE) test-newest NEWEST_TESTS="tests examples" NEWEST_EXTRAS=gshard,dev \
		PYTEST_ARGS="-p tests.mutants.lines --lines=$@ --seconds=build/seconds.tsv"

fuzz: $(VENV)/.installed
	$(PY) -m tests.fuzz.run $(ARGS)

peer: $(VENV)/.installed
	JAX_PLATFORMS=cpu $(PY) -m tests.peer.run --jobs $(TEST_JOBS) $(ARGS)

bench: $(VENV)/.installed-tpu
	$(TPU_AOT_ENV) $(PY) -m benchmarks.gshard_bytes $(ARGS)

docs: $(VENV)/.installed
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/docs
	@echo "build/docs/index.html"

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

clean:
	rm -rf $(VENV) $(NEWEST) $(REAL) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .jax_cache
	find sbp tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Python writes the bytecode of what is imported; pip would take as long again to write that of all
# packages.
INSTALL = -m pip install --no-compile
own-venv = @python=$$($(call first-python,"$(PY)" $(PYTHON) $(PYTHONS),11)); \
	if [ -z "$$python" ]; then echo "sbp needs Python 3.11 or newer: install it, or pass PYTHON=/path/to/python"; exit 1; fi; \
	$(call make-venv,$$python,$(VENV))

# What training needs, with pip's progress.
$(VENV)/.installed-gshard: pyproject.toml
	$(own-venv)
	$(PY) $(INSTALL) --editable ".[gshard]"
	@touch $@

# What the tests need beside that.
$(VENV)/.installed: pyproject.toml
	$(own-venv)
	$(PY) $(INSTALL) --editable ".[gshard,dev]"
	@touch $(VENV)/.installed-gshard $@

$(VENV)/.installed-tpu: $(VENV)/.installed
	$(PY) $(INSTALL) --quiet --editable ".[tpu]"
	@touch $@

$(VENV)/.installed-screenshots: $(VENV)/.installed
	$(PY) $(INSTALL) --quiet --editable ".[screenshots]"
	@touch $@

# Its own environment, since the packages of other projects may need other versions.
$(REAL)/.installed: $(VENV)/.installed-gshard
	@$(call make-venv,$(PY),$(REAL))
	$(REAL)/bin/python $(INSTALL) --quiet --editable ".[real]"
	@touch $@

$(NEWEST_INSTALLED): pyproject.toml
	@$(call make-venv,$(NEWEST_PYTHON),$(NEWEST))
	$(NEWEST)/bin/python $(INSTALL) --quiet --upgrade --editable ".[$(NEWEST_EXTRAS)]" jax
	@touch $@
