"""launch/tpu_pod.sh: a TPU is created, set up, followed, stopped, preempted or broken. Its cloud is
tests/support/gcloud, whose workers are processes of this machine; train is a stand-in that ends as train does
(support/stand_in_pod_train.py).
"""

import json
import os
import shlex
import shutil
import signal

import pytest
from support.checkout import INSTALLS, REPOSITORY, SUPPORT, Checkout, Cloud, free_port, wait_for
from support.refusal import check_words

# Each test starts the workers' processes of a pod. Those that are marked "plain" are in the plain suite.
pytestmark = pytest.mark.tier("slow")

TPU = ("--name=my-tpu", "--zone=us-east5-b")
MOUNT = "sudo mkdir -p /shared && (mountpoint -q /shared || sudo mount -t nfs 10.0.0.2:/vol /shared)"
POD = (*TPU, "--config=configs/debug.py", "--workdir=/shared/my-run", f"--before={MOUNT}")
CREATE = ("--create=v6e-64", "--spot")
SCRIPT = "launch/tpu_pod.sh"


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    cloud.plan(workers=2)
    cloud.gcloud(
        *("filestore", "instances", "create", "my-share", *TPU[1:], "--tier=BASIC_HDD"),
        *("--file-share=name=vol,capacity=1TB", "--network=name=default"),
    )
    yield cloud
    cloud.end()


@pytest.fixture
def pod(cloud):
    """Return a stand-in for Google Cloud that has the TPU."""
    cloud.gcloud(
        *("compute", "tpus", "queued-resources", "create", *TPU[1:], "my-tpu", "--node-id=my-tpu"),
        *("--accelerator-type=v6e-8", "--runtime-version=v2-alpha-tpuv6e"),
    )
    cloud.gcloud("compute", "tpus", "queued-resources", "list", *TPU[1:], "--format=value(name.basename(),state.state)")
    return cloud


def trained(log):
    return [line for line in log if line.startswith("-m jaxrl_llm.train")]


# ---- what it runs --------------------------------------------------------------------------------------

COPY = "--exclude=./.venv* --exclude=./.git --exclude=./runs ."
DRY_RUN = f"""\
gcloud compute tpus queued-resources create my-tpu --node-id=my-tpu WHERE --accelerator-type=v6e-64 \
--runtime-version=v2-alpha-tpuv6e --spot
ssh --worker=all [ ! -f jaxrl_llm/launch/worker.sh ] || bash jaxrl_llm/launch/worker.sh check
tar --create --gzip --file=/tmp/jaxrl_llm.tar.gz {COPY}
gcloud compute tpus tpu-vm scp /tmp/jaxrl_llm.tar.gz my-tpu:jaxrl_llm.tar.gz WHERE --worker=all
ssh --worker=all mkdir -p jaxrl_llm && tar --extract --gzip --file=jaxrl_llm.tar.gz --directory=jaxrl_llm
ssh --worker=all command -v python3.11 > /dev/null || (sudo apt-get -qq -o DPkg::Lock::Timeout=300 update \
&& sudo apt-get -qq -o DPkg::Lock::Timeout=300 install -y python3.11-venv)
ssh --worker=all cd jaxrl_llm && PYTHON=python3.11 bash launch/setup.sh tpu
ssh --worker=all cd jaxrl_llm && nproc
ssh --worker=all cd jaxrl_llm && bash launch/worker.sh start 'env JAXRL_DISTRIBUTED=1 python -m jaxrl_llm.train \
--config=configs/debug.py --workdir=/shared/my-run --config.seed=3'
train runs on all workers of my-tpu, and goes on without this terminal; to follow it, to stop it:
    bash launch/tpu_pod.sh --name=my-tpu WHERE --follow
    bash launch/tpu_pod.sh --name=my-tpu WHERE --stop
ssh --worker=0 cd jaxrl_llm && bash launch/worker.sh follow
ssh --worker=all cd jaxrl_llm && bash launch/worker.sh end
"""


