# Everything runs in a virtual environment of its own, against the installed wheel.
#   make demo    the main job on a real model            make test   the test suite
#   make demo-lora    the same with LoRA, beside plain PEFT
#   make demo-mixtral    a mixture of experts on up to 4 ranks
#   make demo-cogagent    LoRA on a tiny CogAgent, merged and read again
#   make demo-trainer    an ordinary script with HuggingFace's Trainer, unchanged on 2 ranks
#   make demo-checkpoint    a job that is stopped and killed, and resumes elsewhere
#   make demo-invariant     one training in six layouts, with the same bits
#   make lint    formatting and static checks            make bench  the benchmarks
#   make test-slow    sweeps that take minutes
#   make soak         FAULTS (200) in STEPS (1000) by SEED; after each a checkpoint must be right
#   make sanitize     csrc under AddressSanitizer and UBSan, ranks under ThreadSanitizer
#   make test-gpu     tests/gpu with PYTHON's own torch, offline; says so where there is no GPU
#   make bench-gpu  benchmarks/gpu.py with the build of test-gpu
#   make test-oldest  the suite with the oldest supported transformers, PEFT and accelerate
#   make docs    pages of all public names, into docs/api
#   make interplay-page   the table of docs/interplay.md, from its cases
#   make test-interplay  docs/interplay.md with the newest releases of others, pre-releases too
VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
# More requirements, for example transformers==5.15.0.
ALSO ?=
MAX_JOBS ?= 2
WORK ?= .work
# Test files that run at a time; each starts ranks of its own.
TEST_PROCESSES ?= 2

PY := $(VENV)/bin/python
BUILD_ENV := MAX_JOBS=$(MAX_JOBS)
# On the CPU also where there are GPUs, which ranks would outnumber; test-gpu is for those.
ENV := $(BUILD_ENV) HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=
# Threads that wait spin otherwise, which halves the speed of a shared machine.
# Huge pages, for tensors come and go by the GiB: half of the time would be page faults.
DEMO_ENV := $(ENV) OMP_WAIT_POLICY=passive GLIBC_TUNABLES=glibc.malloc.hugetlb=1
SOURCES := $(shell find csrc parallel_ext -type f -not -name '*.so' -not -name '*.pyc') setup.py pyproject.toml

.PHONY: demo demo-lora demo-mixtral demo-cogagent demo-trainer demo-invariant test test-oldest
.PHONY: demo-checkpoint test-interplay soak test-slow sanitize test-gpu bench-gpu
.PHONY: interplay-page docs lint bench clean

# torch comes first and alone: nothing after it may ask for another one.
$(VENV)/environment: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet $(TORCH)
	$(PY) -m pip install --quiet "setuptools>=77" wheel ninja build $(TORCH)
	touch $@

