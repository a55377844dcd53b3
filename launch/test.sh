#!/usr/bin/env bash
# Sets up, then runs the tests. Arguments go to pytest:
#
#   bash launch/test.sh -m slow            the long ones instead
#   bash launch/test.sh tests/ops -x       one folder, stopping at the first failure
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh test plan
export JAX_PLATFORMS=cpu
exec .venv/bin/python -m pytest -m "not slow" "$@"
