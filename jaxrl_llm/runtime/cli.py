"""Common parts of all commands: flags, one-line errors with exit status 2, the choice of an available platform.

Owns: the parsing of a command line, the exit status. Does not know: the work of a command.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import glob
import os
import pathlib
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from absl import app, flags

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.runtime import hosts as distributed
from jaxrl_llm.runtime import package_files
from jaxrl_llm.runtime.run_record import RunRecord, read_run_record
from jaxrl_llm.settings.schema import Text, build, override, visible

# Device nodes of TPUs (older and newer drivers) and of NVIDIA and AMD GPUs.
ACCELERATORS = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*", "/dev/kfd")


def run(
    main: Callable[[], None],
    *,
    text: str | None = None,
    stops: bool = False,
    alone: bool = False,
) -> None:
    """Parse the flags, call ``main()`` and end the process. This function never returns.

    Bad input (a ``ConfigError``, an unknown or malformed flag) prints one line on stderr and exits with status 2. A
    ``MachineError`` prints one line and exits with status 1. Any other exception is a bug and keeps its traceback.

    Args:
        text: text that ``--help`` prints above the flags; None for the docstring of the main module.
        stops: ``main`` handles SIGTERM itself.
        alone: the command must run on one host.
    """
    _choose_platform()
    sys.unraisablehook = _print_unraisable
    gc.set_threshold(100_000)  # start-up makes millions of objects that stay; collection would take 7 % of its time

    def command(argv: list[str]) -> None:
        if argv[1:]:
            raise ConfigError(f"unexpected argument {argv[1]!r}; settings are given as --name=value")
        distributed.initialize(alone=alone)
        if not stops:
            distributed.end_at_sigterm()
        with distributed.together(_status_of), writing("output"):
            main()

    with distributed.ending_at_once(), one_line_errors(), _help_text(main, text):
        app.run(command, flags_parser=_parse)


def _status_of(error: BaseException) -> int:
    """Return the exit status of a command that ends with an error."""
    return 2 if isinstance(error, ConfigError) else 1


@contextlib.contextmanager
def _help_text(main: Callable[[], None], text: str | None) -> Iterator[None]:
    """Let ``--help`` print ``text`` and the flags of the module of ``main``.

    Otherwise absl prints the docstring and the flags of the main module, which is a thin runner.
    """
    main_module = sys.modules["__main__"]
    before = main_module.__doc__
    main_module.__doc__ = before if text is None else text
    for flag in flags.FLAGS.get_flags_for_module(main.__module__):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    try:
        yield
    finally:
        main_module.__doc__ = before


def _print_unraisable(error: sys.UnraisableHookArgs) -> None:
    """Print an error that cannot be raised, unless an event loop is closed.

    When a write fails, parallel writes find their event loop closed. Only the error of the first write is printed.
    """
    if "Event loop is closed" not in str(error.exc_value):
        sys.__unraisablehook__(error)


class DiskError(distributed.MachineError):
    """Error for a disk that is full or cannot be written."""


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Print a ``ConfigError``, a ``MachineError`` or an error of a flag as one line on stderr, and end the process."""
    try:
        yield
    except (ConfigError, distributed.MachineError, flags.Error) as error:
        print("error: " + visible(" ".join(str(error).split())[:2000]), file=sys.stderr)
        sys.exit(1 if isinstance(error, distributed.MachineError) else 2)


@contextlib.contextmanager
def writing(folder: str | os.PathLike) -> Iterator[None]:
    """Convert an exception from a full or read-only disk into a ``DiskError`` that names the path."""
    try:
        yield
    except (ConfigError, distributed.MachineError):
        raise
    except Exception as error:
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            # Recognise the error by its message, because tensorstore and safetensors raise other types.
            if os.strerror(code) in str(error):
                path = getattr(error, "filename", None) or folder
                raise DiskError(f"{path}: {os.strerror(code)}") from error
        raise


