"""launch/slurm.sh under a real Slurm: a controller and one node of this machine, started here (Debian: slurmctld,
slurmd, slurm-client; neither munge nor a database). The job runs a stand-in for Python.
"""

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
from support.checkout import REPOSITORY, free_port, wait_for
from test_launch import JOB

pytestmark = pytest.mark.tier("slow")

# Two tasks on one node, each a process of the job. train's statuses: 2 and 1 by the seed, 143 by SIGTERM after a save,
# and 0 where a checkpoint is.
PYTHON = """#!/bin/bash
echo "rank $SLURM_PROCID of $SLURM_NTASKS insists=${JAXRL_DISTRIBUTED:-no}: $*"
[[ $* != *seed=-1* ]] || exit 2
[[ $* != *seed=1* ]] || exit 1
[[ ! -f saved-$SLURM_PROCID ]] || exit 0
trap 'touch saved-$SLURM_PROCID; exit 143' TERM
touch began-$SLURM_PROCID
until [[ -f never ]]; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Return the environment for the commands of a cluster, which ends with the module's tests."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "srun", "scontrol") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} of Slurm is not installed")
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror:
        pytest.skip("this machine's own name has no address")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": free_port(),
        "SlurmdPort": free_port(),
        "AuthType": "auth/none",
        "CredType": "cred/none",
        "SlurmUser": getpass.getuser(),
        "SlurmdUser": getpass.getuser(),
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "ReturnToService": 2,
        "SlurmdParameters": "config_overrides",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "KillWait": 5,
        "SchedulerParameters": "sched_interval=1,sched_min_interval=1,batch_sched_delay=0",
        "NodeName": f"{host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN",
        "PartitionName": "main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    }
    (folder / "slurm.conf").write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    with open(folder / "log", "w") as log:
        daemons = [
            subprocess.Popen([name, "-D"], env=environment, stdout=log, stderr=log) for name in ("slurmctld", "slurmd")
        ]
    try:
        wait_for(lambda: call(environment, "sinfo", "--noheader", "--format=%t", check=False).startswith("idle"))
        yield environment
        call(environment, "scancel", f"--user={getpass.getuser()}")
        wait_for(lambda: not call(environment, "squeue", "--noheader"))
    finally:
        for daemon in daemons:
            daemon.terminate()
        assert [daemon.wait(timeout=30) for daemon in daemons] == [0, 0], (folder / "log").read_text()


def call(environment, *command, check=True, cwd=None):
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=cwd)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


class Submitted:
    """A submitted job of two tasks. ``log`` is its output."""

    def __init__(self, cluster, folder, *arguments, options=(), **environment):
        self.environment = cluster | environment
        shutil.copytree(REPOSITORY / "launch", folder / "launch")
        if not (folder / ".venv").exists():
            (folder / ".venv/bin").mkdir(parents=True)
            (folder / ".venv/bin/python").write_text(PYTHON)
            (folder / ".venv/bin/python").chmod(0o755)
        command = ("sbatch", "--parsable", "--nodes=1", "--ntasks-per-node=2", *options, "launch/slurm.sh", *arguments)
        self.id = call(self.environment, *command, cwd=folder).strip()
        self.folder = folder

    def state(self):
        shown = call(self.environment, "scontrol", "show", "job", self.id)
        return re.search(r"JobState=(\w+)", shown)[1], re.search(r"ExitCode=(\S+)", shown)[1]

    def wait(self, state, seconds=30):
        wait_for(lambda: self.state()[0] == state, seconds)

    def begins(self):
        wait_for(lambda: all((self.folder / f"began-{i}").exists() for i in range(2)))

    def go_on(self, seconds=30):
        """Restart the job.

        Slurm restarts a job after two minutes; here after seconds, unless the node takes it for the old job.
        """
        shown = ("scontrol", "show", "job", self.id)
        wait_for(lambda: re.search("(?s)PENDING.*Restarts=1 ", call(self.environment, *shown)), seconds)
        call(self.environment, "scontrol", "update", f"JobId={self.id}", "StartTime=now+3seconds")

    @property
    def log(self):
        return (self.folder / f"jaxrl_llm-{self.id}.log").read_text()


def test_each_task_trains_and_insists_on_the_others(cluster, tmp_path):
    for i in range(2):
        (tmp_path / f"saved-{i}").touch()
    job = Submitted(cluster, tmp_path, "--config=a.py", "--workdir=it's here")
    job.wait("COMPLETED")
    ours = "insists=1: -m jaxrl_llm.train --config=a.py --workdir=it's here"
    assert sorted(job.log.splitlines()) == [f"rank {i} of 2 {ours}" for i in range(2)]


def test_a_point_of_a_sweep_is_a_command(cluster, tmp_path):
    for i in range(2):
        (tmp_path / f"saved-{i}").touch()
    job = Submitted(cluster, tmp_path, "python -m jaxrl_llm.train '--workdir=it is here' --config.seed=4")
    job.wait("COMPLETED")
    assert "rank 0 of 2 insists=1: -m jaxrl_llm.train --workdir=it is here --config.seed=4\n" in job.log


def test_bad_input_is_not_started_again(cluster, tmp_path):
    job = Submitted(cluster, tmp_path, "--config.seed=-1")
    job.wait("FAILED")
    assert job.state()[1] == "2:0" and job.log.count("rank 0") == 1


def test_a_fault_is_started_again_a_few_times(cluster, tmp_path):
    job = Submitted(cluster, tmp_path, "--config.seed=1", MAX_RESTARTS="1")
    job.go_on()
    job.wait("FAILED")
    assert job.state()[1] == "1:0" and job.log.count("rank 0") == 2
    assert f"train goes on in a new start of job {job.id} (start 1): it ended with status 1\n" in job.log


def test_a_job_that_sigterm_stopped_saves_and_goes_on(cluster, tmp_path):
    job = Submitted(cluster, tmp_path, "--workdir=x", MAX_RESTARTS="0")
    job.begins()
    call(cluster, "scancel", "--signal=TERM", job.id)
    job.go_on()
    job.wait("COMPLETED")
    assert f"train goes on in a new start of job {job.id} (start 1): it was stopped\n" in job.log


def test_a_job_whose_time_is_up_saves_and_goes_on(cluster, tmp_path):
    """The limit is half a minute. Slurm's signal may come a minute earlier; slurm.sh itself asks for two minutes."""
    assert "\n#SBATCH --signal=TERM@120\n" in (REPOSITORY / "launch/slurm.sh").read_text()
    job = Submitted(cluster, tmp_path, "--workdir=x", options=("--time=2", "--signal=TERM@30"))
    job.go_on(seconds=150)
    job.wait("COMPLETED")
    assert "(start 1): it was stopped\n" in job.log