def shortened(line):
    """Return a line without quotes around words, in which one word replaces the options of all ssh calls."""
    if "--command=" in line:
        words = shlex.split(line)
        assert words[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "my-tpu"]
        assert words[6:8] == ["--zone=us-east5-b", "--project=mine"]
        return f"ssh {words[8]} {words[9].removeprefix('--command=')}"
    line = line.replace("--zone=us-east5-b --project=mine", "WHERE")
    return line.replace("'--exclude=./.venv*'", "--exclude=./.venv*")


@pytest.mark.tier("plain")
def test_a_dry_run_prints_the_commands_and_runs_none(tmp_path):
    checkout = Checkout(tmp_path)
    checkout.stand_in("gcloud", "#!/bin/bash\necho called >> $FAKE_LOG\n")
    given = (*POD, "--project=mine", *CREATE, "--before=nproc", "--dry-run", "--", "--config.seed=3")
    done = checkout.run(SCRIPT, *given)
    assert (done.returncode, done.stderr, checkout.log) == (0, "", [])
    assert [shortened(line) for line in done.stdout.splitlines()] == DRY_RUN.splitlines()


@pytest.mark.tier("plain")
def test_each_worker_gets_the_checkout_and_the_arguments_as_they_were_given(pod):
    odd = "--config.prompts.name=it's $HOME/a b.jsonl"
    done = pod.run(SCRIPT, *POD, f"--before={MOUNT} && echo $PWD/before", "--", odd)
    assert done.returncode == 0, done.stderr
    for i in range(2):
        assert (pod.worker(i) / "configs/debug.py").exists()
        assert f"{pod.worker(i)}/before\n" in done.stdout
        # Each on a line of its own, whichever worker was first.
        assert f"[my-tpu-w{i}] train ended with status 0\n" in done.stdout
    ours = f"-m jaxrl_llm.train --config=configs/debug.py --workdir=/shared/my-run {odd}"
    assert sorted(pod.log) == sorted(2 * [INSTALLS[0].replace("wheels]", "wheels,tpu]"), INSTALLS[1], ours])
    assert "host 0 of 2 starts at iteration 0\niteration 3/3\n" in done.stdout


def test_a_point_of_a_sweep_is_a_command(pod):
    command = "python -m jaxrl_llm.train --config=configs/debug.py '--workdir=/shared/a b' --config.seed=4"
    done = pod.run(SCRIPT, *TPU, f"--command={command}", POD[-1])
    assert done.returncode == 0, done.stderr
    assert trained(pod.log) == 2 * [shlex.join(shlex.split(command)[1:]).replace("'", "")]


# ---- how it ends ---------------------------------------------------------------------------------------