def _parse(argv: list[str]) -> list[str]:
    """Parse the flags, apply the overrides of settings, and return the remaining words."""
    argv = [_with_home(word) for word in argv]
    original_argv = sys.argv
    argv, overrides = apart(argv)
    argv = _with_config_files(argv)
    argv, made_with = _take_record(argv)
    try:
        # The parser ml_collections.config_flags reads overrides from sys.argv, and cannot parse all overrides of this
        # package.
        sys.argv = argv
        rest = flags.FLAGS(argv)
        for name in flags.FLAGS:
            value = flags.FLAGS[name].value
            hasattr(value, "to_dict")  # access the value: this raises an error if its config file is missing
            is_path = name in ("workdir", "out") and value is not None
            if is_path and (not value.isprintable() or value == "" or "://" in value):
                raise ConfigError(f"--{name}={value!r} must name a folder, in printable text, and no URL")
    except (Exception, SystemExit) as error:  # also catch SystemExit, because a config file may call sys.exit
        _check_config_files(argv)  # ml_collections does not report the error inside the file
        if isinstance(error, OSError):
            raise ConfigError(error) from error
        raise
    finally:
        sys.argv = original_argv
    if overrides:
        _override(overrides, argv)
    if made_with is not None:
        check_files_of(made_with.get("files", {}), flags.FLAGS["config"].value)
    return rest


def _with_home(word: str) -> str:
    """Return a word of the command line with the home folder in place of "~" in --workdir=~/run.

    A shell does not expand "~" there.
    """
    match = re.match("(--?[a-z_]+=)(~/.*)", word, re.DOTALL)
    if match is None:
        return word
    return match[1] + os.path.expanduser(match[2])


def _with_config_files(argv: list[str]) -> list[str]:
    """Replace the name of a recipe after ``--config`` by the path of its file.

    The name must be replaced here, because ml_collections reads ``recipe:dapo`` as the file "recipe" and an argument of
    its ``get_config``.
    """
    words = list(argv)
    for i, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name not in ("--config", "-config") or "config" not in flags.FLAGS:
            continue
        if equals:
            words[i] = f"{name}={package_files.config_file(text)}"
        elif i + 1 < len(words):
            words[i + 1] = package_files.config_file(words[i + 1])
    return words


def _take_record(argv: list[str]) -> tuple[list[str], dict[str, Any] | None]:
    """Remove a ``--config`` that names a run or its config.json from the command line, and set the flag from the run.

    Returns:
        The remaining command line, and the entry "made_with" of config.json; None if ``--config`` is a Python file.

    Raises:
        ConfigError: config.json is missing, or no run has written it.
    """
    for i, word in enumerate(argv):
        name, equals, path = word.partition("=")
        if name not in ("--config", "-config") or "config" not in flags.FLAGS:
            continue
        path = path if equals else next(iter(argv[i + 1 :]), "")
        file = pathlib.Path(os.path.expanduser(path))
        if path and os.path.isdir(file):  # the result is False also for a name that is not valid
            file = file / "config.json"
        if file.suffix != ".json":
            continue
        record = _read_record(path, file)
        build(Config, record.settings)  # check names and types; combinations are checked after the overrides
        flags.FLAGS["config"].value = record.settings
        num_words = 1 if equals else 2
        return argv[:i] + argv[i + num_words :], record.made_with
    return argv, None


def _read_record(path: str, file: pathlib.Path) -> RunRecord:
    """Return the content of the config.json ``file`` that ``--config=path`` refers to.

    Raises:
        ConfigError: the file cannot be read, or no run has written it.
    """
    try:
        found = read_run_record(file)
    except ConfigError as error:
        raise ConfigError(f"--config={path!r:.200} must be a Python file or a run's config.json: {error}") from error
    if found.made_with is None:
        raise ConfigError(f"--config={path!r:.200} must be a Python file or the config.json that a run has written")
    return found


