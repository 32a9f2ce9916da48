# make demo | test | test-fast | check | docs | bench: each sets up what it needs on a fresh machine (Python 3.11–3.13 and make).
PYTHON ?= python3
VENV   ?= .venv
VLLM_VENV ?= .venv-vllm
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
INSTALL := tools/install.sh $(VENV)
# pip compiles nothing, Python what it imports. Without bytecode, each of hundreds of processes would compile JAX or torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast check docs bench vllm-env environment-venvs proto clean

demo: $(VENV)/.installed
	$(BIN)/slipstream demo

# TESTS=tests/weights runs a part of them. Without it, tools/test.sh also installs what the tests need.
test: $(VENV)/.installed$(if $(TESTS),-test)
	$(if $(TESTS),$(BIN)/python -m pytest $(TESTS),tools/test.sh $(VENV) $(VLLM_VENV))

# Without vLLM, Ray, Tunix, TRL and everything marked slow.
test-fast: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m 'not slow' --ignore=tests/vllm --ignore=tests/gpu

check: $(VENV)/.installed-check
	$(BIN)/ruff check src tests benchmarks examples tools
	$(BIN)/ruff format --check src tests benchmarks examples tools
	$(BIN)/mypy
	$(BIN)/python tools/advisories.py
	$(BIN)/python tools/faults.py --list > /dev/null

docs: $(VENV)/.installed-docs
	$(BIN)/python tools/support_matrix.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html is ready"

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/loop.py
	$(BIN)/python benchmarks/weight_sync.py

$(VENV)/.installed: pyproject.toml
	@echo "setting up $(VENV) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) uv 'setuptools>=78.1.1' || true # Python 3.11 brings a setuptools with a known vulnerability
	$(INSTALL) -e '.[plot,bench]'
	@touch $@

# torch and transformers are references for the decoder's tests. torch is pinned, and installed by pip: an unpinned torch
# may bring gigabytes of CUDA libraries. google-tunix comes without its requirements, which weigh a gigabyte; the extra
# names the few that the tests need.
$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) 'torch==2.13.0'
	$(INSTALL) -e '.[plot,bench,test]'
	$(INSTALL) --no-deps 'google-tunix==0.1.7'
	@touch $@

$(VENV)/.installed-check: $(VENV)/.installed
	$(INSTALL) -e '.[plot,bench,check]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) -e '.[docs]'
	@touch $@

# The real vLLM for CPU, for tests and benchmarks.
vllm-env: $(VENV)/.installed
	$(BIN)/slipstream setup vllm --cpu --into $(VLLM_VENV)

# Environments of verifiers and OpenEnv, whose requirements conflict: SLIPSTREAM_VERIFIERS_PYTHON=.venv-verifiers/bin/python and
# SLIPSTREAM_OPENENV_PYTHON=.venv-openenv/bin/python for tests/rl/test_environment_packages.py.
environment-venvs:
	for name in verifiers openenv; do \
	    test -x .venv-$$name/bin/python || $(PYTHON) -m venv .venv-$$name; done
	.venv-verifiers/bin/python -m pip install --quiet 'verifiers==0.4.0'
	.venv-openenv/bin/python -m pip install --quiet 'openenv==0.10.0'

# Generated gRPC code runs with its generator's release and later ones, so it is made with an old generator.
proto:
	test -x .venv-proto/bin/python || $(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip install --quiet 'grpcio-tools==1.72.2'
	.venv-proto/bin/python -m grpc_tools.protoc -I src --python_out=src --grpc_python_out=src --pyi_out=src \
	    src/slipstream/gateway/slipstream.proto

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VLLM_VENV).log .venv-proto build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