@pytest.mark.tier("plain")
def test_a_tpu_is_waited_for(cloud):
    cloud.plan(workers=2, delay=3)
    done = cloud.run(SCRIPT, *POD, *CREATE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("queued resource my-tpu is WAITING_FOR_RESOURCES\n") == 1
    assert "iteration 3/3" in done.stdout


@pytest.mark.parametrize("silent", [[0], [2], [1, 2, 3]], ids=["before it is asked for", "once", "three times"])
def test_a_cloud_that_does_not_answer_is_asked_again(cloud, silent):
    """Once, an error was read as "no such queued resource", or as "the TPU exists"."""
    cloud.plan(workers=2, delay=3, silent=silent)
    done = cloud.run(SCRIPT, *POD, *CREATE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("queued resource my-tpu is WAITING_FOR_RESOURCES\n") == 1
    assert "queued resource my-tpu is \n" not in done.stdout and "iteration 3/3" in done.stdout


def test_a_cloud_that_never_answers_is_an_error_before_anything_is_made(cloud):
    cloud.plan(workers=2, silent=list(range(100)))
    done = cloud.run(SCRIPT, *POD, *CREATE)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: gcloud does not say how queued resource my-tpu is"
    assert '"queued-resources", "create"' not in (cloud.cloud / "calls").read_text()


def test_a_queued_resource_that_somebody_deletes_is_not_waited_for(cloud):
    """Once, the wait had no end and no message."""
    cloud.plan(workers=2, delay=2, vanishes=True)
    done = cloud.run(SCRIPT, *POD, *CREATE)
    assert done.returncode == 1 and "queued resource my-tpu is not listed\n" in done.stdout
    assert "error: queued resource my-tpu is there no more\n" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_the_wait_for_a_tpu_says_how_it_is_deleted(cloud, number):
    """The queued resource stays, and costs money when the TPU is created."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("what starts these tests has them ignore the signal, as nohup and & of a script do")
    cloud.plan(workers=2, delay=10**6)
    process = cloud.start(SCRIPT, *POD, *CREATE, start_new_session=True)
    assert process.stdout.readline() == "queued resource my-tpu is WAITING_FOR_RESOURCES\n"
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=30)
    assert process.returncode != 0 and err.endswith(
        "TPU my-tpu was asked for, and costs as soon as it is there; to delete it:\n"
        "    gcloud compute tpus queued-resources delete my-tpu --zone=us-east5-b --force\n"
    )


def test_a_connection_that_breaks_is_no_tpu_that_is_gone(pod):
    pod.plan(workers=2, fails=0, unseen=2)
    done = pod.run(SCRIPT, *TPU, "--follow")
    assert done.returncode == 255 and "TPU my-tpu is" not in done.stderr
    pod.plan(workers=2, fails=0, unseen=100)
    done = pod.run(SCRIPT, *TPU, "--follow")
    assert done.returncode == 1
    said = ["error: gcloud does not say how TPU my-tpu is", "train may go on there: --follow follows it"]
    assert done.stderr.splitlines()[-2:] == said


def test_a_tpu_that_is_being_preempted_is_made_anew_when_it_is_gone(pod):
    pod.plan(workers=2, suspending=2)
    pod.gcloud("PREEMPT", "my-tpu")
    done = pod.run(SCRIPT, *POD, *CREATE)
    assert done.returncode == 0, done.stderr
    assert "queued resource my-tpu is SUSPENDED: making it anew" in done.stdout and "iteration 3/3" in done.stdout


def test_a_tpu_that_is_there_is_not_made_again(pod):
    assert pod.run(SCRIPT, *POD, *CREATE).returncode == 0
    calls = [json.loads(line) for line in (pod.cloud / "calls").read_text().splitlines()]
    assert sum("queued-resources" in call and "create" in call for call in calls) == 1  # the fixture's


def test_a_tpu_that_cannot_be_had_is_said(cloud):
    cloud.plan(workers=2, stockout=True)
    done = cloud.run(SCRIPT, *POD, *CREATE)
    assert done.returncode == 1
    assert done.stderr.endswith("error: queued resource my-tpu is FAILED\n")
    # The next time it is asked for anew.
    cloud.plan(workers=2)
    done = cloud.run(SCRIPT, *POD, *CREATE)
    assert done.returncode == 0 and "queued resource my-tpu is FAILED: making it anew\n" in done.stdout


@pytest.mark.tier("plain")
def test_bad_input_ends_with_status_2(pod):
    done = pod.run(SCRIPT, *POD, "--", "--config.seed=-1")
    assert done.returncode == 2
    assert "error: seed=-1 must be at least 0\n" in done.stdout


@pytest.mark.tier("plain")
def test_stop_lets_all_workers_save_and_the_same_command_goes_on(pod):
    many = ("--", "--config.num_iterations=400")
    assert pod.run(SCRIPT, *POD, "--detach", *many).returncode == 0
    wait_for((pod.folder("/shared/my-run") / "iteration-1").exists)
    done = pod.run(SCRIPT, *TPU, "--stop")
    assert done.returncode == 143
    for i in range(2):
        assert f"[my-tpu-w{i}] train ended with status 143\n" in done.stdout
    assert done.stderr.endswith("stopped; the same command goes on from the last checkpoint\n")
    saved = int((pod.folder("/shared/my-run") / "checkpoint").read_text())
    assert 0 < saved < 400
    done = pod.run(SCRIPT, *POD, "--", f"--config.num_iterations={saved + 2}")
    assert done.returncode == 0
    assert f"host 0 of 2 starts at iteration {saved}\niteration {saved + 2}/{saved + 2}\n" in done.stdout


@pytest.mark.tier("plain")
def test_a_worker_that_dies_ends_the_others_and_is_named(pod):
    process = pod.start(SCRIPT, *POD, "--", "--config.num_iterations=400")
    wait_for((pod.folder("/shared/my-run") / "iteration-0").exists)
    os.kill(int((pod.worker(1) / "train.pid").read_text().split()[0]), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: decode: host 1 is gone\n" in out
    assert "[my-tpu-w1] train ended with status 137\n" in out


def test_the_status_of_any_worker_that_fails_is_the_status(pod):
    done = pod.run(SCRIPT, *TPU, "--command=bash -c 'exit $((3 * JAX_PROCESS_ID))'")
    assert done.returncode == 3
    assert "[my-tpu-w0] train ended with status 0\n" in done.stdout
    assert "[my-tpu-w1] train ended with status 3\n" in done.stdout


def test_a_start_that_is_tried_again_starts_nothing_more(pod):
    """gcloud repeats a command after a broken connection, even if the command was executed."""
    assert pod.run(SCRIPT, *POD, "--detach", "--", "--config.num_iterations=400").returncode == 0
    start = "--command=cd jaxrl_llm && bash launch/worker.sh start 'python -m jaxrl_llm.train'"
    pod.gcloud("compute", "tpus", "tpu-vm", "ssh", "my-tpu", *TPU[1:], "--worker=all", start)
    wait_for(lambda: len(trained(pod.log)) >= 2)
    assert len(trained(pod.log)) == 2


def test_a_worker_that_cannot_be_reached_starts_nothing_anywhere(pod):
    pod.plan(workers=2, fails=1)
    done = pod.run(SCRIPT, *POD)
    assert done.returncode != 0 and trained(pod.log) == []
    assert "on worker 1 failed with exit status 255" in done.stderr


def test_a_worker_on_which_train_does_not_start_stops_it_on_the_others(pod):
    """The other workers would wait for the failed worker for 20 minutes."""
    (pod.worker(1) / "train.pid/kept").mkdir(parents=True)  # which start cannot remove
    done = pod.run(SCRIPT, *POD)
    assert done.returncode == 1 and "sent SIGTERM to train" in done.stdout
    assert "error: train did not start on all workers of my-tpu; stopping it\n" in done.stderr
    wait_for(lambda: not pod.processes())


def test_a_machine_that_was_restarted_is_said(pod):
    assert pod.run(SCRIPT, *POD, "--detach", "--", "--config.num_iterations=400").returncode == 0
    pod.end()
    for i in range(2):
        (pod.worker(i) / "train.status").unlink(missing_ok=True)
        (pod.worker(i) / "train.pid").write_text("1 another start of the machine\n")
    done = pod.run(SCRIPT, *TPU, "--follow")
    assert done.returncode == 1
    assert "[my-tpu-w0] train ended without a status: it was killed, or the machine was restarted\n" in done.stdout


def test_a_second_start_beside_a_running_one_is_refused(pod):
    many = ("--", "--config.num_iterations=400")
    assert pod.run(SCRIPT, *POD, "--detach", *many).returncode == 0
    done = pod.run(SCRIPT, *POD, *many)
    assert done.returncode == 1
    assert "train runs here already (process " in done.stdout
    assert done.stderr.endswith("error: --follow follows what runs on my-tpu, --stop stops it\n")
    assert trained(pod.log) == []
    assert pod.run(SCRIPT, *TPU, "--stop").returncode == 143


def test_from_nothing_to_a_model_through_two_preemptions(cloud):
    """One preemption has a notice (SIGTERM to one worker), the other has none. The TPU's disks are lost."""
    run = cloud.folder("/shared/my-run")
    many = ("--", "--config.num_iterations=400")
    for notice in (True, False):
        process = cloud.start(SCRIPT, *POD, *CREATE, *many)
        wait_for((run / "iteration-1").exists)
        if notice:
            cloud.terminate(1)
            wait_for((run / "checkpoint").exists)
            wait_for(lambda: not cloud.processes() or (cloud.worker(0) / "train.status").exists())
        cloud.gcloud("PREEMPT", "my-tpu")
        (run / "iteration-1").unlink()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 143, err
        assert "goes on from the last checkpoint" in err
    saved = int((run / "checkpoint").read_text())
    assert saved > 0
    done = cloud.run(SCRIPT, *POD, *CREATE, "--", f"--config.num_iterations={saved + 3}")
    assert done.returncode == 0, done.stderr
    assert "queued resource my-tpu is SUSPENDED: making it anew\n" in done.stdout
    assert f"host 0 of 2 starts at iteration {saved}\n" in done.stdout
    target = cloud.elsewhere / "model"
    target.mkdir()
    scp = ("compute", "tpus", "tpu-vm", "scp", *TPU[1:], "--recurse")
    cloud.gcloud(*scp, "my-tpu:/shared/my-run/hf", f"{target}/")
    assert (target / "hf/config.json").read_text() == "{}"


@pytest.mark.parametrize("workers", [1, 2])
def test_train_itself_is_stopped_and_goes_on_to_its_end(workers, tmp_path):
    """This test runs the real ``train``. Its second start continues from the checkpoint of the first."""
    train = tmp_path / "train.py"
    train.write_text('import runpy\n\nrunpy.run_module("jaxrl_llm.train", run_name="__main__", alter_sys=True)\n')
    cloud = Cloud(tmp_path, train)
    cloud.plan(workers=workers, **({"join": f"127.0.0.1:{free_port()}"} if workers > 1 else {}))
    cloud.environment |= {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    run = tmp_path / "run"
    given = (*POD[:3], f"--workdir={run}", *CREATE, "--")
    try:
        process = cloud.start(SCRIPT, *given, "--config.num_iterations=400")
        wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text(), 300)
        cloud.terminate(workers - 1)
        out, err = process.communicate(timeout=120)
        assert "stopped by SIGTERM" in out, out + err
        done = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["iteration"]
        ended = cloud.run(SCRIPT, *given, f"--config.num_iterations={done + 1}", "--allow_config_changes")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert f"resumed at iteration {done} from" in ended.stdout
        assert (run / "hf/model.safetensors").exists()
    finally:
        cloud.end()


# ---- what it refuses -----------------------------------------------------------------------------------


@pytest.mark.tier("plain")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["--name"]),
        (POD[:1], ["--zone"]),
        (POD[:2], ["--config"]),
        ((*POD[:2], "--config=none.py"), ["--config=none.py"]),
        ((*POD[:2], "--config=/etc/passwd"), ["--config=/etc/passwd"]),
        ((*POD, "--wrkdir=x"), ["'--wrkdir=x'"]),
        ((*POD, "--create=v9-8"), ["--create=v9-8", "--runtime"]),
        ((*POD, "--spot"), ["--spot", "--create"]),
        ((*POD[:2], "--config=./runs/mine.py"), ["--config=./runs/mine.py"]),
        ((*POD[:2], "--command=cd a && python b"), ["--command=cd a && python b"]),
        ((*POD[:2], "--command=cd a; python b"), ["--command=cd a; python b"]),
        (POD, ["gcloud"]),
    ],
)
def test_bad_arguments_are_refused_with_the_usage_and_status_2(tmp_path, arguments, words):
    checkout = Checkout(tmp_path)
    (checkout.bin / "dirname").symlink_to(shutil.which("dirname"))
    done = checkout.run(SCRIPT, *arguments, PATH=str(checkout.bin))  # a machine without gcloud
    assert done.returncode == 2 and done.stdout == ""
    error, *usage = done.stderr.splitlines()
    assert error.startswith("error: ") and "bash launch/tpu_pod.sh" in "".join(usage)
    check_words(error, *words)


