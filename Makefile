# make demo        the main job end to end: S3 server, sidecar, trainer (flags: make demo DEMO="--megabytes 50");
#                  make demo FRAMEWORK=torch has a trainer in PyTorch and installs no TensorFlow
# make test        system tools, then every test, and lint beside them
# make check       a third of the tests in a minute and a half, for while you work: rules, formats, the relay's core
# make test-versions  tests on other Pythons and the oldest TensorFlow that this machine can have, two minutes
# make night       every machine that looks for what breaks Penstock, some eight hours (flags: make night NIGHT="--hours 1")
# make lint        ruff, mypy, and codespell and scripts/prose.py over the pages; changes nothing
# make format      let ruff mend what it can
# make bench       Penstock beside its peers, some 25 minutes (choose: make bench BENCH="--scenarios fast --rounds 1")
# make dashboards  write the Grafana dashboards and the alerts from their source
# make docs        the documentation as a site in build/site, the generated pages of docs/reference, the diagrams
# make images      build the images without Docker and run the compose file with them; root, some minutes
# make clean       remove what was built, the virtual environment too
#
# The virtual environment .venv is made at need and brought up to date when a pyproject.toml changes.

PYTHON ?= python3
DEMO ?=
FRAMEWORK ?= tensorflow
BENCH ?=
NIGHT ?=
VERSIONS ?=
# Test processes: each is on a processor for a third of its time, and waits for other processes in the rest.
WORKERS ?= $(shell expr $$(nproc) + 4)
# By time: what finds most of the planted bugs in the fewest seconds.
CHECK = tests/unit tests/relay/test_epochs.py tests/relay/test_splice.py tests/relay/test_faults.py \
	tests/readers/test_stream.py tests/readers/test_proof.py tests/readers/test_skipping.py tests/sidecar/test_run.py \
	tests/test_arrows.py tests/test_names.py tests/test_docs.py --ignore=tests/unit/test_patience.py
# The distributions penstock-sidecar and penstock-readers. They are installed together, so that no index is asked for one.
PROJECTS = pyproject.toml streamer/pyproject.toml
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check
# penstock-readers for its oldest Python: syntax and standard library. NumPy's stubs for it return Any.
READERS = --python-version 3.10 --no-warn-return-any --no-warn-unused-ignores -p streamer.readers -p streamer.formats \
	-m streamer -m streamer.errors -m streamer.trailer -m streamer.units
# Pages whose spelling is checked.
PROSE = README.md CONTRIBUTING.md CHANGELOG.md docs examples/README.md dashboards/README.md streamer/README.md compat
# Without bytecode on disk every process that a test starts compiles Penstock again: a third of its start.
unexport PYTHONDONTWRITEBYTECODE
# TensorFlow's C++ log: errors only, unless somebody wants to hear more.
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: demo test tests check test-versions night lint format bench dashboards docs images system-tools clean
.DELETE_ON_ERROR:

demo: .venv/.stamp-demo-$(FRAMEWORK)
	@.venv/bin/python -m examples.demo --framework $(FRAMEWORK) $(DEMO)

# The linters use one processor, so they run beside the tests. Their output comes last.
test: system-tools .venv/.stamp-dev
	@mkdir -p build
	@$(MAKE) --no-print-directory lint >build/lint.log 2>&1 & lint=$$!; \
	$(MAKE) --no-print-directory tests; tests=$$?; \
	wait $$lint; lint=$$?; cat build/lint.log; exit $$((tests | lint))

tests:
	.venv/bin/python -m pytest --durations=10 --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder \
		tests

# One process more than processors, for each collects all tests.
check: .venv/.stamp-dev
	@.venv/bin/python -m pytest --quiet --numprocesses=$(shell expr $$(nproc) + 1) --dist=loadfile \
		--no-loadscope-reorder $(CHECK)

test-versions: .venv/.stamp-dev
	@.venv/bin/python -m scripts.versions $(VERSIONS)

night: system-tools .venv/.stamp-dev
	@.venv/bin/python -m tests.machines.night $(NIGHT)

lint: .venv/.stamp-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy $(READERS)
	.venv/bin/codespell $(PROSE)
	@.venv/bin/python -m scripts.prose

format: .venv/.stamp-dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: system-tools .venv/.stamp-bench
	@.venv/bin/python -m benchmarks $(BENCH)

dashboards: .venv/.stamp-dev
	.venv/bin/python -m dashboards.build

docs: .venv/.stamp-dev
	.venv/bin/python -m scripts.reference
	.venv/bin/python -m scripts.diagrams
	.venv/bin/mkdocs build

images: .venv/.stamp-dev
	scripts/check-images
	.venv/bin/python -m scripts.check_compose

system-tools:
	@scripts/install-system-tools

.venv/.stamp-demo-%: $(PROJECTS)
	@scripts/make-venv $(PYTHON)
	@echo "installing into .venv; TensorFlow is some 600 MB, PyTorch more, so this takes a minute or two"
	@$(PIP) --editable './streamer[$*]' --editable . --group demo
	@touch $@

.venv/.stamp-dev: $(PROJECTS)
	@scripts/make-venv $(PYTHON)
	@echo "installing into .venv; TensorFlow, PyTorch and JAX are some 2 GB, so this takes minutes"
	@$(PIP) --editable './streamer[tensorflow]' --editable . --group dev
	@touch .venv/.stamp-demo-tensorflow .venv/.stamp-demo-torch $@

.venv/.stamp-bench: $(PROJECTS)
	@scripts/make-venv $(PYTHON)
	@$(PIP) --editable ./streamer --editable . --group bench
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
