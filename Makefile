# make demo: train a small model on Python's standard library and print samples from it
# make test: lint and the CPU test suite
# make faults: a few minutes of random kills, signals and bad inputs (run before a release)
# Each sets up .venv the first time. PYTHON=python3.12 make ... picks another interpreter (>= 3.10).

PYTHON ?= python3
VENV := .venv/bin

.PHONY: demo test faults

demo: .venv/installed
	@test -f data/stdlib_char/meta.json || $(VENV)/python data/stdlib_char/prepare.py
	$(VENV)/python train.py config/train_stdlib_char.py
	$(VENV)/python sample.py --out_dir=out-stdlib-char --start="def " --num_samples=3

test: .venv/installed-dev
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	@# three processes for two cores, because some tests wait for others
	env -u PYTHONDONTWRITEBYTECODE $(VENV)/python -m pytest -q -n 3 --dist worksteal -m "not gpu" tests

faults: .venv/installed-dev
	$(VENV)/python dev/faults.py

.venv/installed: requirements.txt constraints.txt
	@echo "setting up .venv (once; torch is large, so this takes a few minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: PYTHON=python3.12 make ...")'
	$(PYTHON) -m venv .venv
	$(VENV)/pip install --quiet --disable-pip-version-check -r requirements.txt -c constraints.txt
	@touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(VENV)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt -c constraints.txt
	@touch $@
