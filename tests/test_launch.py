"""The scripts of launch/: the commands that they run, from any directory, and their failures.

No package is installed here: ``python3`` is a stand-in that records its arguments. tests/launch tests the scripts for
clusters and pods.
"""

import os
import re
import socket
import subprocess
import sys
import tomllib

import pytest
from support.checkout import INSTALLS, PYTHON3, REPOSITORY, Checkout
from support.tiers import TIERS, mostly_in

SCRIPTS = [*sorted(REPOSITORY.glob("launch/*.sh")), REPOSITORY / ".ci/run"]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_is_executable(script):
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert os.access(script, os.X_OK)


def test_setup_installs_once(checkout):
    first = checkout.run("launch/setup.sh")
    assert (first.returncode, first.stderr, checkout.log) == (0, "", INSTALLS)
    second = checkout.run("launch/setup.sh")
    assert (second.returncode, second.stdout, checkout.log) == (0, "", [])


def test_setup_installs_again_when_the_package_changes(checkout):
    checkout.run("launch/setup.sh")
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write("\n")
    checkout.run("launch/setup.sh")
    assert checkout.log == INSTALLS


def test_setup_adds_extras_and_keeps_them(checkout):
    checkout.run("launch/setup.sh")
    checkout.run("launch/setup.sh", "test", "plan")
    assert checkout.log[0].endswith(".[math,parquet,reasoning-wheels,test,plan]")
    checkout.run("launch/setup.sh", "plan")
    assert checkout.log == []
    checkout.run("launch/setup.sh")
    assert checkout.log == []


@pytest.mark.parametrize("extra", ["cuda", "plan-", "gpu tpu", ""])
def test_setup_refuses_an_extra_that_is_none_with_those_that_are(checkout, extra):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    known = " ".join(project["optional-dependencies"])
    for made in (False, True):
        if made:
            checkout.run("launch/setup.sh")
        done = checkout.run("launch/setup.sh", "test", extra)
        assert (done.returncode, done.stdout, checkout.log) == (1, "", [])
        assert done.stderr == f"error: there is no extra '{extra}'; known: {known}\n"


def test_an_install_that_failed_is_tried_again(checkout):
    assert checkout.run("launch/setup.sh", FAKE_PIP="1").returncode == 1
    checkout.run("launch/setup.sh")
    assert checkout.log == INSTALLS


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"FAKE_OLD": "1"}, "error: Python 3.11 or newer is needed; set PYTHON to one (found: Python 3.9.2)\n"),
        (
            {"FAKE_NO_VENV": "1"},
            "error: python3 cannot make virtual environments; on Debian or Ubuntu: apt-get install python3-venv\n",
        ),
    ],
)
def test_setup_says_what_the_machine_lacks(checkout, environment, message):
    for name in ("python3.11", "python3.12", "python3.13"):
        checkout.stand_in(name, PYTHON3)
    done = checkout.run("launch/setup.sh", **environment)
    assert (done.returncode, done.stderr) == (1, message)


def test_local_trains_the_main_job_with_the_arguments_given(checkout):
    assert checkout.run("launch/local.sh").returncode == 0
    main = "--config=configs/grpo_smollm2_135m_chain_sum.py"
    assert checkout.log[2:] == [f"-m jaxrl_llm.train {main} --workdir=runs/local"]
    checkout.run("launch/local.sh", "--config.num_iterations=4", "--workdir=runs/x")
    assert checkout.log == [
        f"-m jaxrl_llm.train {main} --workdir=runs/local --config.num_iterations=4 --workdir=runs/x"
    ]


@pytest.mark.parametrize("path", ['runs/it\'s "so" $HOME', "-dash é", "~tilde/*", "~/run"])
def test_local_hands_odd_paths_on_as_they_are(checkout, path):
    checkout.run("launch/local.sh", f"--workdir={path}", "--config", path)
    assert checkout.log[2:] == [f"-m jaxrl_llm.train --workdir=runs/local --workdir={path} --config {path}"]


def test_local_with_another_config_has_no_two(checkout):
    checkout.run("launch/local.sh", "--config=configs/debug.py")
    assert checkout.log[2:] == ["-m jaxrl_llm.train --workdir=runs/local --config=configs/debug.py"]