@pytest.mark.tier("plain")
def test_a_workdir_that_workers_do_not_share_is_refused(pod):
    done = pod.run(SCRIPT, *POD[:3], "--workdir=runs/pod")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: --workdir=runs/pod must be a folder that the 2 workers of my-tpu share, such as /shared/my-run,"
        " or --config.checkpoint.bucket=gs://... be given after --\n"
    )


@pytest.mark.parametrize(
    "given", [(*POD[:3], "--workdir=gs://b/r"), (*TPU, "--command=python -m jaxrl_llm.train '--workdir=gs://b/r'")]
)
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_bucket_is_no_workdir(cloud, given, more):
    cloud.plan(workers=1)
    done = cloud.run(SCRIPT, *given, *CREATE, *more)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(
        "error: --workdir=gs://... must be a folder that all workers share, such as a mounted Filestore share; "
        "a bucket holds checkpoints alone: --config.checkpoint.bucket=gs://...\n"
    )


def test_workers_whose_checkpoints_are_in_a_bucket_need_no_share(pod):
    setting = "--config.checkpoint.bucket=gs://my-bucket/my-run"
    done = pod.run(SCRIPT, *POD[:3], "--workdir=runs/pod", "--detach", "--", setting)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_workdir_that_workers_do_not_share_is_refused_before_a_tpu_is_made(cloud, more):
    """Once, the check ran only when the TPU existed, and the TPU stayed."""
    done = cloud.run(SCRIPT, *POD[:3], "--workdir=runs/pod", *CREATE, *more)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --workdir=runs/pod must be a folder that the workers of my-tpu share, such")
    calls = [json.loads(line) for line in (cloud.cloud / "calls").read_text().splitlines()]
    assert not any("queued-resources" in call for call in calls)


