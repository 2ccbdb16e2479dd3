# make demo    build everything, rewrite a real model, run it beside the original, print the table
# make test    build everything, lint, type-check, run all tests
# make check   the part of `make test` that runs no tests;  make fix  applies what can be applied
# make quality   measures cache formats on real models, writes the tables of docs/quality.md (an hour and more)
# make goldens   writes the expected halves of the graph cases anew
# make bench   kvfuse beside other runtimes: everything in docs/benchmarks.md, about two hours of an idle machine;
#   make bench-quick: some minutes;  make bench-docs: puts what was measured into docs/
# make test-device DEVICE=cuda   the tests of the op, sequences and provider with the caches there
# make sanitize  the library under ASan, UBSan and TSan;  make fuzz  a million hostile states (needs clang)
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
MINIMUM_ORT = 1.24.4
export PYTHON_IN_VENV = $(abspath $(BIN))/python

.PHONY: setup demo test test-minimum test-metal test-device check fix goldens bench bench-quick bench-docs quality sanitize fuzz clean

# One stamp per input of the build: sources are only compiled again when one changed.
NATIVE = $(shell find custom_ops -type f -not -path '*/fuzz/*') pyproject.toml
STAMP = $(VENV)/.kvfuse-installed

setup: $(STAMP)

$(VENV)/.kvfuse-dependencies: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --group dev "scikit-build-core>=0.11,<2" "pybind11>=3.0,<4" cmake ninja
	touch $@

$(STAMP): $(VENV)/.kvfuse-dependencies $(NATIVE)
	tools/get_onnxruntime_headers.sh
	PYTHON=$(PYTHON_IN_VENV) PATH="$(abspath $(BIN)):$$PATH" tools/get_metal_cpp.sh
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[models]"
	touch $@

demo: setup
	$(BIN)/python models/demo.py

test: check test-minimum test-metal
	tools/get_emulators.sh
	$(BIN)/python -m pytest

# The declared minimum of onnxruntime, beside the environment rather than in it; and the reference kernel, which the
# best one of this machine replaces in the other runs.
test-minimum: setup
	test -d build/onnxruntime-$(MINIMUM_ORT) || $(BIN)/python -m pip install --quiet --no-deps \
	  --target build/onnxruntime-$(MINIMUM_ORT) "onnxruntime==$(MINIMUM_ORT)"
	PYTHONPATH=build/onnxruntime-$(MINIMUM_ORT) KVFUSE_EXPECT_ORT=$(MINIMUM_ORT) KVFUSE_KERNEL=reference \
	  $(BIN)/python -m pytest -q tests/kernels tests/ops tests/e2e tests/runtime/test_past.py \
	  tests/passes/test_versions.py tests/ep/test_placement.py tests/ep/test_options.py tests/ep/test_rewind.py

# Device "metal" over a fake of Metal: the host code of the Apple GPU, run here.
test-metal: setup
	test "$$(uname)" != Linux || PYTHON=$(PYTHON_IN_VENV) tools/fake_metal.sh

# As the tests on an NVIDIA GPU were run, with `make test-device DEVICE=cuda`.
DEVICE ?= emulated
test-device: setup
	KVFUSE_TEST_DEVICE=$(DEVICE) $(BIN)/python -m pytest -q tests/ep tests/ops tests/sequences

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(find custom_ops benchmarks tests/metal -name '*.cc' -o -name '*.h')
	PYTHON=$(PYTHON_IN_VENV) tools/typecheck.sh

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find custom_ops benchmarks tests/metal -name '*.cc' -o -name '*.h')

goldens: setup
	$(BIN)/python -m pytest -q tests/passes --update-goldens

$(VENV)/.kvfuse-bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --group bench
	PYTHON=$(PYTHON_IN_VENV) benchmarks/build_ggml.sh
	touch $@

MEASURED = build/bench
bench: $(VENV)/.kvfuse-bench
	$(BIN)/python benchmarks/attention.py --json $(MEASURED)/attention.json
	-KVFUSE_KERNEL=avx2 $(BIN)/python benchmarks/attention.py --modes decode --tokens 1024,4096 --threads 1 \
	  --contenders ort_gqa_f32 --json $(MEASURED)/attention_avx2.json
	$(BIN)/python benchmarks/stages.py --json $(MEASURED)/stages.json
	$(BIN)/python benchmarks/visible_keys.py --json $(MEASURED)/visible_keys.json
	$(BIN)/python benchmarks/memory.py --json $(MEASURED)/memory.json
	$(BIN)/python benchmarks/end_to_end.py --json $(MEASURED)/end_to_end.json

bench-quick: $(VENV)/.kvfuse-bench
	$(BIN)/python benchmarks/attention.py --quick --json $(MEASURED)/quick.json

bench-docs: $(VENV)/.kvfuse-bench
	$(BIN)/python benchmarks/report.py $(wildcard $(addprefix $(MEASURED)/, attention.json attention_avx2.json stages.json \
	  visible_keys.json memory.json end_to_end.json)) --write docs/benchmarks.md
	$(BIN)/python benchmarks/plot.py $(MEASURED)/end_to_end.json docs/img/context.svg

quality: setup
	$(BIN)/python -m pip install --quiet --group quality
	$(BIN)/python benchmarks/quality.py

sanitize: setup
	PYTHON=$(PYTHON_IN_VENV) tools/sanitize.sh address
	PYTHON=$(PYTHON_IN_VENV) tools/sanitize.sh thread

fuzz: setup
	PYTHON=$(PYTHON_IN_VENV) tools/fuzz_unfreeze.sh

clean:
	rm -rf build $(VENV)