def check_files_of(recorded: dict[str, str], settings: Any) -> None:
    """Check that the functions of a recorded run are still available in unchanged files.

    Args:
        recorded: digests of the files of the functions, from the record of the run.
        settings: the settings of the new run. Only the functions in these settings are checked.

    Raises:
        ConfigError: a function existed only in the memory of the recorded run, or its file has changed or is missing.
    """
    config = build(Config, settings)
    chosen = {spec: "rewards.functions" for spec in config.rewards.functions}
    chosen |= {config.environments.factory: "environments.factory"}
    chosen |= {spec: "external.paths" for spec in config.external.paths}
    for spec, setting in chosen.items():
        if spec.startswith("__main__:") or "<" in spec.rpartition(":")[2]:
            raise ConfigError(
                f"{setting} names {spec!r:.200}, which was in the memory of that run alone: put the function into a "
                f"file, and name it with --config.{setting}=path/to/file.py:function"
            )
        if spec not in recorded:
            continue
        digest = config.files.get(spec)
        if digest != recorded[spec]:
            became = "has changed since the run" if digest else "cannot be found here"
            raise ConfigError(
                f"{setting} names {spec!r:.200}, whose file {became}: restore the file (a relative path begins in the "
                f"working folder), or set --config.{setting}"
            )


def _check_config_files(argv: list[str]) -> None:
    """Raise a ``ConfigError`` for a ``--config=FILE`` whose code or ``get_config()`` raises, with file and line."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, path = argument.partition("=")
        path, *arguments = (path if equals else following).split(":", 1)
        if name in ("--config", "-config") and os.path.exists(path) and not os.path.isdir(path):
            try:
                _run_config_file(path, arguments)
            except (Exception, SystemExit) as error:
                lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
                where = f"{path}:{lines[-1]}" if lines else path
                message = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
                raise ConfigError(f"{where}: {message}") from error


def _run_config_file(path: str, arguments: list[str]) -> None:
    """Run a config file and its ``get_config(*arguments)``. Raise an error if the result is not a settings mapping."""
    module = runpy.run_path(path)
    if "get_config" not in module:
        raise NameError("there is no get_config() in it")
    settings = module["get_config"](*arguments)
    if not isinstance(settings, Mapping) and not hasattr(settings, "to_dict"):
        raise TypeError(f"get_config() returned {settings!r:.60}, which is not a mapping of settings")


def apart(argv: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split a command line into its other words and the (path, value) of each override ``--config.a.b=value``.

    Raises:
        ConfigError: an override has no path or no value, or ``--config`` is given twice.
    """
    rest: list[str] = []
    overrides = []
    words = iter(argv)
    for word in words:
        if word == "--":
            rest += [word, *words]
            break
        match = re.match(r"--?config\.([^=]*)(?:=(.*))?$", word, re.DOTALL)
        if not match:
            rest.append(word)
            continue
        path = match[1]
        text = match[2]
        is_next_word = text is None
        if is_next_word:
            text = next(words, "--")
        if not path or (is_next_word and text.startswith("--")):
            raise ConfigError(f"{word} must name a setting and its value: --config.a.b=VALUE")
        overrides.append((path, text))
    configs = [word for word in rest if re.match("--?config=", word)]
    if overrides and len(configs) > 1:
        raise ConfigError("--config is defined twice")
    return rest, overrides


def _override(overrides: list[tuple[str, str]], argv: list[str]) -> None:
    """Apply the overrides of the command line to the settings of ``--config``.

    Raises:
        ConfigError: there is no ``--config``, or a setting is unknown or not allowed.
    """
    if "config" not in flags.FLAGS or flags.FLAGS["config"].value is None:
        raise ConfigError(f"--config.{overrides[0][0]} needs --config=FILE, whose settings it changes")
    flag = flags.FLAGS["config"]
    settings = flag.value.to_dict() if hasattr(flag.value, "to_dict") else flag.value
    if not isinstance(settings, Mapping):
        return _check_config_files(argv)
    for path, text in sorted(overrides, key=_depth):  # override a function before its settings
        settings = override(settings, path, Text(text))
    build(Config, settings)
    flag.value = settings


def _depth(path_and_text: tuple[str, str]) -> int:
    """Return the number of dots in the path of an override."""
    return path_and_text[0].count(".")


def _choose_platform() -> None:
    """Select the CPU if there is no accelerator. An installed libtpu would otherwise print errors about chips."""
    if "JAX_PLATFORMS" in os.environ or any(glob.glob(pattern) for pattern in ACCELERATORS):
        return
    # An environment variable reaches every later import of jax, also in child processes.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")
