"""Sandbox pools that the tests of one module share: one pool for each isolation."""

import pytest

from jaxrl_llm.sandbox.sandbox import Limits, Sandbox, SandboxError

LIMITS = Limits(seconds=5.0, memory_mb=256, processes=8, output_kb=16, disk_mb=4, open_files=32)

_pools: dict[str, Sandbox] = {}
_reasons: dict[str, str] = {}


def shared_pool(isolation: str) -> Sandbox:
    """Return the shared pool of an isolation. Skip the test if this machine does not allow the isolation."""
    if isolation in _reasons:
        pytest.skip(_reasons[isolation])
    if isolation not in _pools:
        try:
            _pools[isolation] = Sandbox(LIMITS, isolation=isolation)
        except SandboxError as error:
            _reasons[isolation] = str(error)
            pytest.skip(str(error))
    return _pools[isolation]


def worker_pids() -> set[int]:
    """Return the process ids of the workers of every shared pool."""
    return {worker.process.pid for pool in _pools.values() for worker in pool._workers}


def close_pools() -> None:
    """Close every shared pool. The next test that asks for a pool opens a new one."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()
    _reasons.clear()
