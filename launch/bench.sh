#!/usr/bin/env bash
# Sets up, then measures a training step of ours against its peers, each in a virtual environment of its own:
#
#   bash launch/bench.sh [ours] [trl] [trl-bf16] [tunix] [--steps N] [--json FILE]      default: all four
#   bash launch/bench.sh race [ours] [trl] [--seeds N] [--json FILE]                    seconds until sums are learned
#   bash launch/bench.sh gpu [--shape NAME ...] [--json FILE]                           one accelerator (benchmarks.gpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh

# Makes .venv-NAME with the packages that follow; does nothing when it has them.
peer() {
    local venv=.venv-$1 packages="${*:2}"
    [[ ! -f $venv/.installed || $(< "$venv/.installed") != "$packages" ]] || return 0
    echo "installing into $venv: $packages (a few minutes the first time)"
    rm -rf "$venv"
    .venv/bin/python -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "${@:2}"
    echo "$packages" > "$venv/.installed"
}

measurement=run peers=" trl tunix "
[[ ${1:-} != race && ${1:-} != gpu ]] || { measurement=$1 peers=" trl "; shift; }
wanted=" " value=""
for argument in "$@"; do
    # A word after an option is its value.
    [[ $argument == -* || -n $value ]] || wanted+="$argument "
    value=""
    [[ $argument != --*=* && $argument == --* ]] && value=1
done
[[ $wanted != " " ]] || wanted=$peers
[[ $measurement != gpu ]] || { wanted=$peers; set -- --peers "$@"; }
[[ $wanted != *" trl"* ]] || peer trl "trl==1.16.*" "torch==2.13.0" "transformers==5.23.*"
[[ $wanted != *" tunix "* ]] || peer tunix "google-tunix==0.1.7" "jax==0.10.2" "jaxlib==0.10.2"

# As launch/local.sh does, and for every system alike.
export GLIBC_TUNABLES="glibc.malloc.hugetlb=1${GLIBC_TUNABLES:+:$GLIBC_TUNABLES}"
exec .venv/bin/python -m "benchmarks.$measurement" "$@"
