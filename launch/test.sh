#!/usr/bin/env bash
# Sets up, then runs one tier of the tests: the plain suite unless --tier names another. Other arguments go to pytest:
#
#   bash launch/test.sh                    the plain suite
#   bash launch/test.sh --tier=hosts       another tier (docs/testing.md lists them)
#   bash launch/test.sh tests/ops -x       the plain tests of one folder, stopping at the first failure
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tier=plain
arguments=()
for argument in "$@"; do
    case $argument in
        --tier=*) tier=${argument#--tier=} ;;
        *) arguments+=("$argument") ;;
    esac
done
# Each tier installs only what its tests need.
extras=(test)
case $tier in
    compiler) extras+=(plan) ;;
    extras) extras+=(quant gcs retrieval docs) ;;
esac
bash launch/setup.sh "${extras[@]}"
if [[ $tier == parity ]]; then
    peers=(torch openai verifiers textarena)
    # find_spec imports nothing.
    known=$(.venv/bin/python -c 'import sys, importlib.util as u; print(*filter(u.find_spec, sys.argv[1:]))' "${peers[@]}")
    if [[ -z $known ]]; then
        echo "tier parity: not run, because none of these packages is installed: ${peers[*]} (extras parity, agents, games)"
        exit 0
    fi
fi
export JAX_PLATFORMS=cpu
# One worker more than cores, because many tests wait for processes; a worker takes up to 4 GB.
cores=$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)
workers=$((cores < 8 ? cores + 1 : 8))
# A file's tests share what they compile. In the order of the folders the long files come early, so that no worker is
# left alone with one. Tests of minutes share little, and any worker takes the next one.
dist=loadfile
case $tier in
    compiler | kills) dist=load ;;
esac
# A worker that crashes ends the run: xdist would give its file to the next one from the start, again and again.
exec .venv/bin/python -m pytest --tier="$tier" -n "$workers" --dist="$dist" --no-loadscope-reorder \
  --max-worker-restart=0 ${arguments[@]+"${arguments[@]}"}
