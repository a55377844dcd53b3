"""The record of a run: the file config.json in its workdir.

The record has every setting of the run, and under "made_with" the environment: versions, commit, devices, processor
and the digests of the files with the user's own functions.

Owns: the content of "made_with", the check of its types. Does not know: the readers of the record.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import pathlib
import platform
import subprocess
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxrl_llm.config import Config, as_mapping
from jaxrl_llm.runtime.json_lines import read_json
from jaxrl_llm.settings.schema import ConfigError

# Packages that determine the numbers of a run.
PACKAGES = (
    "jaxrl_llm",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "tokenizers",
    "transformers",
    "math-verify",
    "reasoning-gym",
)


class RunRecord(NamedTuple):
    """Content of a config.json."""

    settings: dict[str, Any]  # nested settings, from which config.recorded makes a Config
    made_with: dict[str, Any] | None  # the environment of the run; None = the file was not written by a run

    @property
    def versions(self) -> dict[str, str]:
        """Versions of Python and of the packages, by name."""
        return (self.made_with or {}).get("versions", {})

    @property
    def files(self) -> dict[str, str]:
        """Digest of the file of each function that is not part of the package, by the function's name."""
        return (self.made_with or {}).get("files", {})


def record(config: Config, mesh: Mesh | None = None, *, processor: str = "") -> str:
    """Return the text of a run's config.json.

    Args:
        processor: processor of the host (``machine.processor``). The hosts of one run may have different ones.
    """
    devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}" if mesh else ""
    made_with = {
        "versions": versions(),
        "commit": _commit(),
        "devices": devices,
        "files": config.files,
    }
    if processor:
        made_with["processor"] = processor
    return json.dumps({**as_mapping(config), "made_with": made_with}, indent=2, sort_keys=True)


def read_run_record(path: pathlib.Path) -> RunRecord:
    """Return the content of a run's config.json.

    Raises:
        ConfigError: the file cannot be read, or "made_with" is damaged.
    """
    settings = read_json(path)
    made_with = settings.pop("made_with", None)
    if made_with is None:
        return RunRecord(settings, None)
    _check_object("made_with", made_with, path)
    for name in ("versions", "files"):
        _check_object(f"made_with.{name}", made_with.get(name, {}), path)
    return RunRecord(settings, made_with)


def _check_object(name: str, value: Any, path: pathlib.Path) -> None:
    """Raise a ``ConfigError`` if a value of a config.json is not an object."""
    if isinstance(value, dict):
        return
    try:
        text = f"{value!r:.60}"
    except ValueError:  # Python refuses to print an integer with this many digits
        text = "(an integer that is too large to print)"
    raise ConfigError(f"{path}: {name}={text} must be an object; the file is damaged")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed ``PACKAGES``."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _commit() -> str:
    """Return the commit of the checkout of this module, with "+" if files differ from it; "" without a checkout."""
    module = pathlib.Path(__file__)
    try:
        _git("ls-files", "--error-unmatch", module.name)  # this command fails if git does not track this file
        commit = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit + ("+" if changes else "")


def _git(*arguments: str) -> str:
    """Return the output of a git command in the folder of this module."""
    folder = pathlib.Path(__file__).parent
    # Use no optional locks, because a command that is killed with the run would leave its lock behind.
    command = ["git", "--no-optional-locks", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
