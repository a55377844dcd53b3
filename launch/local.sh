#!/usr/bin/env bash
# Sets up, then fine-tunes SmolLM2-135M-Instruct on sums, on whatever this machine has. Arguments go to train:
#
#   bash launch/local.sh --config.num_iterations=4 --workdir=runs/short
#
# Run it again to go on where it stopped. Relative paths start at the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
settings=(--config=configs/grpo_smollm2_135m_chain_sum.py)
for argument in "$@"; do
    case $argument in --config | --config=*) settings=() ;; esac
done
# Large arrays in huge pages: on a CPU, XLA otherwise spends a good part of an update in page faults.
export GLIBC_TUNABLES="glibc.malloc.hugetlb=1${GLIBC_TUNABLES:+:$GLIBC_TUNABLES}"
exec .venv/bin/python -m jaxrl_llm.train ${settings[@]+"${settings[@]}"} --workdir=runs/local "$@"
