#!/usr/bin/env bash
# Sets up, then runs the tests. Arguments go to pytest:
#
#   bash launch/test.sh -m slow            the long ones instead
#   bash launch/test.sh tests/ops -x       one folder, stopping at the first failure
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh test plan quant gcs
export JAX_PLATFORMS=cpu
# A file's tests share what they compile; a worker takes up to 2 GB. In the order of the folders the long files come
# early, so that no worker is left alone with one. A worker that crashes ends the run: xdist would give its file to the
# next one from the start, again and again.
exec .venv/bin/python -m pytest -m "not slow" -n logical --maxprocesses=8 --dist=loadfile --no-loadscope-reorder \
  --max-worker-restart=0 "$@"
