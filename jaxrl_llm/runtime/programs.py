"""Programs: functions with fixed argument shapes, which are compiled ahead of time so that their memory is known.

Owns: lowering, compiling, the count of later compilations, the memory in use while a program runs. Does not know: what
the programs compute.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
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
        # In jaxlib 0.10 this pass crashes on the bfloat16 sums in the gradient of a shard_map. A CPU does not need it.
        options = {"xla_disable_hlo_passes": "all-reduce-promotion"} if mesh.devices.flat[0].platform == "cpu" else None
        how = {
            "out_shardings": self.out_shardings,
            "donate_argnums": self.donate,
            "compiler_options": options,
        }
        jitted = jax.jit(self.fn, **how)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jitted.lower(*self.args)


def run_if(condition: jax.Array, function: Callable[[Any], Any], state: Any) -> Any:
    """Return ``function(state)`` if the condition is true, else ``state``. The state is updated in place.

    This is a while loop with at most one step. On a GPU, ``lax.cond`` would copy its results inside the branch and
    after it.
    """
    once = lambda carry: (jnp.bool_(False), function(carry[1]))
    return jax.lax.while_loop(lambda carry: carry[0], once, (condition, state))[1]


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
            raise ConfigError(f"compilation_cache={folder!r} is no folder")
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    used = jax.config.values["jax_compilation_cache_dir"] or ""
    if hosts.count() > 1 and jax.default_backend() == "gpu" and not hosts.is_shared(used):
        jax.config.update("jax_compilation_cache_dir", None)
        if used and hosts.is_first():
            print(
                f"warning: {used} is no folder that all hosts share: what is compiled is not kept",
                file=sys.stderr,
            )


def compile_all(programs: Mapping[str, Program], mesh: Mesh) -> dict[str, jax.stages.Compiled]:
    """Compile every program. XLA compiles several programs in parallel.

    In a job of one host, later programs are traced while XLA compiles. In a job of several hosts, all programs are
    traced first, and the hosts compare them.

    Raises:
        ConfigError: the programs of the hosts differ.
    """
    with concurrent.futures.ThreadPoolExecutor() as pool:
        lowered = {name: program.lower(mesh) for name, program in programs.items()} if hosts.count() > 1 else {}
        # Hosts with different programs would wait for each other forever.
        hosts.agree(**{f"program {name}": program.as_text() for name, program in lowered.items()})
        of = lambda name: lowered[name] if lowered else programs[name].lower(mesh)
        compiling = {name: pool.submit(of(name).compile) for name in programs}
        compiled = {name: program.result() for name, program in compiling.items()}
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
    names = (
        "init_ring",
        "init_state",
        "join",
        "publish_base",
        *(["init_sampler"] if keeps_slots else []),
    )
    whole = sum(memories[name].outputs for name in names if name in memories)
    rollouts = memories["collect"].outputs - memories["collect"].aliased if "collect" in memories else 0
    rounds = memories["choose"].arguments if "choose" in memories else 0
    return whole + rollouts + rounds + frozen


def in_use_bytes(memories: Mapping[str, Memory], *, keeps_slots: bool, frozen: int = 0) -> dict[str, int]:
    """Return the bytes in use on a device while each program runs, including the resident arrays.

    Args:
        keeps_slots: as for ``resident_bytes``.
        frozen: bytes of weights that do not learn: the reference policy and the base weights of adapters.
    """
    resident = resident_bytes(memories, keeps_slots=keeps_slots, frozen=frozen)

    def one(name: str, m: Memory) -> int:
        if name in START_UP:
            return m.peak
        whose = "eval_" if name.startswith("eval_") else ""
        own = {"publish"} if keeps_slots and not whose else {"publish", f"{whose}init_sampler"}
        beside = own & memories.keys() if name.removeprefix(whose) in SAMPLING else ()
        return max(
            m.peak,
            resident + sum(memories[x].outputs for x in beside) + m.temporary + m.outputs - m.aliased,
        )

    return {name: one(name, m) for name, m in memories.items()}


def memory_limit(mesh: Mesh) -> int | None:
    """Return the memory limit in bytes of the smallest device of all hosts, or None if unknown, as on CPU."""
    own = [device.memory_stats() for device in mesh.local_devices]
    limits = hosts.exchange([stats["bytes_limit"] for stats in own if stats and "bytes_limit" in stats])
    return min((limit for of_host in limits for limit in of_host), default=None)


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
    name = max(in_use, key=lambda name: in_use[name])
    if in_use[name] > limit:
        raise ConfigError(
            f"program {name!r} and the arrays beside it need {in_use[name] / 2**30:.2f} GiB per device, which has "
            f"{limit / 2**30:.2f} GiB: {MEMORY_SETTINGS}"
        )


def memory_table(compiled: Mapping[str, jax.stages.Compiled]) -> str:
    """Return a table with one line per program, in MiB per device."""
    lines = ["program           arguments    outputs  temporary    aliased       peak  (MiB per device)"]
    for name, executable in compiled.items():
        m = memory(executable)
        sizes = (m.arguments, m.outputs, m.temporary, m.aliased, m.peak)
        lines.append(f"{name:<16}" + "".join(f"{size / 2**20:11.1f}" for size in sizes))
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
        """Return the number of programs compiled after the warm-up, which the first call of an iteration ends."""
        if self.warm is None:
            self.warm = self.count
        return self.count - self.warm


def peak_memory_bytes(mesh: jax.sharding.Mesh) -> int:
    """Return the peak memory of the fullest local device, or of this process if devices do not report it (CPU)."""
    peaks = [stats["peak_bytes_in_use"] for d in mesh.local_devices if (stats := d.memory_stats())]
    return max(peaks) if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
