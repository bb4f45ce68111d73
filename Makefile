# Everything sets itself up in .venv with the tested versions (constraints.txt).
#   make demo    install, quantize the bundled model, tune, generate, print the table   (under 5 minutes)
#   make check   ruff, mypy and the tests: before every push, and what CI runs          (under 20 minutes)
#   make test    the tests alone
#   make test-all  the tests with further cases of the same kinds (mark `more`), before a release
#   make wheel   dist/lowq-*.whl
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all check lint types wheel clean
.DELETE_ON_ERROR:

# torch alone first: a range asked for by another package would fetch the newest build with all of CUDA
$(VENV)/runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("lowq needs Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep ^torch== constraints.txt)"
	$(PIP) "setuptools>=77" wheel
	$(PIP) --no-build-isolation -e .
	touch $@

$(VENV)/tests: $(VENV)/runtime
	$(PIP) --no-build-isolation -e ".[test,plot,cuda]"
	touch $@

demo: $(VENV)/runtime
	$(BIN)/python benchmarks/demo.py

# two workers of one thread each: on two cores, more threads only wait for one another
test: $(VENV)/tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --durations=15

test-all: $(VENV)/tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --durations=15 --all

lint: $(VENV)/tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/tests
	rm -rf $(VENV)/types && mkdir $(VENV)/types
	ln -s ../../kernels $(VENV)/types/lowq_kernels
	ln -s ../../packers $(VENV)/types/lowq_packers
	MYPYPATH=$(VENV)/types $(BIN)/mypy lowq_cli $(VENV)/types/lowq_kernels $(VENV)/types/lowq_packers benchmarks

# mypy runs beside the tests, in the time that they leave; what it says comes last
check: lint
	nice $(MAKE) -s types >$(VENV)/types.log 2>&1 & types=$$!; $(MAKE) test; failed=$$?; \
	wait $$types || failed=1; cat $(VENV)/types.log; exit $$failed

wheel: $(VENV)/runtime
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation -w dist .

clean:
	rm -rf $(VENV) dist build *.egg-info
