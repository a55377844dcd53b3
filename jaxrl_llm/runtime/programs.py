"""Programs: functions with fixed argument shapes, which are compiled ahead of time so that their memory is known.

Owns: lowering, compiling, the count of later compilations, the memory in use while a program runs. Does not know: the
computation of a program.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import itertools
import os
import pathlib
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.runtime import hosts

# Advice for the error if a program does not fit its device.
MEMORY_SETTINGS = (
    "lower update.micro_batch_size, rollout.slots, replay.capacity, sampling.support_tokens or update.logp_chunk_tokens"
    ", set model.remat='full', optimizer.offload=True or replay.memory='host', or raise mesh.fsdp or mesh.tensor"
)

# If at least so many bytes were freed, returning them to the system is worth the time, once per iteration.
WORTH_RELEASING = 64 * 2**20

# Programs that run while the published weights are in memory.
SAMPLING = ("prefill", "reread", "decode", "read_group", "stop_rows", "collect", "choose")
# Programs that run before the rest of the state exists.
START_UP = ("init_sampler", "init_ring", "init_state", "eval_init_sampler", "publish_base")


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to compile, with the shapes of its arguments.

    Attributes:
        fn: pure function of arrays.
        args: its arguments as ``jax.ShapeDtypeStruct`` with shardings.
        out_shardings: shardings of the result.
        donate: indices of the arguments whose buffers the result may reuse.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    out_shardings: Any = None
    donate: tuple[int, ...] = ()

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        """Trace the function for the mesh of its arguments, or for ``mesh`` if no argument has a sharding."""
        # The arguments of the sampler's programs may be on another mesh.
        mesh = next((x.sharding.mesh for x in jax.tree.leaves(self.args) if x.sharding), mesh)
        options = None
        if mesh.devices.flat[0].platform == "cpu":
            # In jaxlib 0.10 this pass crashes on the bfloat16 sums in the gradient of a shard_map. A CPU does not need
            # the pass.
            options = {"xla_disable_hlo_passes": "all-reduce-promotion"}
        jitted = jax.jit(
            self.fn,
            out_shardings=self.out_shardings,
            donate_argnums=self.donate,
            compiler_options=options,
        )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jitted.lower(*self.args)


def run_if(condition: jax.Array, function: Callable[[Any], Any], state: Any) -> Any:
    """Return ``function(state)`` if the condition is true, else ``state``. The state is updated in place.

    This is a while loop with at most one step. On a GPU, ``lax.cond`` would copy its results inside the branch and
    after it.
    """

    def is_wanted(carry: tuple[jax.Array, Any]) -> jax.Array:
        condition, _ = carry
        return condition

    def once(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        _, state = carry
        return jnp.bool_(False), function(state)

    _, state = jax.lax.while_loop(is_wanted, once, (condition, state))
    return state


@dataclasses.dataclass(frozen=True)
class Memory:
    """Device memory of one compiled program in bytes, as the compiler counts it."""

    arguments: int
    outputs: int
    temporary: int
    aliased: int  # arguments whose buffers become outputs
    on_host: int = 0  # outputs in host memory, not in ``outputs``; 0 if host and device share memory

    @property
    def peak(self) -> int:
        """Return the peak memory in bytes. A buffer that an argument and an output share counts once."""
        return self.arguments + self.outputs - self.aliased + self.temporary


def use_cache(folder: str) -> None:
    """Set the folder of jax's compilation cache ("" = no cache).

    A program is found by its text, its compiler options, the version of the compiler and the device. The environment
    variable JAX_COMPILATION_CACHE_DIR overrides ``folder``.

    Hosts with GPUs compile together, and only the first host writes the cache. If the other hosts could not read the
    cache, they would wait forever. The cache is therefore disabled if the hosts do not share the folder.

    Raises:
        ConfigError: the folder is a file.
    """
    if folder and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        path = pathlib.Path(folder).expanduser()
        if path.is_file():
            raise ConfigError(f"compilation_cache={folder!r} is not a folder. Set a folder, or '' for no cache")
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    used = jax.config.values["jax_compilation_cache_dir"] or ""
    if hosts.count() > 1 and jax.default_backend() == "gpu" and not hosts.is_shared(used):
        jax.config.update("jax_compilation_cache_dir", None)
        if used and hosts.is_first():
            print(
                f"warning: {used} is no folder that all hosts share: compiled programs are not saved",
                file=sys.stderr,
            )


def compile_all(programs: Mapping[str, Program], mesh: Mesh) -> dict[str, jax.stages.Compiled]:
    """Compile every program. XLA compiles several programs in parallel.

    In a job of one host, later programs are traced while XLA compiles. In a job of several hosts, all programs are
    traced first, and the hosts compare them.

    Raises:
        ConfigError: the programs of the hosts differ.
    """
    lowered = {}
    if hosts.count() > 1:
        lowered = {name: program.lower(mesh) for name, program in programs.items()}
        # Hosts with different programs would wait for each other forever.
        hosts.agree(**{f"program {name}": program.as_text() for name, program in lowered.items()})
    compiling = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, program in programs.items():
            traced = lowered[name] if lowered else program.lower(mesh)
            compiling[name] = pool.submit(traced.compile)
        compiled = {name: future.result() for name, future in compiling.items()}
    release_freed()
    return compiled


def release_freed(freed: int | None = None) -> None:
    """Return freed memory to the system, which glibc would otherwise keep in its heaps.

    Compiling leaves gigabytes in the heaps. The published weights do so too, because their arrays are small. An update
    cannot use this memory, and on CPU both together are the peak memory of a run.

    Args:
        freed: estimate of the freed bytes; None = unknown. The call takes milliseconds, so a small number is ignored.
    """
    if freed is not None and freed < WORTH_RELEASING:
        return
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def memory(compiled: jax.stages.Compiled) -> Memory:
    """Return the device memory of a compiled program."""
    stats = compiled.memory_analysis()
    assert stats is not None, "the compiler reports no memory"
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        on_host=stats.host_output_size_in_bytes,
    )


def resident_bytes(memories: Mapping[str, Memory], *, keeps_slots: bool, frozen: int = 0) -> int:
    """Return the bytes in use on a device during a whole iteration: learner, ring, last rollouts, frozen weights.

    Args:
        keeps_slots: the sampler keeps its decode slots between iterations, as with lookahead, and they count too.
            Otherwise the slots are freed when their rollouts are collected.
        frozen: bytes of weights that do not learn.
    """
    names = ["init_ring", "init_state", "join", "publish_base"]
    if keeps_slots:
        names.append("init_sampler")
    resident = frozen
    for name in names:
        if name in memories:
            resident += memories[name].outputs
    if "collect" in memories:
        resident += memories["collect"].outputs - memories["collect"].aliased  # the rollouts
    if "choose" in memories:
        resident += memories["choose"].arguments  # the rounds of an iteration
    return resident


def in_use_bytes(memories: Mapping[str, Memory], *, keeps_slots: bool, frozen: int = 0) -> dict[str, int]:
    """Return the bytes in use on a device while each program runs, including the resident arrays.

    Args:
        keeps_slots: as for ``resident_bytes``.
        frozen: bytes of weights that do not learn: the reference policy and the base weights of adapters.
    """
    resident = resident_bytes(memories, keeps_slots=keeps_slots, frozen=frozen)

    in_use = {}
    for name, m in memories.items():
        if name in START_UP:
            in_use[name] = m.peak
            continue
        needed = resident + m.temporary + m.outputs - m.aliased
        for other in _beside(name, keeps_slots):
            if other in memories:
                needed += memories[other].outputs
        in_use[name] = max(m.peak, needed)
    return in_use


def _beside(name: str, keeps_slots: bool) -> list[str]:
    """Return the programs whose outputs are in memory, in addition to the resident arrays, while a program runs."""
    prefix = "eval_" if name.startswith("eval_") else ""
    if name.removeprefix(prefix) not in SAMPLING:
        return []
    if keeps_slots and not prefix:
        return ["publish"]  # the decode slots of training are resident
    return ["publish", f"{prefix}init_sampler"]


def memory_limit(mesh: Mesh) -> int | None:
    """Return the memory limit in bytes of the smallest device of all hosts, or None if unknown, as on CPU."""
    own_limits = []
    for device in mesh.local_devices:
        stats = device.memory_stats()
        if stats and "bytes_limit" in stats:
            own_limits.append(stats["bytes_limit"])
    limits = itertools.chain(*hosts.exchange(own_limits))
    return min(limits, default=None)


def host_share(mesh: Mesh) -> int:
    """Return the bytes for each CPU device. CPU devices do not report a limit and share the memory of their host."""
    return hosts.memory_bytes() // len(mesh.local_devices)


def check_memory(compiled: Mapping[str, jax.stages.Compiled], limit: int, **settings: Any) -> None:
    """Check that a run fits into a device with ``limit`` bytes of memory.

    Args:
        settings: keyword arguments of ``in_use_bytes``.

    Raises:
        ConfigError: the run does not fit. The error names the largest program, its bytes and settings that lower them.
    """
    in_use = in_use_bytes({name: memory(program) for name, program in compiled.items()}, **settings)
    largest = max(in_use, key=in_use.__getitem__)
    needed_gib = in_use[largest] / 2**30
    limit_gib = limit / 2**30
    if in_use[largest] > limit:
        raise ConfigError(
            f"program {largest!r} and the other arrays need {needed_gib:.2f} GiB per device, which has "
            f"{limit_gib:.2f} GiB: {MEMORY_SETTINGS}"
        )


def memory_table(compiled: Mapping[str, jax.stages.Compiled]) -> str:
    """Return a table with one line per program, in MiB per device."""
    lines = ["program           arguments    outputs  temporary    aliased       peak  (MiB per device)"]
    for name, executable in compiled.items():
        m = memory(executable)
        line = f"{name:<16}"
        for size in (m.arguments, m.outputs, m.temporary, m.aliased, m.peak):
            line += f"{size / 2**20:11.1f}"
        lines.append(line)
    return "\n".join(lines)


class CompileCounter:
    """Counter of the programs that XLA compiles after the first iteration."""

    def __init__(self):
        self.count = 0
        self.warm = None
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def after_warmup(self) -> int:
        """Return the number of programs compiled after the warm-up. Call once per iteration: the first call ends it."""
        if self.warm is None:
            self.warm = self.count
        return self.count - self.warm


def peak_memory_bytes(mesh: jax.sharding.Mesh) -> int:
    """Return the peak memory of the fullest local device, or of this process if devices do not report it (CPU)."""
    peaks = []
    for device in mesh.local_devices:
        stats = device.memory_stats()
        if stats:
            peaks.append(stats["peak_bytes_in_use"])
    if peaks:
        return max(peaks)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
