"""Seconds of a checkpoint by its size, on the disk or bucket of a run, to compare with the grace of a preempted host.

    python -m benchmarks.saves --workdir=/shared/try [--bucket=gs://BUCKET/FOLDER] [--gb=0.1,1,4]

The state is so many GB of float32 on the first device, in arrays of 64 MB. Seconds that the loop stands still for it
(checksums, copies to the host), until it is whole, and until it is back on the device and compared. Writes into a new
folder, which it removes.

Owns: a state of a given size. Does not know: how it is written (runtime.checkpoint).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shutil
import tempfile
import time

import jax
import jax.numpy as jnp

from jaxrl_llm.config import CheckpointConfig, freeze
from jaxrl_llm.ops.checksum import checksums
from jaxrl_llm.runtime import bucket
from jaxrl_llm.runtime.checkpoint import Checkpointer

ARRAY = 2**24  # numbers


def times(gb: float, workdir: pathlib.Path, where: str) -> tuple[float, float, float]:
    """Return the seconds in which the loop stands still, until the checkpoint is whole, and until it is read."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    whole, rest = divmod(int(gb * 1e9 / 4), ARRAY)
    sizes = [ARRAY] * whole + [rest] * (rest > 0)
    state = {
        f"array_{i:04}": jax.device_put(jnp.arange(i, size + i, dtype=jnp.float32), one) for i, size in enumerate(sizes)
    }
    sums = jax.jit(checksums).lower(state).compile()
    how, config = {"checksums": lambda _, part: sums(part)}, freeze({})
    with contextlib.closing(Checkpointer(workdir, CheckpointConfig(bucket=where))) as checkpoints:
        jax.block_until_ready(state)
        started = time.monotonic()
        checkpoints.save(1, {"state": state}, {}, config, pass_rate=None, **how)
        stood = time.monotonic() - started
        checkpoints.wait()
        whole = time.monotonic() - started
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), state)
        started = time.monotonic()
        jax.block_until_ready(
            checkpoints.restore({"state": like}, config, allow_config_changes=False, **how).device_state
        )
        return stood, whole, time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workdir",
        type=pathlib.Path,
        default=pathlib.Path("runs"),
        help="on the disk in question",
    )
    parser.add_argument("--bucket", default="", help="instead of that disk: checkpoint.bucket of a run")
    parser.add_argument(
        "--gb",
        type=lambda text: [float(size) for size in text.split(",")],
        default=[0.1, 1.0, 4.0],
    )
    given = parser.parse_args()
    given.workdir.mkdir(parents=True, exist_ok=True)
    print("| GB | the loop stands still, s | until it is whole, s | until it is read, s |\n|---|---|---|---|")
    for gb in given.gb:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="saves_", dir=given.workdir))
        where = given.bucket and f"{given.bucket.rstrip('/')}/{folder.name}"
        try:
            print(
                f"| {gb:g} | " + " | ".join(f"{seconds:.1f}" for seconds in times(gb, folder, where)) + " |",
                flush=True,
            )
        finally:
            shutil.rmtree(folder)
            if where:
                bucket.remove(bucket.place(where))
    print(f"{os.cpu_count()} CPU cores, {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
