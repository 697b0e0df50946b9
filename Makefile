# make reproduce            from nothing to every table and figure, at the mini preset   (PRESET=nano, mini or paper)
# make census               p of all 810,000 target problems, for the base and one tuned policy (about a minute a policy at mini, a quarter of an hour at paper); PRESET as above
# make ablation             a few seeds of each of several settings of GRPO, on calibration problems (about ten minutes at paper, the preset it is meant for)
# make demystify            the paper's questions: coverage, reward density, random rewards, scale, entropy (about 45 minutes at mini, on 2 quiet cores); PRESET as above
# make figures              draw every figure from the shipped results/ again
# make bench               the benchmarks again, into benchmarks/ (about a quarter of an hour, two quiet cores)
# make test                 the notebooks' own tests, then tests/
# make lab                  JupyterLab on the notebooks
# make notebooks            put the outputs of the last run into the committed notebooks, its figures into figures/ (PRESET=paper: tables into results/ too)
# make readme               README.md from nbs/index.ipynb
# make docs                 the documentation site, into _docs/ (with quarto where it is installed, else with smalldocs)
# make docs-preview         show it at http://127.0.0.1:8000
# make clean                remove what can be made again, but not runs/
#
# Each of them makes .venv first if it is missing or older than settings.ini or constraints.txt.
# An environment of your own: make test BIN=$CONDA_PREFIX/bin
SHELL := /bin/bash
PRESET ?= mini
PYTHON ?= python3
BIN ?= .venv/bin
READY := $(if $(filter .venv/bin,$(BIN)),.venv/.installed)
export OMP_NUM_THREADS ?= 1

.PHONY: reproduce census ablation demystify figures test bench lab notebooks readme docs docs-preview clean

.venv/.installed: settings.ini constraints.txt setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, but $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	@echo "installing the packages into .venv (some minutes, about 2 GB)"
	.venv/bin/python -m pip install --quiet -c constraints.txt -e '.[dev,bench]'
	@touch $@

reproduce: $(READY)
	$(BIN)/python -m tiny_rlvr.workflow reproduce --preset $(PRESET)

census: $(READY)
	$(BIN)/python -m tiny_rlvr.workflow reproduce --preset $(PRESET) -- runs/$(PRESET)/done/x1_census

ablation: $(READY)
	$(BIN)/python -m tiny_rlvr.workflow reproduce --preset $(PRESET) -- runs/$(PRESET)/done/x1_ablation

demystify: $(READY)
	$(BIN)/python -m tiny_rlvr.workflow reproduce --preset $(PRESET) -- demystify

figures: $(READY)
	$(BIN)/python -m tiny_rlvr.workflow figures

# Every library notebook in a process of its own, two at a time: what one sets for all of torch must not reach another. The experiments are run by
# tests/test_workflow.py. An empty TINY_RLVR_PROGRESS hides progress bars.
test: export TINY_RLVR_PROGRESS =
test: $(READY)
	ls nbs/*.ipynb | xargs -n 1 -P 2 $(BIN)/nbdev_test --n_workers 0 --timing --path
	$(BIN)/python -m pytest tests

bench: $(READY)
	$(BIN)/python benchmarks/bench.py

lab: $(READY)
	$(BIN)/jupyter lab nbs $(if $(filter 0,$(shell id -u)),--allow-root)

notebooks: $(READY)
	$(BIN)/python -m tiny_rlvr.workflow publish --preset $(PRESET)

readme: $(READY)
	$(BIN)/python -m tiny_rlvr.workflow readme

docs: $(READY)
	$(BIN)/python -m tiny_rlvr.docs build

docs-preview: $(READY)
	$(BIN)/python -m tiny_rlvr.docs serve

clean:
	rm -rf _docs _proc dist build *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
