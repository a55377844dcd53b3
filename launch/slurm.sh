#!/usr/bin/env bash
# Trains on the nodes of a Slurm job, one process a node. From the checkout, set up with bash launch/setup.sh gpu:
#
#   sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sh --config=pod.py --workdir=/shared/my-run
#   sbatch --nodes=1 --gpus-per-node=8 launch/slurm.sh 'python -m jaxrl_llm.sft --config=...'      any other command,
#                                                             which is not started anew: it would begin from nothing
#
# The checkout and the workdir must be on disks that all nodes see. Slurm starts it anew, and train goes on from its
# checkpoint, when it was preempted, when a node failed, when its time was up, and after a fault, of which a file beside
# the log has a line each, at most MAX_RESTARTS (3) times; not after bad input (status 2), nor after scancel.
#SBATCH --job-name=jaxrl_llm
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# SIGTERM to train so many seconds before the time limit: it saves inside an iteration.
#SBATCH --signal=TERM@120
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is not set: start it with sbatch, from the checkout}"
[[ -x .venv/bin/python ]] || { echo "error: $PWD has no .venv; bash launch/setup.sh gpu makes it" >&2 && exit 2; }
(($#)) || { echo "error: no arguments; sbatch launch/slurm.sh --config=FILE --workdir=DIR" >&2 && exit 2; }
export PATH=$PWD/.venv/bin:$PATH

# One argument that is a command, as a sweep gives it; else arguments of train.
if [[ $# == 1 && $1 != -* ]]; then eval "command=($1)"; else command=(python -m jaxrl_llm.train "$@"); fi

per_node=${SLURM_NTASKS_PER_NODE:-1}
if ((${SLURM_NTASKS:-$((SLURM_JOB_NUM_NODES * per_node))} > 1)); then
    # A process that does not find the others ends, instead of training alone.
    export JAXRL_DISTRIBUTED=1
    # jax takes one GPU a process for granted. With --ntasks-per-node=GPUS that is so.
    if ((${SLURM_GPUS_ON_NODE:-0} > 0 && per_node == 1)); then
        JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))
        export JAX_LOCAL_DEVICE_IDS
    fi
fi

# What goes on where it was: train, and the points of a sweep. Slurm itself is to start nothing else anew either.
resumes=yes
if [[ ! " ${command[*]} " =~ " jaxrl_llm."(train|sweep)" " ]]; then
    resumes=""
    scontrol update JobId="$SLURM_JOB_ID" Requeue=0
fi

# When a process ends, the others end by themselves, and say which host it was.
srun --kill-on-bad-exit=0 "${command[@]}" && status=0 || status=$?
[[ $resumes ]] || exit "$status"

restarts=${SLURM_RESTART_COUNT:-0} # of any kind
faults=${SLURM_JOB_NAME:-jaxrl_llm}-$SLURM_JOB_ID.faults
case $status in
    0 | 2) exit "$status" ;;
    143) why="it was stopped" ;;
    *)
        why="it ended with status $status"
        echo "$(date '+%F %T'), start $restarts: $why" >> "$faults"
        (($(wc -l < "$faults") <= ${MAX_RESTARTS:-3})) || exit "$status"
        ;;
esac
# After scancel this shell is gone by now. A job that Slurm itself starts anew is not there to be started.
echo "train goes on in a new start of job $SLURM_JOB_ID (start $((restarts + 1))): $why"
scontrol requeue "$SLURM_JOB_ID" || exit "$status"
