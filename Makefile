# make demo | test | check | bench — each sets up what it needs on a fresh machine (Python 3.11–3.13 and make).
PYTHON ?= python3
VENV   ?= .venv
VLLM_VENV ?= .venv-vllm
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test check bench vllm-env proto clean

demo: $(VENV)/.installed
	$(BIN)/slipstream demo

# TESTS=tests/weights runs a part of them.
test: $(VENV)/.installed-test
	$(if $(TESTS),$(BIN)/python -m pytest $(TESTS),tools/test.sh $(VENV) $(VLLM_VENV))

check: $(VENV)/.installed-check
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/loop.py
	$(BIN)/python benchmarks/weight_sync.py

$(VENV)/.installed: pyproject.toml
	@echo "setting up $(VENV) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[plot,bench]'
	@touch $@

# torch and transformers are the reference that the decoder is tested against. The version is pinned because an
# unpinned torch may bring gigabytes of CUDA libraries along. Of google-tunix's own requirements the tests need a few
# small ones, which the extra names; the others are a gigabyte, and older releases of what is there.
$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) 'torch==2.13.0'
	$(PIP) -e '.[plot,bench,test]'
	$(PIP) --no-deps 'google-tunix==0.1.7'
	@touch $@

$(VENV)/.installed-check: $(VENV)/.installed
	$(PIP) -e '.[plot,bench,check]'
	@touch $@

# The real vLLM for CPU, for tests and benchmarks.
vllm-env: $(VENV)/.installed
	$(BIN)/slipstream setup vllm --cpu --into $(VLLM_VENV)

# The generated gRPC code runs with this generator's release and later ones, so it is made with an old one.
proto:
	test -x .venv-proto/bin/python || $(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip install --quiet 'grpcio-tools==1.72.2'
	.venv-proto/bin/python -m grpc_tools.protoc -I src --python_out=src --grpc_python_out=src --pyi_out=src \
	    src/slipstream/gateway/slipstream.proto

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VLLM_VENV).log .venv-proto build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
