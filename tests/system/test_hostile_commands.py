"""Command lines and config files from anybody: one line on stderr and exit status 2, or the requested result."""

import os
import subprocess
import sys

import pytest
from support.command_line import DEBUG_CONFIG, run_command
from support.refusal import refused_row

from jaxrl_llm.commands.sweep import read_sweep

# A setting that is refused: a command that gets as far has read its config and its flags.
END = "--config.seed=-1"


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Return the one line with which a command is refused. Earlier output is ignored."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        done = run_command(name, *arguments, monkeypatch=monkeypatch, capfd=capfd)
        lines = done.err.splitlines()
        assert done.status == 2 and len(lines) == 1 and lines[0].startswith("error: "), done
        assert lines[0].isprintable() and len(lines[0]) < 2100
        return lines[0]

    return run


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import sys\nsys.exit(0)\n", "mine.py:2: SystemExit: 0"),
        ("import sys\ndef get_config():\n    sys.exit('bye')\n", "mine.py:3: SystemExit: bye"),
        ("def get_config():\n    return get_config()\n", "mine.py:2: RecursionError"),
        ('{"prompt": "a"}\n', "mine.py: NameError: there is no get_config() in it"),
        ("get_config = 3\n", "mine.py: TypeError: 'int' object is not callable"),
        (
            "def get_config():\n    raise ValueError('a\\n\\x1b[31m' + 'b' * 5000)\n",
            "mine.py:2: ValueError: a \\x1b[31mb",
        ),
        ("def get_config(x):\n    return x\n", "mine.py: TypeError: get_config() missing 1 required"),
        ("\x00\x01", "mine.py: SyntaxError: source code string cannot contain null bytes"),
        ("\x7fELF\u0000", "mine.py: SyntaxError"),
    ],
)
def test_a_config_file_that_leaves_loops_or_is_none_is_one_line(text, named, tmp_path, refused):
    (tmp_path / "mine.py").write_text(text)
    assert named in refused("train", f"--config={tmp_path / 'mine.py'}", "--workdir=run", END)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_config_file_that_returns_no_settings_is_one_line(tmp_path, monkeypatch, capfd):
    for value in ("None", "3", "[1]"):
        (tmp_path / "mine.py").write_text(f"def get_config():\n    return {value}\n")
        words = [f"--config={tmp_path / 'mine.py'}", f"--workdir={tmp_path / 'run'}", END]
        done = run_command("train", *words, monkeypatch=monkeypatch, capfd=capfd)
        last = done.err.splitlines()[-1]  # of None, ml_collections warns before
        assert done.status == 2 and f"get_config() returned {value}, which is not a mapping of settings" in last, done


@pytest.mark.parametrize("path", [".", "/dev/null", "", "none.py", "x" * 300])
def test_a_config_that_is_no_file_is_one_line(path, refused):
    refused("train", f"--config={path}", "--workdir=run", END)


def test_a_config_file_of_arrays_names_the_line(tmp_path, refused):
    head = "import jax.numpy as jnp\nfrom jaxrl_llm.config import defaults\n\n\n"
    head += "def get_config():\n    config = defaults()\n"
    (tmp_path / "mine.py").write_text(
        f"{head}    config.optimizer.learning_rate = jnp.float32(0.1)\n    return config\n"
    )
    assert "mine.py:7: TypeError" in refused("train", f"--config={tmp_path / 'mine.py'}", "--workdir=run", END)
    (tmp_path / "mine.py").write_text(f"{head}    config.prompts.arguments = {{'a': jnp.ones(3)}}\n    return config\n")
    line = refused("train", f"--config={tmp_path / 'mine.py'}", "--workdir=run")
    assert "prompts.arguments={'a': Array([1., 1., 1.]" in line and "not JSON serializable" in line


