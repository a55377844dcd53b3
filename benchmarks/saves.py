"""Measure the seconds of a checkpoint by its size, to compare them with the grace period of a preempted host.

    python -m benchmarks.saves --workdir=/shared/try [--bucket=gs://BUCKET/FOLDER] [--gb=0.1,1,4]

The state has ``--gb`` GB of float32 on the first device, in arrays of 64 MB. The command prints three times: how long
the loop stands still (checksums, copies to the host), when the checkpoint is whole, and how long reading and comparing
take. It writes into a new folder and removes the folder at the end.

Owns: a state of a given size. Does not know: the writing (runtime.checkpoint).
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

ARRAY = 2**24  # numbers in an array


def times(gb: float, workdir: pathlib.Path, where: str) -> tuple[float, float, float]:
    """Return the seconds in which the loop stands still, until the checkpoint is whole, and until it is read."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    num_whole, rest = divmod(int(gb * 1e9 / 4), ARRAY)
    sizes = [ARRAY] * num_whole
    if rest:
        sizes.append(rest)
    state = {}
    for i, size in enumerate(sizes):
        numbers = jnp.arange(i, size + i, dtype=jnp.float32)
        state[f"array_{i:04}"] = jax.device_put(numbers, one)
    sums = jax.jit(checksums).lower(state).compile()

    def checksums_of(_: str, part: dict) -> dict:
        return sums(part)

    config = freeze({})
    with contextlib.closing(Checkpointer(workdir, CheckpointConfig(bucket=where))) as checkpoints:
        jax.block_until_ready(state)
        started = time.monotonic()
        checkpoints.save(1, {"state": state}, {}, config, pass_rate=None, checksums=checksums_of)
        blocked_s = time.monotonic() - started
        checkpoints.wait()
        whole_s = time.monotonic() - started
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), state)
        started = time.monotonic()
        jax.block_until_ready(
            checkpoints.restore(
                {"state": like}, config, allow_config_changes=False, checksums=checksums_of
            ).device_state
        )
        return blocked_s, whole_s, time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workdir",
        type=pathlib.Path,
        default=pathlib.Path("runs"),
        help="folder on the disk that is measured",
    )
    parser.add_argument("--bucket", default="", help="checkpoint.bucket of a run, instead of the disk")
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
            cells = " | ".join(f"{seconds:.1f}" for seconds in times(gb, folder, where))
            print(f"| {gb:g} | {cells} |", flush=True)
        finally:
            shutil.rmtree(folder)
            if where:
                bucket.remove(bucket.place(where))
    print(f"{os.cpu_count()} CPU cores, {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
