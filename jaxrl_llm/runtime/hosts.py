"""The processes of a job on several hosts: joined before jax is first used; the first one speaks.

    JAXRL_DISTRIBUTED=1                                                    TPU pod or cluster that jax recognises
    JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=N JAX_PROCESS_ID=I anywhere else

Owns: which process this is. Does not know: what the processes compute.
"""

from __future__ import annotations

import os
import sys

from jaxrl_llm.config import ConfigError


def initialize() -> None:
    """Join the job that the environment names; without one this process is the whole job.

    Raises:
        ConfigError: the environment names half a job.
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if not address and os.environ.get("JAXRL_DISTRIBUTED") != "1":
        return
    import jax  # here: a command that has no job to join need not pay for it

    if address:
        numbers = {name: os.environ.get(name, "") for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")}
        for name, value in numbers.items():
            if not value.isdigit():
                raise ConfigError(f"{name}={value!r} must be a number beside JAX_COORDINATOR_ADDRESS={address}")
        count, index = map(int, numbers.values())
        jax.distributed.initialize(address, num_processes=count, process_id=index)
    else:
        jax.distributed.initialize()
    if jax.process_index() != 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, open until the process ends
