#!/usr/bin/env bash
# Copies this checkout to every worker of a TPU VM, sets it up there, runs train on all of them and follows it to its
# end. Makes the TPU first where --create asks for one. Knows nothing of restarts: run the same command again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage="usage: bash launch/tpu_pod.sh --name=TPU --zone=ZONE --config=FILE --workdir=/shared/RUN [OPTIONS]
           [-- ARGUMENTS OF TRAIN]

--name, --zone, --project   the TPU VM, as gcloud knows it (default project: gcloud's own)
--config                    settings file of this checkout
--workdir                   folder of the run, on a disk that all workers share (--before mounts it)
                            (default: runs/pod in the checkout, for a TPU of one worker)
--command=COMMAND           instead of --config and --workdir: what to run on every worker, one command

--create=TYPE               make the TPU where it is not there: a queued resource of this accelerator type (v6e-64);
                            one that was preempted is made anew
--spot                      ... that may be preempted
--runtime=VERSION           ... with this software (default: what Cloud names for the type)

--before=COMMAND            run this in the checkout of every worker before train
--detach                    do not follow
--follow                    only follow the run that is there
--stop                      only stop it: SIGTERM to one worker, then follow until all have saved and ended
--dry-run                   print the commands instead of running them

Ends with the status of train: 0 done, 2 bad input, 143 stopped or preempted (the same command goes on), 1 or
another for a fault: docs/how-to/run_on_a_tpu_pod.md has them all."

fail() {
    printf 'error: %s\n%s\n' "$*" "$usage" >&2
    exit 2
}

name="" zone="" project="" config="" workdir=runs/pod command="" before=""
create="" spot="" runtime="" detach="" only="" dry_run=""
while (($#)); do
    case $1 in
        --name=*) name=${1#*=} ;;
        --zone=*) zone=${1#*=} ;;
        --project=*) project=${1#*=} ;;
        --config=*) config=${1#*=} ;;
        --workdir=*) workdir=${1#*=} ;;
        --command=*) command=${1#*=} ;;
        --create=*) create=${1#*=} ;;
        --spot) spot=1 ;;
        --runtime=*) runtime=${1#*=} ;;
        --before=*) before=${1#*=} ;;
        --detach) detach=1 ;;
        --follow | --stop) only=${1#--} ;;
        --dry-run) dry_run=1 ;;
        --help) echo "$usage" && exit 0 ;;
        --) shift && break ;;
        *) fail "unknown argument '$1'; options are given as --name=value, arguments of train after --" ;;
    esac
    shift
