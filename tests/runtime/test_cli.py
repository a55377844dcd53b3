"""Commands: bad input is one line on stderr and exit status 2, our own errors keep their traceback."""

import os
import subprocess
import sys

import pytest

COMMAND = """
import os, sys
from absl import flags
from ml_collections import config_flags
from jaxrl_llm.runtime import cli
from jaxrl_llm.config import ConfigError
config_flags.DEFINE_config_file("config")
NUMBER = flags.DEFINE_integer("number", 1, "A number.")

def main():
    if NUMBER.value == 2:
        raise ConfigError("a.b=2 is not\\nallowed")
    if NUMBER.value == 3:
        raise ValueError("ours")
    if NUMBER.value == 4:
        raise OSError(28, "No space left on device", "/disk/file")
    if NUMBER.value == 5:
        with cli.writing("/disk"):
            raise RuntimeError("RESOURCE_EXHAUSTED: No space left on device [places in its source]")
    if NUMBER.value == 6:
        raise ConfigError("/disk: No space left on device")
    print(NUMBER.value, os.environ["JAX_PLATFORMS"])

cli.run(main)
"""


def run(*arguments, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, env=environment)


def test_a_good_command_runs():
    done = run("--number=7", JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stdout, done.stderr) == (0, "7 cpu\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--number=2"], "error: a.b=2 is not allowed\n"),
        (["--nmber=2"], "error: Unknown command line flag 'nmber'. Did you mean: number ?\n"),
        (["--number=x"], "error: flag --number=x: invalid literal for int() with base 10: 'x'\n"),
        (["stray"], "error: unexpected argument 'stray'; settings are given as --name=value\n"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message):
    done = run(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_a_config_file_or_key_that_is_not_there_is_one_line_and_status_2(tmp_path):
    config = tmp_path / "config.py"
    config.write_text("from jaxrl_llm.config import defaults\n\n\ndef get_config():\n    return defaults()\n")
    assert run(f"--config={config}", "--config.seed=5").returncode == 0
    for arguments, message in [
        ([f"--config={tmp_path}/none.py"], f"No such file or directory: '{tmp_path}/none.py'"),
        ([f"--config={tmp_path}"], "Is a directory"),
        ([f"--config={config}", "--config.sead=5"], "unknown config key sead='5'; did you mean seed"),
        ([f"--config={config}", "--config.update.bach_size=5"], "update.bach_size='5'; did you mean update.batch_size"),
        ([f"--config={config}", "--config.seed=x"], "--config.seed=x"),
        ([f"--config={config}", "--config.prompts.arguments.x=5"], "prompts.arguments.x: the config file has no"),
    ]:
        done = run(*arguments)
        assert done.returncode == 2 and done.stdout == "", done
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr, done


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [
        (4, 1, "error: /disk/file: No space left on device\n"),
        (5, 1, "error: /disk: No space left on device\n"),
        (6, 2, "error: /disk: No space left on device\n"),
    ],
)
def test_a_full_disk_is_one_line_and_status_1(number, status, message):
    done = run(f"--number={number}")
    assert (done.returncode, done.stdout, done.stderr) == (status, "", message)


def test_home_is_found_where_the_shell_leaves_the_tilde(tmp_path):
    (tmp_path / "it's.py").write_text("from jaxrl_llm.config import defaults as get_config\n")
    assert run("--config=~/it's.py", HOME=str(tmp_path)).returncode == 0
    assert "'~no/config.py'" in run("--config=~no/config.py", HOME=str(tmp_path)).stderr


def test_our_own_errors_keep_their_traceback():
    done = run("--number=3")
    assert done.returncode == 1 and "Traceback" in done.stderr and "ValueError: ours" in done.stderr