# An sdist, a wheel from that sdist, and the wheel installed.
$(VENV)/installed: $(VENV)/environment $(SOURCES)
	rm -rf $(WORK)/dist
	$(BUILD_ENV) $(PY) -m build --quiet --no-isolation --outdir $(WORK)/dist .
	$(PY) -m pip install --quiet --force-reinstall --no-deps $(WORK)/dist/*.whl
	$(PY) -m pip install --quiet "$$(ls $(WORK)/dist/*.whl)[test,demo,lint,plot]" $(TORCH) $(ALSO)
	touch $@

$(WORK)/smollm2/config.json: $(VENV)/installed
	$(PY) examples/prepare_smollm2.py $(WORK)/smollm2

demo: $(VENV)/installed
	$(DEMO_ENV) $(PY) examples/demo.py --work $(WORK)

demo-lora: $(VENV)/installed
	$(DEMO_ENV) $(PY) examples/demo_lora.py --work $(WORK)

demo-mixtral: $(VENV)/installed
	$(DEMO_ENV) $(PY) examples/demo_mixtral.py --work $(WORK)

demo-cogagent: $(VENV)/installed
	$(DEMO_ENV) $(PY) examples/demo_cogagent.py --work $(WORK)

demo-trainer: $(VENV)/installed $(WORK)/smollm2/config.json
	$(DEMO_ENV) $(PY) examples/demo_trainer.py --work $(WORK)

demo-invariant: $(VENV)/installed $(WORK)/smollm2/config.json
	$(DEMO_ENV) $(PY) examples/demo_invariant.py --work $(WORK)

demo-checkpoint: $(VENV)/installed $(WORK)/smollm2/config.json
	$(DEMO_ENV) $(PY) examples/demo_checkpoint.py --work $(WORK)

# In the order of their names: the files of few but long tests would else come last, one alone.
test: $(VENV)/installed $(WORK)/smollm2/config.json
	$(ENV) SMOLLM2=$(abspath $(WORK)/smollm2) $(VENV)/bin/pytest -q -m "not slow" \
	    -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# The same suite with the oldest releases that are supported, in an environment of its own.
test-oldest:
	$(MAKE) test VENV=$(VENV)-oldest \
	    ALSO="transformers==5.15.0 peft==0.21.0 accelerate==1.13.0 trl==1.16.0"

# May fail: it shows early what the next releases of others will change.
test-interplay:
	$(MAKE) .venv-newest/installed VENV=.venv-newest
	.venv-newest/bin/pip install --quiet --upgrade --pre transformers peft accelerate $(TORCH)
	-$(ENV) .venv-newest/bin/pytest -q tests/interplay -n $(TEST_PROCESSES)

interplay-page: $(VENV)/installed
	PYTHONPATH=tests/support:tests/interplay $(PY) tests/interplay/interplay.py

test-slow: $(VENV)/installed $(WORK)/smollm2/config.json
	$(ENV) SMOLLM2=$(abspath $(WORK)/smollm2) $(VENV)/bin/pytest -q -m slow

soak: $(VENV)/installed
	$(ENV) $(PY) tests/support/soak.py --faults $(or $(FAULTS),200) --steps $(or $(STEPS),1000) \
	    --seed $(or $(SEED),1)

# A build of its own, beside the installed one. The sanitizer must be loaded before Python, with the
# C++ library whose exceptions it watches. It reports no leaks: it would find Python's. What it
# reports goes past pytest, which would not live to show it.
SANITIZED := $(WORK)/sanitized
SANITIZED_TESTS ?= tests/ops tests/nn tests/distributed
THREAD_SANITIZER := tests/distributed/test_thread_sanitizer.py
sanitize: $(VENV)/installed
	$(BUILD_ENV) SANITIZE=address,undefined $(PY) setup.py --quiet build \
	    --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	$(ENV) $(VENV)/bin/pytest -q $(THREAD_SANITIZER)
	$(ENV) PYTHONPATH=$(abspath $(SANITIZED)/lib) \
	    LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    $(VENV)/bin/pytest -q -m "not slow" --capture=sys --ignore $(THREAD_SANITIZER) \
	    $(SANITIZED_TESTS)

# With the torch and the packages of PYTHON; builds for its GPU alone, into $(WORK)/gpu.
test-gpu:
	@$(PYTHON) tests/gpu/run.py $(WORK)/gpu

bench-gpu:
	PYTHONPATH=$(abspath $(WORK)/gpu) $(PYTHON) benchmarks/gpu.py --out $(WORK)/gpu.json

docs: $(VENV)/installed
	$(ENV) $(PY) docs/build_api.py docs/api

lint: $(VENV)/installed
	$(VENV)/bin/ruff check parallel_ext tests examples benchmarks docs/*.py setup.py
	$(VENV)/bin/ruff format --check parallel_ext tests examples benchmarks docs/*.py setup.py
	$(VENV)/bin/clang-format --dry-run --Werror $$(find csrc -type f)

bench: $(VENV)/installed $(WORK)/smollm2/config.json
	$(ENV) $(PY) benchmarks/train_step.py
	$(ENV) $(PY) benchmarks/train_step.py --model llava
	$(ENV) $(PY) benchmarks/checkpoint.py
	$(ENV) $(PY) benchmarks/training_checkpoint.py
	$(ENV) $(PY) benchmarks/lora.py
	$(ENV) $(PY) benchmarks/moe.py
	$(ENV) $(PY) benchmarks/vocab.py
	$(ENV) SMOLLM2=$(abspath $(WORK)/smollm2) $(PY) benchmarks/generation.py
	$(ENV) $(PY) benchmarks/cogagent.py
	$(ENV) $(PY) benchmarks/sequence_parallel.py
	$(ENV) $(PY) benchmarks/invariant.py

clean:
	rm -rf $(WORK) build dist *.egg-info $(VENV)/installed