done
[[ -n $name ]] || fail "--name is missing"
[[ -n $zone ]] || fail "--zone is missing"
if [[ -z $command && -z $only ]]; then
    [[ -n $config ]] || fail "--config is missing"
    [[ $config == recipe:* || (-f $config && $config != /* && $config != ../*) ]] \
        || fail "--config=$config: no such file in this checkout"
    [[ ${config#./} != runs/* && ${config#./} != .venv* && ${config#./} != .git/* ]] \
        || fail "--config=$config: files of this folder are not copied"
fi
for joint in ' && ' ' || ' ' | ' '; '; do # worker.sh becomes the command, and would forget the rest
    [[ $command != *"$joint"* || $command == "bash -c "* ]] \
        || fail "--command=$command must be one command: --before runs what comes first"
done
[[ $workdir != gs://* && $command != *--workdir=gs://* ]] \
    || fail "--workdir=gs://... must be a folder that all workers share, such as a mounted Filestore share;" \
        "a bucket holds checkpoints alone: --config.checkpoint.bucket=gs://..."
[[ -n $create || -z $spot$runtime ]] || fail "--spot and --runtime are of a TPU that --create makes"
if [[ -n $create && -z $runtime ]]; then
    case $create in
        v6e-*) runtime=v2-alpha-tpuv6e ;;
        v5p-*) runtime=v2-alpha-tpuv5 ;;
        v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
        v4-* | v3-* | v2-*) runtime=tpu-ubuntu2204-base ;;
        *) fail "--create=$create: no software is known for this type; name it with --runtime" ;;
    esac
fi
# check_shared WORKERS: each of several has a disk of its own; checkpoints in a bucket all find.
arguments="$*"
check_shared() {
    [[ -n $command$only || $workdir == /* || $arguments == *--config.checkpoint.bucket=gs://* ]] \
        || fail "--workdir=$workdir must be a folder that the $1 of $name share, such as /shared/my-run," \
            "or --config.checkpoint.bucket=gs://... be given after --"
}
# A number above 8 is of several workers, whichever type: before it costs anything.
[[ ! $create =~ -([0-9]+)$ ]] || ((BASH_REMATCH[1] <= 8)) || check_shared workers
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
tpus=(gcloud compute tpus)
# on WORKER COMMAND: in the checkout there. gcloud tries again when a connection breaks.
on() { run "${tpus[@]}" tpu-vm ssh "$name" "${where[@]}" --worker="$1" --command="cd jaxrl_llm && $2"; }
again="the same command goes on from the last checkpoint"

# listed KIND WORDS FIELDS TRIES: the fields of the one that has the name; nothing where none has. An error where gcloud
# does not answer.
listed() {
    local rows tries=$4
    until rows=$("${tpus[@]}" "$1" list "${where[@]}" --format="value(name.basename(),$3)"); do
        ((--tries)) || { echo "error: gcloud does not say how $2 $name is" >&2 && return 1; }
        sleep "${POLL_SECONDS:-30}"
    done
    awk -v name="$name" '$1 == name { print $2 ($3 ? " " $3 : "") }' <<< "$rows"
}
# request_state TRIES: ACTIVE, SUSPENDED (preempted) and others.
request_state() { listed queued-resources "queued resource" state.state "$1"; }
# look TRIES: state and number of workers of the TPU.
look() { listed tpu-vm TPU "state,networkEndpoints.len()" "$1"; }

# Where this call has asked for a TPU and ends before train runs on it.
made="" folder=/tmp
at_exit() {
    [[ $folder == /tmp ]] || rm -rf "$folder"
    if [[ -n $made ]]; then
        echo "TPU $name was asked for, and costs as soon as it is there; to delete it:" >&2
        printf '    %s\n' "$(quote "${tpus[@]}" queued-resources delete "$name" "${where[@]}" --force)" >&2
    fi
}
trap at_exit EXIT
# gcloud ends as after an error where it hears Ctrl-C, and what asks again would go on.
trap 'exit 130' INT
trap 'exit 143' TERM

make_tpu() {
    local state="" shown="" new="" unlisted=0
    [[ -n $dry_run ]] || state=$(request_state 3) || exit 1
    while [[ $state == SUSPENDING ]]; do # until it is SUSPENDED
        sleep "${POLL_SECONDS:-30}"
        state=$(request_state 20) || exit 1
    done
    if [[ $state == SUSPENDED || $state == FAILED ]]; then
        echo "queued resource $name is $state: making it anew"
        "${tpus[@]}" queued-resources delete "$name" "${where[@]}" --force --quiet
        state=""
    fi
    [[ -n $state ]] || new=1
    [[ -z $new ]] || run "${tpus[@]}" queued-resources create "$name" --node-id="$name" "${where[@]}" \
        --accelerator-type="$create" --runtime-version="$runtime" ${spot:+--spot}
    [[ -z $dry_run ]] || return 0
    made=$new
    while state=$(request_state 20) || exit 1 && [[ $state != ACTIVE ]]; do
        state=${state:-not listed}
        [[ $state == "$shown" ]] || echo "queued resource $name is $state"
        shown=$state
        case $state in
            FAILED | SUSPENDED | DELETING)
                made="" # it costs nothing
                "${tpus[@]}" queued-resources describe "$name" "${where[@]}" >&2
                echo "error: queued resource $name is $state" >&2
                exit 1
                ;;
            "not listed")
                ((++unlisted < 5)) || { echo "error: queued resource $name is there no more" >&2 && exit 1; }
                ;;
            *) unlisted=0 ;;
        esac
        sleep "${POLL_SECONDS:-30}"
    done
}

# Ends the script where the TPU itself has gone, or nothing is heard of it.
check_ready() {
    local seen
    seen=$(look 5) || { echo "train may go on there: --follow follows it" >&2 && exit 1; }
    [[ $seen != "READY "* ]] || return 0
    seen=${seen:-GONE}
    echo "TPU $name is ${seen%% *}: $again, with --create on a new TPU" >&2
    exit 143
}

follow() {
    local status=0 of_all=0
    on 0 "bash launch/worker.sh follow" || status=$?
    ((status == 0)) || check_ready
    on all "bash launch/worker.sh end" || of_all=$?
    ((status)) || status=$of_all
    ((of_all == 0)) || check_ready
    ((status != 143)) || echo "stopped; $again" >&2
    exit "$status"
}

if [[ -n $only ]]; then
    [[ $only != stop ]] || on 0 "bash launch/worker.sh stop"
    follow
fi

[[ -z $create ]] || make_tpu
workers=2
if [[ -z $dry_run ]]; then
    seen=$(look 3) || exit 1
    read -r state workers <<< "$seen"
    [[ $state == READY ]] || { echo "error: TPU $name is ${state:-not there}" >&2 && exit 1; }
fi
if [[ -z $command ]]; then
    ((workers == 1)) || [[ -n $dry_run ]] || check_shared "$workers workers"
    command=$(quote python -m jaxrl_llm.train --config="$config" --workdir="$workdir" "$@")
fi
# Insists on joining the others: a worker that does not find them would train alone.
((workers == 1)) || command="env JAXRL_DISTRIBUTED=1 $command"

archive=jaxrl_llm.tar.gz
[[ -n $dry_run ]] || folder=$(mktemp -d)
# on_home COMMAND: in the home folder of every worker.
on_home() { run "${tpus[@]}" tpu-vm ssh "$name" "${where[@]}" --worker=all --command="$1"; }
on_home "[ ! -f jaxrl_llm/launch/worker.sh ] || bash jaxrl_llm/launch/worker.sh check" \
    || { echo "error: --follow follows what runs on $name, --stop stops it" >&2 && exit 1; }
run tar --create --gzip --file="$folder/$archive" '--exclude=./.venv*' --exclude=./.git --exclude=./runs .
run "${tpus[@]}" tpu-vm scp "$folder/$archive" "$name:$archive" "${where[@]}" --worker=all
on_home "mkdir -p jaxrl_llm && tar --extract --gzip --file=$archive --directory=jaxrl_llm"
# The TPU images of Ubuntu 22.04 come with Python 3.10; a machine that has just started may still install others.
on_home "command -v python3.11 > /dev/null || (sudo apt-get -qq -o DPkg::Lock::Timeout=300 update \
&& sudo apt-get -qq -o DPkg::Lock::Timeout=300 install -y python3.11-venv)"
on all "PYTHON=python3.11 bash launch/setup.sh tpu"
[[ -z $before ]] || on all "$before"
if ! on all "bash launch/worker.sh start $(quote "$command")"; then # the others would wait for it
    echo "error: train did not start on all workers of $name; stopping it" >&2
    on all "bash launch/worker.sh stop || true" || true
    exit 1
fi
made=""
this="bash launch/tpu_pod.sh $(quote --name="$name" "${where[@]}")"
echo "train runs on all workers of $name, and goes on without this terminal; to follow it, to stop it:"
printf '    %s\n' "$this --follow" "$this --stop"
[[ -n $detach ]] || follow
