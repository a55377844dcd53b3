#!/usr/bin/env bash
# Copies this checkout to every worker of a TPU VM, sets it up there, and starts train on all of them.
# First version: train itself does not run over several hosts yet, so this serves TPU VMs of one host.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage="usage: bash launch/tpu_pod.sh --name=TPU --zone=ZONE --config=FILE [--project=PROJECT] [--workdir=DIR]
           [--dry-run] [-- ARGUMENTS OF TRAIN]

--name, --zone, --project   the TPU VM, as gcloud knows it (default project: gcloud's own)
--config                    settings file of this checkout
--workdir                   folder of the run on the workers, relative to the checkout (default: runs/pod)
--dry-run                   print the commands instead of running them"

fail() {
    printf 'error: %s\n%s\n' "$*" "$usage" >&2
    exit 2
}

name="" zone="" project="" config="" workdir=runs/pod dry_run=""
while (($#)); do
    case $1 in
        --name=*) name=${1#*=} ;;
        --zone=*) zone=${1#*=} ;;
        --project=*) project=${1#*=} ;;
        --config=*) config=${1#*=} ;;
        --workdir=*) workdir=${1#*=} ;;
        --dry-run) dry_run=1 ;;
        --help) echo "$usage" && exit 0 ;;
        --) shift && break ;;
        *) fail "unknown argument '$1'; options are given as --name=value, arguments of train after --" ;;
    esac
    shift
done
[[ -n $name ]] || fail "--name is missing"
[[ -n $zone ]] || fail "--zone is missing"
[[ -n $config ]] || fail "--config is missing"
[[ -f $config ]] || fail "--config=$config: no such file in this checkout"
[[ -n $dry_run ]] || command -v gcloud > /dev/null || fail "gcloud is not installed: https://cloud.google.com/sdk"

# Words as a shell reads them back; only what needs quotes gets them.
quote() {
    local word words=()
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:=@%+,~-]+$ ]] || word="'${word//"'"/"'\\''"}'"
        words+=("$word")
    done
    echo "${words[*]}"
}
run() {
    if [[ -n $dry_run ]]; then quote "$@"; else "$@"; fi
}

where=(--zone="$zone" ${project:+--project="$project"})
on_all=("${where[@]}" --worker=all)
ssh=(gcloud compute tpus tpu-vm ssh "$name")
train=$(quote .venv/bin/python -m jaxrl_llm.train --config="$config" --workdir="$workdir" "$@")

archive=jaxrl_llm.tar.gz
folder=$([[ -n $dry_run ]] && echo /tmp || mktemp -d)
[[ -n $dry_run ]] || trap 'rm -rf "$folder"' EXIT
run tar --create --gzip --file="$folder/$archive" '--exclude=./.venv*' --exclude=./.git --exclude=./runs .
run gcloud compute tpus tpu-vm scp "$folder/$archive" "$name:$archive" "${on_all[@]}"
run "${ssh[@]}" "${on_all[@]}" --command="mkdir -p jaxrl_llm && tar --extract --gzip --file=$archive -C jaxrl_llm"
# The TPU images of Ubuntu 22.04 come with Python 3.10.
run "${ssh[@]}" "${on_all[@]}" --command="command -v python3.11 > /dev/null \
|| (sudo apt-get -qq update && sudo apt-get -qq install -y python3.11-venv)"
run "${ssh[@]}" "${on_all[@]}" --command="cd jaxrl_llm && PYTHON=python3.11 bash launch/setup.sh tpu"
run "${ssh[@]}" "${on_all[@]}" \
    --command="cd jaxrl_llm && JAXRL_DISTRIBUTED=1 nohup $train > train.log 2>&1 < /dev/null &"
echo "# to follow it:"
quote "${ssh[@]}" "${where[@]}" --worker=0 --command="tail -f jaxrl_llm/train.log"
