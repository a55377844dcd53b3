"""The page run_on_a_tpu_pod: its commands run in their order, with stand-ins for the programs of clusters.

``plan`` is not run, only its settings are checked. test_slurm and test_cluster_files run the real programs of Slurm and
Docker.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import yaml
from support.checkout import REPOSITORY, SUPPORT, Cloud, wait_for

from jaxrl_llm.config import freeze

PAGE = (REPOSITORY / "docs/how-to/run_on_a_tpu_pod.md").read_text()
(POD_PY,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [line.strip() for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
MOUNT = "sudo mkdir -p /shared && (mountpoint -q /shared || sudo mount -t nfs 10.0.0.2:/vol /shared)"
PROGRAMS = ("docker", "kubectl", "gcluster", "xpk", "sky", "sbatch", "xprof")


def index_of(*parts):
    (found,) = (i for i, command in enumerate(COMMANDS) if all(part in command for part in parts))
    return found


class Typist(Cloud):
    """Runs commands in a checkout with pod.py and a model. Exported variables stay set."""

    def __init__(self, folder):
        super().__init__(folder)
        (self.root / "pod.py").write_text(POD_PY)
        (self.root / "questions.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
        (self.root / "models/llama-8b").mkdir(parents=True)
        (self.root / "models/llama-8b/config.json").write_text("{}")
        self.stand_in("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        for name in PROGRAMS:
            self.stand_in(name, f'#!/bin/sh\nexec {sys.executable} -S {SUPPORT / "stand_in_program"} {name} "$@"\n')
        self.environment |= {"FAKE_CALLS": str(folder / "calls"), "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
        self.exports = []
        self.plan(workers=2)

    def type(self, command, status=0):
        """Run a command and return its output."""
        if command.startswith("export "):
            self.exports.append(command)
        text = "\n".join([*self.exports, command])
        done = subprocess.run(
            ["bash", "-c", text], env=self.environment, cwd=self.root, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def calls(self, program):
        """Return (words, standard input) of each call of a stand-in."""
        path = pathlib.Path(self.environment["FAKE_CALLS"])
        lines = path.read_text().splitlines() if path.exists() else []
        return [(words, text) for words, text in map(json.loads, lines) if words[0] == program]


@pytest.fixture
def typist(tmp_path):
    typist = Typist(tmp_path)
    typist.logged.write_text("")
    yield typist
    typist.end()


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Return the words of each command that --launch=print shows for a sweep in the folder DIR."""
    command = [sys.executable, "-m", "jaxrl_llm.sweep", "--config=configs/sweeps/debug.py", "--workdir=DIR"]
    folder = tmp_path_factory.mktemp("printed")
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*command, "--launch=print"], env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    return [shlex.split(line) for line in done.stdout.splitlines()]


def needs_envsubst():
    if shutil.which("envsubst") is None:
        pytest.skip("envsubst (Debian: gettext-base) is not installed")


def test_the_settings_are_good_and_fit_the_slice(monkeypatch):
    monkeypatch.delenv("PROFILE_PORT", raising=False)
    names = {}
    exec(POD_PY, names)
    config = freeze(names["get_config"]())
    assert config.mesh.fsdp == 64 and "--topology=v6e:8x8" in COMMANDS[index_of("jaxrl_llm.plan")]
    for count in (config.update.batch_size, config.update.micro_batch_size, config.rollout.prompts_per_iteration):
        assert count % 64 == 0