def test_a_job_that_slurm_starts_anew_saves_and_goes_on(cluster, tmp_path):
    job = Submitted(cluster, tmp_path, "--workdir=x")
    job.begins()
    call(cluster, "scontrol", "requeue", job.id)
    job.go_on()
    job.wait("COMPLETED")
    assert (tmp_path / "saved-0").exists()


def test_a_cancelled_job_saves_and_stays_cancelled(cluster, tmp_path):
    job = Submitted(cluster, tmp_path, "--workdir=x")
    job.begins()
    call(cluster, "scancel", job.id)
    job.wait("CANCELLED")
    wait_for(lambda: not call(cluster, "squeue", "--noheader", f"--jobs={job.id}", check=False))
    assert job.state()[0] == "CANCELLED" and (tmp_path / "saved-0").exists()


def test_processes_of_jax_find_each_other(cluster, tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)
    (tmp_path / "job.py").write_text(JOB)
    ours = {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    job = Submitted(cluster, tmp_path, "python job.py", **ours)
    job.wait("COMPLETED", seconds=120)
    assert "0 2 2\n" in job.log and job.log.count("done\n") == 2


def test_a_checkout_without_an_environment_is_said(tmp_path):
    command = ["bash", REPOSITORY / "launch/slurm.sh", "--config=a.py"]
    environment = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path} has no .venv; bash launch/setup.sh gpu makes it\n"
