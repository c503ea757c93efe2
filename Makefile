# Everything a fresh machine needs beyond Python >= 3.11 and a Rust toolchain is installed into .venv by the first target.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo
SAMPLE := --prompt "She opened the door and saw" --temperature 0.7 --seed 3 --max-new-tokens 60
RUST := Cargo.toml Cargo.lock $(shell find rust -name target -prune -o \( -name '*.rs' -o -name '*.toml' -o -name '*.bin' \) -print)

# pip reads this: whatever a target installs has the versions that the tests have passed with.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: help setup demo test test-rust test-arm test-windows test-python test-slow tools vllm vllm-environment newest lowest lint lint-rust lint-python lint-files lint-arm format fuzz wheels release-check docs bench clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

$(BIN)/maturin:
	$(PYTHON) -c 'import sys; sys.exit("moepack needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet 'maturin>=1.12,<2'

$(VENV)/built: $(BIN)/maturin pyproject.toml constraints.txt $(RUST)
	$(BIN)/maturin develop --release --extras dev
	@touch $@

setup: $(VENV)/built ## Create .venv with all dependencies and the release build

demo: setup ## Compress examples/tiny-moe, inspect, verify and evaluate it, let both models write
	rm -rf $(DEMO) && mkdir -p $(dir $(DEMO))
	$(BIN)/moepack compress examples/tiny-moe $(DEMO) --ratio 0.25
	$(BIN)/moepack inspect $(DEMO)
	$(BIN)/moepack verify $(DEMO)
	$(BIN)/moepack eval $(DEMO) --text examples/texts/white-fang.txt --reference examples/tiny-moe
	@echo 'The original writes:'
	$(BIN)/moepack generate examples/tiny-moe $(SAMPLE)
	@echo 'The packed model writes, with the same random numbers:'
	$(BIN)/moepack generate $(DEMO) $(SAMPLE)

test: test-rust test-python ## Run all tests, Rust and Python

test-rust: ## Run the Rust tests
	cargo test --workspace --quiet

ARM := aarch64-unknown-linux-gnu

test-arm: export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER ?= aarch64-linux-gnu-gcc
test-arm: ## Run the core's tests for 64-bit Arm under qemu-user: with matrix products of bytes, dot products, or neither
	for cpu in max neoverse-n1 cortex-a57; do \
	    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu $$cpu -L /usr/aarch64-linux-gnu" \
	    cargo test --release --target $(ARM) --package moepack-core --quiet || exit 1; \
	done

WINDOWS := x86_64-pc-windows-gnu

test-windows: export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER ?= wine
test-windows: export WINEPATH = $(CURDIR)/build/wine
test-windows: export WINEDEBUG ?= -all
test-windows: $(BIN)/maturin ## Run the core's tests for 64-bit Windows under Wine, linked by zig
	$(BIN)/python -m pip install --quiet ziglang cargo-zigbuild
	mkdir -p build/wine
	$(BIN)/python -m ziglang cc -target x86_64-windows-gnu -shared -O2 -s -ladvapi32 \
	    -o build/wine/bcryptprimitives.dll .ci/wine/bcryptprimitives.c
	PATH="$(CURDIR)/$(BIN):$$PATH" \
	    cargo-zigbuild test --release --target $(WINDOWS) --package moepack-core --lib --tests --quiet

TEST_WORKERS ?= 2
TESTS ?=

test-python: setup tools ## Run the Python tests (TESTS, or all) in TEST_WORKERS processes
	$(BIN)/python -m compileall -q python/moepack # for the processes that tests start, also if Python writes no bytecode
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
	    $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist worksteal --durations 40 --durations-min 5 \
	    $(TESTS)

test-slow: ## Run the Python tests that repeat others in all combinations; `make test-python` leaves them out
	$(MAKE) test-python TESTS="-m slow $(TESTS)"

VLLM := build/vllm
ENGINE_TESTS ?= tests/vllm_engine

$(VLLM)/installed: .ci/vllm.txt
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet uv
	$(VLLM)/bin/python -m uv pip install --quiet --python $(VLLM)/bin/python --no-deps --compile-bytecode \
	    --requirement .ci/vllm.txt
	@touch $@

vllm-environment: $(VLLM)/installed ## Create build/vllm, an environment with vLLM's CPU build (6 GB)

vllm: setup vllm-environment ## Run the tests with vLLM's CPU build (ENGINE_TESTS, or all of them)
	@packages=$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	    rm -rf $$packages/moepack-*.dist-info && \
	    cp -r $(VENV)/lib/python*/site-packages/moepack-*.dist-info $$packages && \
	    echo $(CURDIR)/python >$$packages/moepack.pth
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
	    $(VLLM)/bin/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile $(ENGINE_TESTS)

newest: setup ## Run the Python tests (TESTS, or all) with the newest releases of the dependencies
	$(BIN)/python .ci/versions.py newest $(TESTS)

lowest: setup ## Run the Python tests (TESTS, or all) with the lowest versions that pyproject.toml allows
	$(BIN)/python .ci/versions.py lowest $(TESTS)

tools: ## Install what some tests need (a C++ compiler, Chromium, curl, systemd-analyze) through apt if the user is root
	@wanted=$$([ "$$(type -P g++)" ] || echo g++; \
	    [ "$$(type -P curl)" ] || echo curl; \
	    [ "$$(type -P systemd-analyze)" ] || echo systemd; \
	    [ "$$(type -P chromium chromium-browser google-chrome)" ] || echo chromium); \
	if [ -z "$$wanted" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && [ "$$(type -P apt-get)" ]; then \
	    apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $$wanted >/dev/null; \
	else echo "tests are skipped that need" $$wanted; fi

lint: lint-rust lint-python lint-files ## Check formatting, lints, imports, types and stubs; warnings are errors

lint-rust: lint-arm
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings

lint-python: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest moepack._core

lint-files: setup ## Lint the workflows, the issue forms, the citation and the Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --quiet --offline .github
	$(BIN)/hadolint Dockerfile

lint-arm: ## Lint the core for 64-bit Arm, if the compiler has its standard library
	@if [ -d "$$(rustc --print target-libdir --target $(ARM))" ]; then \
	    cargo clippy --target $(ARM) --package moepack-core --all-targets --quiet -- -D warnings; \
	else echo 'not linted for 64-bit Arm: it takes `rustup target add $(ARM)`'; fi

format: setup ## Rewrite the sources in the project's format
	cargo fmt --all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

FUZZ_SECONDS ?= 60

fuzz: ## Fuzz each target for FUZZ_SECONDS under AddressSanitizer; installs a nightly compiler
	rust/fuzz/run.sh $(FUZZ_SECONDS)

wheels: $(BIN)/maturin ## Build the abi3 wheels for Linux, Windows and macOS, x86-64 and 64-bit Arm, into dist/
	$(BIN)/python -m pip install --quiet ziglang
	$(BIN)/python .ci/wheels.py

release-check: setup ## Build a wheel and the sources into build/release, and check what a release needs
	rm -rf build/release
	$(BIN)/maturin build --release --locked --quiet --out build/release
	$(BIN)/maturin sdist --out build/release
	$(BIN)/python .ci/release.py build/release

docs: setup ## Build the documentation as a site into build/site
	$(BIN)/python -m pip install --quiet 'mkdocs-material>=9.6' 'mkdocstrings[python]>=0.29'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: setup ## Run the benchmarks: the Rust kernels, then the codecs and products beside torch
	cargo bench --package moepack-core
	$(BIN)/python -m benches.cpu.ternary

clean: ## Remove everything that the other targets made
	rm -rf $(VENV) target build dist python/moepack/_core*.so