def test_from_an_empty_project_to_a_fetched_model(typist):
    """Sections 1 to 3 of the page: the run starts, is followed, stopped, preempted, and continues to its end."""
    make = index_of("--create=v6e-64", "--before=")
    plan, follow, stop = index_of("jaxrl_llm.plan"), index_of("my-tpu", "--follow"), index_of("my-tpu", "--stop")
    for command in COMMANDS[:make]:
        if command != COMMANDS[plan]:
            typist.type(command)
    run = typist.folder("/shared/my-run")
    (many,) = re.findall("`(-- --config[^`]*)`", PAGE)
    first = subprocess.Popen(
        ["bash", "-c", "\n".join([*typist.exports, f"{COMMANDS[make]} {many}"])],
        env=typist.environment,
        cwd=typist.root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for((run / "iteration-1").exists)
    assert (typist.worker(1) / "models/llama-8b/config.json").exists()
    assert (typist.worker(1) / "questions.jsonl").exists()
    typist.type(COMMANDS[stop], status=143)
    assert first.wait(timeout=60) == 143
    saved = int((run / "checkpoint").read_text())
    assert "stopped by SIGTERM" in typist.type(COMMANDS[follow], status=143)
    typist.gcloud("PREEMPT", "my-tpu")
    out = typist.type(f"{COMMANDS[make]} {many.replace('400', str(saved + 2))}")
    assert "SUSPENDED: making it anew" in out and f"starts at iteration {saved}\n" in out
    for command in COMMANDS[stop + 1 : index_of("docker build")]:
        typist.type(command)
    assert (typist.root / "runs/hf/config.json").exists()
    assert (typist.folder("gs://my-bucket/my-run") / "hf/config.json").exists()
    assert not run.exists()
    assert not (typist.cloud / "tpus/my-tpu").exists()


def test_clusters_get_the_command(typist):
    """Sections 4 to 6 of the page, with the variables that they export."""
    needs_envsubst()
    typist.exports = [command for command in COMMANDS[: index_of("docker build")] if command.startswith("export ")]
    first, last = index_of("docker build"), index_of("sbatch", "--config=pod.py")
    for command in COMMANDS[first : last + 1]:
        typist.type(command)
    train = "python -m jaxrl_llm.train --config=pod.py --workdir=/shared/my-run"
    image = "us-east5-docker.pkg.dev/my-project/my-repo/jaxrl_llm:1"
    (applied,) = (yaml.safe_load(text) for words, text in typist.calls("kubectl") if words[1] == "apply")
    pods = applied["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pods["volumes"][-1]["nfs"]["server"] == "10.0.0.2"
    (pod,) = pods["containers"]
    assert (applied["metadata"]["name"], pod["image"]) == ("my-run", image)
    assert {"name": "TRAIN", "value": train} in pod["env"]
    for program in ("gcluster", "xpk"):
        *before, (words, _) = typist.calls(program)
        assert f"--command={train}" in words
        mounted = [word for one, _ in [*before, (words, _)] for word in one if "/shared" in word and "mount" in word]
        gcluster = "--mount=filestore://my-share/vol;/shared;rw"
        assert mounted == ["--mount-point=/shared" if program == "xpk" else gcluster]
        assert any(word in words for word in (f"--image={image}", f"--docker-image={image}"))
        (codes,) = (word.partition("=")[2] for word in words if word.startswith("--restart-on-exit-codes="))
        # xpk adds 127 to 255 itself. Bad input, 2, fails for good.
        ends = {128 + number for number in (signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)}
        assert set(map(int, codes.split(","))) == {1} | (ends if program == "gcluster" else set())
    assert {"SHARE=10.0.0.2", f"TRAIN={train}"} <= set(typist.calls("sky")[0][0])
    ((words, _),) = typist.calls("sbatch")
    assert words[-4:] == ["launch/slurm.sh", "--config=pod.py", "--workdir=/shared/my-run", "--config.mesh.fsdp=16"]
    assert (typist.root / words[-4]).exists()


@pytest.mark.tier("slow")  # plain: test_from_an_empty_project_to_a_fetched_model
@pytest.mark.parametrize("program", ["kubectl", "gcloud", "sky", "sbatch"])
def test_a_sweep_gives_each_cluster_a_job_for_each_point(program, typist, printed):
    needs_envsubst()
    typist.plan(workers=1)
    typist.exports = [command for command in COMMANDS if command.startswith("export ")]
    own = {"gcloud": "tpu_pod.sh", "kubectl": "kubectl", "sky": "sky jobs", "sbatch": "sbatch"}[program]
    command = COMMANDS[index_of("jaxrl_llm.sweep", own)]
    (folder,) = re.findall(r"--workdir=(runs/sweeps/\w+) ", command)
    share = "" if program == "sbatch" else "/shared/"  # Slurm's disk is shared
    typist.type(COMMANDS[index_of("filestore instances create")])
    fetched = typist.root / folder / "a point of before"
    fetched.mkdir(parents=True)
    wanted = {tuple(word.replace("=DIR/", f"={share}{folder}/") for word in words) for words in printed}
    typist.type(command)
    if program == "gcloud":
        # Detached: the runs have begun.
        wait_for(lambda: sum("jaxrl_llm.train" in line for line in typist.log) == 4)
        given = {tuple(["python", *line.split()]) for line in typist.log if "jaxrl_llm.train" in line}
        assert not list(typist.cloud.glob(f"tpus/**/{fetched.name}"))
    elif program == "kubectl":
        jobs = [yaml.safe_load(text) for _, text in typist.calls("kubectl")]
        assert len({job["metadata"]["name"] for job in jobs}) == 4
        for job in jobs:
            assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
        pods = [job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"] for job in jobs]
        given = {tuple(shlex.split(pod["containers"][0]["env"][0]["value"])) for pod in pods}
    elif program == "sky":
        given = {
            tuple(shlex.split(word.removeprefix("TRAIN=")))
            for words, _ in typist.calls("sky")
            for word in words
            if word.startswith("TRAIN=")
        }
    else:
        given = {tuple(shlex.split(words[-1])) for words, _ in typist.calls("sbatch")}
    assert given == wanted and len(wanted) == 4


def has_the_tpu_and_the_share(typist):
    typist.type(COMMANDS[index_of("filestore instances create")])
    make = ["compute", "tpus", "queued-resources", "create", "my-tpu", "--node-id=my-tpu", "--zone=us-east5-b"]
    typist.gcloud(*make, "--accelerator-type=v6e-8", "--runtime-version=v2-alpha-tpuv6e")
    typist.gcloud(
        *("compute", "tpus", "queued-resources", "list", "--zone=us-east5-b"),
        "--format=value(name.basename(),state.state)",
    )


@pytest.mark.tier("slow")  # plain: test_from_an_empty_project_to_a_fetched_model
def test_the_sweep_is_fetched_and_shown(typist):
    typist.type("mkdir -p runs/sweeps")
    has_the_tpu_and_the_share(typist)
    shared = '#!/bin/bash\nexec TAR "${@/#--directory=\\/shared/--directory=$HOME/shared}"\n'
    typist.stand_in("tar", shared.replace("TAR", shutil.which("tar")))
    point = typist.folder("/shared/runs/sweeps/one/a_point")
    for name in ("checkpoints/1/state", "hf/model.safetensors", "eval_after.json"):
        (point / name).parent.mkdir(parents=True, exist_ok=True)
        (point / name).write_text("{}")
    fetch = index_of("ssh my-tpu", "/shared", "runs/sweeps/one")
    mount = shlex.quote(f"--command={MOUNT}")
    typist.type(f"gcloud compute tpus tpu-vm ssh my-tpu --zone=us-east5-b --worker=all {mount}")
    for command in COMMANDS[fetch : fetch + 3]:
        typist.type(command)
    folder = typist.root / "runs/sweeps/one"
    assert (folder / "table.csv").exists()
    assert [path.name for path in (folder / "a_point").iterdir()] == ["eval_after.json"]


def test_a_profile_is_made_and_fetched(typist):
    has_the_tpu_and_the_share(typist)
    typist.exports = [command for command in COMMANDS if command.startswith("export ")]
    typist.type("mkdir -p runs")
    first = index_of("PROFILE_PORT=9012")
    for command in COMMANDS[first : first + 4]:
        typist.type(command)
    assert (typist.root / "runs/profile").exists()
    assert index_of("xprof --logdir=runs/profile") == first + 3 == len(COMMANDS) - 1


@pytest.mark.tier("slow")  # plain: test_from_an_empty_project_to_a_fetched_model
def test_saves_are_timed_on_one_worker_without_its_chips(tmp_path):
    """The chips of one worker would wait for the other workers, which run nothing.

    This test names a missing platform instead.
    """
    (command,) = re.findall(r"^    (.*benchmarks\.saves.*)$", PAGE, re.MULTILINE)
    assert command.endswith("python -m benchmarks.saves --workdir=/shared")
    command = f"{command.replace('python', shlex.quote(sys.executable)).replace('/shared', str(tmp_path))} --gb=0.001"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "chips_of_a_pod"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_names_statuses_messages_and_files_that_are_there():
    scripts = "\n".join(path.read_text() for path in sorted((REPOSITORY / "launch").glob("*.sh")))
    said = ("train runs here already", "queued resource $name is $state", "TPU $name is ")
    for text in (*said, "gcloud does not say how $2 $name is", "queued resource $name is there no more"):
        assert text in scripts
        assert re.sub(r"\$\w+.*", "", text) in PAGE
    for name in re.findall(r"`(launch/[\w.]+)`", PAGE):
        assert (REPOSITORY / name).exists(), name


def test_the_model_of_a_run_without_a_share_comes_from_its_bucket():
    """The disk with metrics, report and exported model is deleted with the pod, also after a job that ends well."""
    (section,) = re.findall(r"^## Train without a share\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
    assert "is lost with the machine" in section
    (command,) = re.findall(r"`python -m jaxrl_llm\.export ([^`]*)`", section)
    given = dict(word.removeprefix("--").split("=") for word in command.split())
    assert given["checkpoint"] == re.findall(r"--config\.checkpoint\.bucket=([^`]*)`", section)[0]
    source = (REPOSITORY / "jaxrl_llm/commands/export.py").read_text()
    assert set(given) <= set(re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', source))