@pytest.mark.parametrize("script", ["launch/test.sh", ".ci/run"])
def test_tests_end_with_the_status_of_pytest(checkout, script):
    done = checkout.run(script, FAKE_STATUS="3")
    assert done.returncode == 3
    assert checkout.log[0].endswith(".[math,parquet,reasoning-wheels,test]")
    (call,) = checkout.log[2:]
    assert re.match(r"-m pytest --tier=plain -n [2-8] --dist=loadfile ", call)


def test_ci_runs_the_plain_suite_and_then_every_tier_and_prints_the_minutes_of_each(checkout):
    done = checkout.run(".ci/run")
    assert done.returncode == 0
    *tiers, parity = TIERS
    assert re.findall(r"--tier=(\w+)", "\n".join(checkout.log)) == tiers
    assert f"tier {parity}: not run, because" in done.stdout  # no peer is installed here
    assert re.findall(r"^tier (\w+) .* minutes, status 0$", done.stdout, re.MULTILINE) == list(TIERS)


def test_a_tier_installs_what_its_tests_need(checkout):
    checkout.run("launch/test.sh", "--tier=compiler", "-x")
    assert checkout.log[0].endswith(".[math,parquet,reasoning-wheels,test,plan]")
    assert checkout.log[2].startswith("-m pytest --tier=compiler ") and checkout.log[2].endswith(" -x")


def test_slurm_counts_faults_apart_from_what_ends_a_start_in_peace(checkout):
    """Slurm's own count includes preemptions and time limits. Once, after three of them no fault was restarted."""
    checkout.stand_in("srun", '#!/bin/sh\nexit "$FAKE_STATUS"\n')
    checkout.stand_in("scontrol", '#!/bin/sh\necho "scontrol $*" >> "$FAKE_LOG"\n')
    (checkout.root / ".venv/bin").mkdir(parents=True)
    (checkout.root / ".venv/bin/python").symlink_to(sys.executable)
    job = {"SLURM_SUBMIT_DIR": str(checkout.root), "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "run", "MAX_RESTARTS": "2"}
    job |= {"SLURM_JOB_NUM_NODES": "1"}
    seen = []
    for start, status in enumerate([143, 143, 143, 1, 143, 134, 143, 1]):
        how = job | {"SLURM_RESTART_COUNT": str(start), "FAKE_STATUS": str(status)}
        done = checkout.run("launch/slurm.sh", "--config=a.py", **how)
        seen.append((status, done.returncode, checkout.log))
    again = ["scontrol requeue 7"]
    ended = [(143, 0, again)] * 3 + [(1, 0, again), (143, 0, again), (134, 0, again), (143, 0, again), (1, 1, [])]
    assert seen == ended
    faults = (checkout.root / "run-7.faults").read_text().splitlines()
    assert [line.partition(", ")[2] for line in faults] == [
        f"start {start}: it ended with status {status}" for start, status in ((3, 1), (5, 134), (7, 1))
    ]


# ---- several processes ---------------------------------------------------------------------------------

JOB = """
import socket, sys, time
from jaxrl_llm.runtime import cli
def main():
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    leave = jax.distributed.shutdown
    jax.distributed.shutdown = lambda: (time.sleep(1.5), leave())  # the first host waits for one that is slow to leave
    indices = multihost_utils.process_allgather(np.array([jax.process_index()])).reshape(-1)
    print(indices.tolist(), jax.process_count(), len(jax.devices()), flush=True)
    print("done", file=sys.stderr)
cli.run(main)
"""


NAME_WITHOUT_ADDRESS = """
import re
import socket
look_up = socket.getaddrinfo
def refuse(host, *arguments, **options):
    if host == socket.gethostname():
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return look_up(host, *arguments, **options)
socket.getaddrinfo = refuse
"""


@pytest.mark.parametrize("before", mostly_in("slow", ["", NAME_WITHOUT_ADDRESS]), ids=["named", "name without address"])
def test_processes_join_and_the_first_one_speaks(before):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", before + JOB],
            env={**environment, "JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    # Gloo prints lines of its own to the same descriptor.
    printed = [[line for line in out.splitlines() if not line.startswith("[Gloo]")] for out, _ in ends]
    assert printed == [["[0, 1] 2 2"], []]
    assert all("done" in err for _, err in ends)


def test_half_a_job_is_refused():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2"}
    done = subprocess.run([sys.executable, "-c", JOB], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: JAX_PROCESS_ID='' must be a number if JAX_COORDINATOR_ADDRESS=h:1 is set\n"