def test_what_a_config_file_prints_is_shown_and_harms_nothing(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import sys\nfrom jaxrl_llm.config import defaults\nprint('out')\nprint('err', file=sys.stderr)\n\n\n"
        "def get_config():\n    print('again')\n    return defaults()\n"
    )
    words = [f"--config={tmp_path / 'mine.py'}", f"--workdir={tmp_path / 'run'}", END]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxrl_llm.train", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "out\nagain\n")
    assert done.stderr == "err\nerror: seed=-1 must be at least 0 and at most 2147483647\n"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([END, f"--config={DEBUG_CONFIG}"], "seed=-1 must be"),  # in any order
        ([f"--config={DEBUG_CONFIG}", f"--config={DEBUG_CONFIG}", END], "defined twice"),
        ([f"--config={DEBUG_CONFIG}", "--config.seed=5", "--config.seed=-2"], "seed=-2 must be"),  # the last one counts
        ([f"--config={DEBUG_CONFIG}", "--prompts=x"], "Unknown command line flag 'prompts'"),
        ([f"--config={DEBUG_CONFIG}", "--workers=2"], "Unknown command line flag 'workers'"),
        ([f"--config={DEBUG_CONFIG}", "--topology=v5e:2x4"], "Unknown command line flag 'topology'"),
        ([f"--config={DEBUG_CONFIG}", "run"], "unexpected argument 'run'"),
        ([f"--config={DEBUG_CONFIG}", "--", END], "unexpected argument '--config.seed=-1'"),
        ([f"--config={DEBUG_CONFIG}:big", END], "get_config() takes 0 positional arguments but 1 was given"),
        ([f"--config={DEBUG_CONFIG}", "--config.=3"], "--config.=3 must name a setting"),
        ([f"--config={DEBUG_CONFIG}", "--config.a..b=3"], "unknown config key a"),
        ([f"--config={DEBUG_CONFIG}", "--config.seed.x=3"], "seed={'x': '3'} must be of type int"),
        ([f"--config={DEBUG_CONFIG}", "--config.prompts=3"], "prompts='3' must be a group of settings"),
        ([f"--config={DEBUG_CONFIG}", "--config.seed"], "--config.seed must name a setting and its value"),
        ([f"--config={DEBUG_CONFIG}", "--config.replay.capacity="], "replay.capacity='' must be of type int"),
        ([f"--config={DEBUG_CONFIG}", "--allow_config_changes=perhaps"], "--allow_config_changes=perhaps"),
        (["--config"], "Missing value for flag --config"),
    ],
)
def test_flags_that_are_none_are_named(words, named, refused):
    assert named in refused("train", "--workdir=run", *words)


