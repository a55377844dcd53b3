#!/usr/bin/env bash
# One worker's part of launch/tpu_pod.sh, which runs it there over ssh, in the copied checkout:
#
#   bash launch/worker.sh check            says what runs here and ends with status 1; with 0 where nothing does
#   bash launch/worker.sh start COMMAND    begins a shell command in the background; does nothing while one runs
#   bash launch/worker.sh follow           prints its log until it ends, and ends with its status
#   bash launch/worker.sh end              waits until it has ended, says how, and ends with its status
#   bash launch/worker.sh stop             sends it SIGTERM
#
# What is known of it: train.log, train.pid (its process and the machine's start), train.status.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Where several workers print at once, each line says whose it is.
say() { echo "[$(hostname)] $*"; }

poll=${POLL_SECONDS:-1}
machine_start=$(< /proc/sys/kernel/random/boot_id)
pid="" start=""
runs() {
    [[ -s train.pid && ! -s train.status ]] || return 1
    read -r pid start < train.pid
    [[ $start == "$machine_start" ]] && kill -0 "$pid" 2> /dev/null
}

# Ends with the status of the command that has ended.
leave() {
    # It is written right after the process has ended; before the machine's start or never.
    for _ in {1..20}; do
        [[ ! -s train.status ]] || exit "$(< train.status)"
        [[ -z $start || $start == "$machine_start" ]] || break
        sleep 0.1
    done
    say "train ended without a status: it was killed, or the machine was restarted"
    exit 1
}

case ${1:-} in
    check)
        ! runs || { say "train runs here already (process $pid)" && exit 1; }
        ;;
    start)
        ! runs || exit 0
        rm -f train.pid train.status
        [[ ! -f train.log ]] || mv train.log train.log.before
        # shellcheck disable=SC2016 # for the inner shell
        PATH=$PWD/.venv/bin:$PATH nohup bash -c '
            (eval "exec env $1") &
            echo "$! $2" > train.pid.new && mv train.pid.new train.pid
            wait "$!" && status=0 || status=$?
            echo "$status" > train.status' - "$2" "$machine_start" > train.log 2>&1 < /dev/null &
        until [[ -s train.pid ]]; do sleep 0.1; done
        ;;
    follow)
        [[ -f train.pid ]] || { say "train was not started here" && exit 1; }
        if runs; then tail --pid="$pid" --sleep-interval="$poll" --lines=+1 --follow train.log; else cat train.log; fi
        leave
        ;;
    end)
        [[ -f train.pid ]] || { say "train was not started here" && exit 1; }
        # When one host ends, the others of its run end within a minute.
        SECONDS=0 # bash counts them
        while runs; do
            ((SECONDS < ${END_SECONDS:-120})) || { say "train still runs here (process $pid)" && exit 1; }
            sleep "$poll"
        done
        [[ ! -s train.status ]] || say "train ended with status $(< train.status)"
        # A fault's last words, which no other host may have.
        [[ -s train.status && $(< train.status) =~ ^(0|143)$ ]] || tail --lines=3 train.log | sed "s/^/[$(hostname)] /"
        leave
        ;;
    stop)
        runs || { say "nothing runs here" && exit 1; }
        kill -TERM "$pid"
        say "sent SIGTERM to train (process $pid)"
        ;;
    *)
        echo "error: '${1:-}' must be check, start, follow, end or stop" >&2
        exit 2
        ;;
esac
