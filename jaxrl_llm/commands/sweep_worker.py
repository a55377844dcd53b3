"""Sweep worker: the process that runs points of a sweep, one after another.

    parent (commands.sweep)                    this process
    -----------------------                    ------------
    hand out a point             ---->         train in its workdir, append everything printed to log.txt there,
                                               then call the sweep's ``after``
    mark it, hand out the next   <----         whether the point ended well
    close the connection         ---->         end

One process runs many points, so that jax is imported once. If the parent ends, the connection closes too. In that case
the running point still runs to its end, but no other point begins. SIGTERM ends a point like any run, with a
checkpoint.

Owns: the run of one point. Does not know: which points there are.
"""

from __future__ import annotations

import io
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from jaxrl_llm.config import Config, ConfigError, from_json
from jaxrl_llm.runtime import bucket, json_lines
from jaxrl_llm.runtime.hosts import MachineError
from jaxrl_llm.settings.functions import resolve
from jaxrl_llm.sweeps.points import AFTER

LOG = "log.txt"


def main(fileno: int, train: Callable[[Config, pathlib.Path], int] | None = None) -> None:
    """Serve the connection until it closes.

    Args:
        train: function (config, workdir) -> exit status; None for the real ``train``.
    """
    with Connection(fileno) as connection:
        while True:
            try:
                config, workdir, after = connection.recv()
            except EOFError:
                return
            connection.send(run_point(from_json(config), pathlib.Path(workdir), train or _train, after))


def run_point(
    config: Config,
    workdir: pathlib.Path,
    train: Callable[[Config, pathlib.Path], int],
    after: str,
) -> bool:
    """Run a point and return whether it ended well. Standard output and error are appended to ``workdir/log.txt``."""
    workdir.mkdir(parents=True, exist_ok=True)
    with open(workdir / LOG, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the log may be read during the run
    try:
        status = train(config, workdir)
        if status == 0 and after:
            numbers = {str(name): float(value) for name, value in resolve(after)(config, workdir).items()}
            # Write the whole file or nothing, because its presence marks the point as finished.
            bucket.write_whole(workdir / AFTER, json_lines.written(numbers))
        stopped = [128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
        return status == 0 or status in stopped
    except (ConfigError, MachineError) as error:
        print(f"error: {error}", file=sys.stderr)
    except (Exception, SystemExit):  # a user's own function may call sys.exit
        traceback.print_exc()
    finally:
        sys.stdout.flush()
    return False


def _train(config: Config, workdir: pathlib.Path) -> int:
    import jax

    from jaxrl_llm.commands.train import train

    try:
        return train(config, workdir)
    finally:
        jax.clear_caches()  # free the programs, because the next point has other programs
