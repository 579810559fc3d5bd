# `make run` and `make test` need nothing but a Debian or Ubuntu machine with Python 3.11 to 3.13.
# What they lack they install: system packages with apt-get where that is allowed, Python packages into .venv.

PYTHON ?= $(shell scripts/find-python)
VENV   := .venv
BIN    := $(VENV)/bin
# a machine with an NVIDIA driver grades on it; every other one grades in Triton's interpreter
DEVICE ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
FOR_GPU := $(if $(filter gpu,$(DEVICE)),--for-gpu)

# folders whose tests start no sandbox and run no kernel
QUICK := tests/judging tests/examiner tests/service tests/web

.PHONY: run test check setup system test-system format pictures clean

run: setup
	$(BIN)/tilegrade up

test: test-system setup
	scripts/run-tests

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q -n 2 -m "not slow and not browser and not postgres and not gpu" $(QUICK)

# of the README, from the running pages
pictures: test-system setup
	$(BIN)/python scripts/make-pictures

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: system $(VENV)/.installed-$(DEVICE)

system:
	@PYTHON="$(PYTHON)" scripts/install-system-packages $(FOR_GPU)

# databases, a broker and a browser: what the tests use and the service does not
test-system:
	@PYTHON="$(PYTHON)" scripts/install-system-packages $(FOR_GPU) --for-tests

$(VENV)/.installed-$(DEVICE): pyproject.toml constraints-$(DEVICE).txt
	scripts/install-python-packages "$(PYTHON)" $(VENV) $(DEVICE)
	touch $@

clean:
	rm -rf $(VENV) artifacts .mypy_cache .ruff_cache .pytest_cache .hypothesis
