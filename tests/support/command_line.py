"""The commands as a user types them, run inside the test process with the same flags, exit status and streams."""

import dataclasses
import pathlib
import runpy
import sys
import warnings

import pytest
from absl import app, flags

from jaxrl_llm.runtime import hosts

DEBUG_CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "debug.py"


@dataclasses.dataclass(frozen=True)
class Done:
    """The result of a command that has ended."""

    status: int
    out: str
    err: str


def run_command(name, *arguments, monkeypatch, capfd):
    """Run ``python -m jaxrl_llm.<name> <arguments>``, or a file's command.

    Exceptions that it does not catch are raised here.
    """
    file = str(name).endswith(".py")
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # the command's is its own
    monkeypatch.setattr(hosts, "_leave_at_once", lambda status: None)  # this process goes on
    app.define_help_flags()  # once per process; the command's own flags are taken away again
    before = set(flags.FLAGS)
    sys.modules.pop("config_config", None)  # what ml_collections calls the file of --config: a process has one
    capfd.readouterr()
    try:
        with warnings.catch_warnings():
            # Not errors for users either: runpy's, that another test imported the module, and those of ml_collections.
            warnings.simplefilter("ignore", RuntimeWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(name) if file else runpy.run_module(f"jaxrl_llm.{name}", run_name="__main__")
    finally:
        for flag in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, flag)
        flags.FLAGS.unparse_flags()
    out, err = capfd.readouterr()
    return Done(ended.value.code or 0, out, err)