def test_an_error_after_a_tpu_was_made_says_how_it_is_deleted(cloud):
    """There is no such message if the TPU existed before, or once ``train`` runs."""
    delete = "gcloud compute tpus queued-resources delete my-tpu --zone=us-east5-b --force\n"
    done = cloud.run(SCRIPT, *POD[:4], "--before=exit 3", *CREATE)
    assert done.returncode != 0 and done.stderr.endswith(
        f"TPU my-tpu was asked for, and costs as soon as it is there; to delete it:\n    {delete}"
    )
    done = cloud.run(SCRIPT, *POD[:4], "--before=exit 3", *CREATE)
    assert done.returncode != 0 and delete not in done.stderr
    cloud.gcloud(*delete.split()[1:], "--quiet")
    done = cloud.run(SCRIPT, *POD, *CREATE, "--", "--config.seed=-1")
    assert done.returncode == 2 and delete not in done.stderr


def test_one_worker_has_a_workdir_of_its_own(cloud):
    cloud.plan(workers=1)
    done = cloud.run(SCRIPT, *POD[:3], "--create=v6e-8", "--spot")
    assert done.returncode == 0, done.stderr
    assert (cloud.worker(0) / "runs/pod/checkpoint").read_text() == "3"


@pytest.mark.tier("plain")
def test_a_tpu_that_is_not_there_is_said(cloud):
    done = cloud.run(SCRIPT, *POD)
    assert done.returncode == 1
    assert done.stderr.endswith("error: TPU my-tpu is not there\n")


def test_the_cloud_knows_no_other_flags(cloud):
    """The stand-in refuses a flag that gcloud does not have, as gcloud does."""
    with pytest.raises(AssertionError, match="unrecognized arguments: --wrker=all"):
        cloud.gcloud("compute", "tpus", "tpu-vm", "scp", "a", "my-tpu:a", "--zone=z", "--wrker=all")
    assert (SUPPORT / "gcloud").exists()