@pytest.mark.parametrize(
    ("workdir", "named"),
    [
        ("", "--workdir='' must name a folder"),
        ("run\n\x1b[31m", "--workdir='run\\n\\x1b[31m' must name a folder, in printable text"),
        (os.fsdecode(b"run\xff"), "--workdir='run\\udcff' must name a folder, in printable text"),
        ("gs://bucket/run", "--workdir='gs://bucket/run' must name a folder, in printable text, and no URL"),
        ("file/below", "--workdir=file/below cannot be written: Not a directory"),
        ("x" * 300, "File name too long"),
        ("/proc/none/below", "--workdir=/proc/none/below cannot be written"),
    ],
)
def test_a_workdir_that_cannot_be_is_named(workdir, named, tmp_path, refused):
    (tmp_path / "file").touch()
    assert named in refused("train", f"--config={DEBUG_CONFIG}", f"--workdir={workdir}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # and "" is not the folder that one is in


@pytest.mark.parametrize(
    ("command", "words", "named"),
    [
        ("sft", [f"--config={DEBUG_CONFIG}", "--out="], "--out='' must name a folder"),
        ("sft", [f"--config={DEBUG_CONFIG}", "--out=gs://a/b"], "--out='gs://a/b' must name a folder"),
        ("sweep", ["--workdir=s3://a/b", f"--config={DEBUG_CONFIG}"], "--workdir='s3://a/b' must name a folder"),
        ("generate", ["--model=random:debug", "--prompts=rows.jsonl", "--output="], "--output="),
        (
            "evaluate",
            [f"--config={DEBUG_CONFIG}", "--model=random:debug", "--num_samples=1000000000"],
            "--num_samples=",
        ),
        ("export", ["--model=random:debug", "--output="], "--output='' must name a folder"),
        ("export", ["--model=random:debug", "--output=gs://a/b"], "--output='gs://a/b' must name a folder"),
        ("serve", ["--model=random:debug", "--slots=80000000000"], "--slots=80000000000"),
        ("replay_plan", ["--mu=1e308", "--rho=0.1", "--alpha=0.1"], "--mu=1e+308 must be"),
        ("replay_plan", ["--mu=1", "--rho=0.1", "--alpha=0.1", "--rollouts=-5"], "--rollouts=-5 must be"),
        ("replay_plan", ["--mu=1", "--rho=0.1", "--alpha=0.1", f"--rollouts={'9' * 400}"], "--rollouts=999"),
    ],
)
def test_other_commands_refuse_flags_by_name(command, words, named, tmp_path, refused):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    assert named in refused(command, *words)


def test_a_sweep_file_that_leaves_is_one_line(tmp_path):
    (tmp_path / "mine.py").write_text("import sys\ndef get_sweep():\n    sys.exit(0)\n")
    with refused_row("mine.py", 3, "SystemExit: 0"):
        read_sweep(str(tmp_path / "mine.py"))


@pytest.mark.tier("slow")  # plain: test_sweep.test_points_run_once_in_few_processes_...
def test_a_sweep_starts_no_more_workers_than_it_has_points(tmp_path, monkeypatch, capfd):
    (tmp_path / "mine.py").write_text(
        "from jaxrl_llm.config import defaults\nfrom jaxrl_llm.sweeps.points import Sweep\n\n\n"
        "def get_config():\n    return defaults()\n\n\n"
        "def get_sweep():\n    return Sweep([{'model.path': '/nowhere'}])\n"
    )
    words = [f"--config={tmp_path / 'mine.py'}", f"--workdir={tmp_path / 'runs'}", "--workers=1000000000"]
    done = run_command("sweep", *words, monkeypatch=monkeypatch, capfd=capfd)
    assert done.status == 1 and "1 of 1 points" in done.err


BROKEN = ['{"prompt": "a\\ud800"}', '{"prompt": "a", "answer": ' + "9" * 5000 + "}", '{"prompt": ' + "[" * 100_000]


@pytest.mark.parametrize("row", BROKEN, ids=["half a character", "long number", "deep"])
def test_rows_that_python_cannot_hold_are_refused_with_their_line(row, tmp_path, refused):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "b"}\n' + row + "\n")
    words = [f"--config={DEBUG_CONFIG}", "--workdir=run", "--config.prompts.source=jsonl"]
    words.append("--config.eval.num_prompts=0")
    assert "rows.jsonl:2: " in refused("train", *words, f"--config.prompts.name={tmp_path / 'rows.jsonl'}")
    if row is not BROKEN[0]:
        line = refused("generate", "--model=random:debug", f"--prompts={tmp_path / 'rows.jsonl'}", "--output=out.jsonl")
        assert "rows.jsonl:2: not JSON" in line


@pytest.mark.parametrize(
    "arguments", ["{'terms': 10**9}", "{'terms': 1}", "{'largest': 10**30}", "{'modulus': -1}", "{'terms': '2'}"]
)
def test_sums_that_are_too_long_are_refused(arguments, tmp_path, refused):
    (tmp_path / "mine.py").write_text(
        "from jaxrl_llm.config import defaults\n\n\ndef get_config():\n    config = defaults()\n"
        f"    config.prompts.source = 'arithmetic'\n    config.prompts.arguments = {arguments}\n    return config\n"
    )
    line = refused("train", f"--config={tmp_path / 'mine.py'}", "--workdir=run")
    assert "prompts.arguments." in line and "must be a whole number of at least" in line
