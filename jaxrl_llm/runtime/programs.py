"""Programs: functions with the shapes they are compiled for, compiled ahead of time, with their memory known.

Owns: lowering, compiling, counting what is compiled later, what is in memory while a program runs. Does not know: what
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

# What to change when a program does not fit its device.
MEMORY_SETTINGS = (
    "lower update.micro_batch_size, rollout.slots, replay.capacity, sampling.support_tokens or update.logp_chunk_tokens"
    ", set model.remat='full', optimizer.offload=True or replay.memory='host', or raise mesh.fsdp or mesh.tensor"
)

# Bytes that are given back: less than them in an iteration costs more time than it frees memory.
WORTH_RELEASING = 64 * 2**20

# They run beside the published weights.
SAMPLING = ("prefill", "reread", "decode", "read_group", "stop_rows", "collect", "choose")
# They run before the rest of the state exists.
START_UP = ("init_sampler", "init_ring", "init_state", "eval_init_sampler", "publish_base")


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to compile.

    Attributes:
        fn: pure function of arrays.
        args: its arguments as ``jax.ShapeDtypeStruct`` with shardings.
        out_shardings: layout of the result.
        donate: indices of arguments whose buffers the result takes over.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    out_shardings: Any = None
    donate: tuple[int, ...] = ()

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        # The sampler's arguments may lie on a mesh of their own.
        mesh = next((x.sharding.mesh for x in jax.tree.leaves(self.args) if x.sharding), mesh)
        # jaxlib 0.10 dies in this pass over sums of bfloat16 that a shard_map's gradient has; a CPU adds them without.
        options = {"xla_disable_hlo_passes": "all-reduce-promotion"} if mesh.devices.flat[0].platform == "cpu" else None
        how = {"out_shardings": self.out_shardings, "donate_argnums": self.donate, "compiler_options": options}
        jitted = jax.jit(self.fn, **how)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jitted.lower(*self.args)


def run_if(condition: jax.Array, function: Callable[[Any], Any], state: Any) -> Any:
    """``function(state)`` where the condition holds, else ``state``, in place.

    A loop of one turn or none: a branch's results a GPU's program copies, in the branch and after it.
    """
    once = lambda carry: (jnp.bool_(False), function(carry[1]))
    return jax.lax.while_loop(lambda carry: carry[0], once, (condition, state))[1]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a device's memory in one compiled program, as the compiler counts them."""

    arguments: int
    outputs: int
    temporary: int
    aliased: int  # arguments whose buffers become outputs
    on_host: int = 0  # outputs beside them that lie in the host's memory, where the device has one of its own

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporary


def use_cache(folder: str) -> None:
    """Keep what is compiled from now on in a folder ("" = do not), and take from it what is there.

    A program is found by its text, its compiler options, the compiler's version and the device; the environment's
    JAX_COMPILATION_CACHE_DIR wins over ``folder``. ConfigError where that is a file. Hosts with GPUs compile together
    what the first alone keeps: where others do not find that, they would wait for it without end, and nothing is kept.
    """
    if folder and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        path = pathlib.Path(folder).expanduser()
        if path.is_file():
            raise ConfigError(f"compilation_cache={folder!r} is no folder")
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    used = jax.config.jax_compilation_cache_dir or ""
    if hosts.count() > 1 and jax.default_backend() == "gpu" and not hosts.is_shared(used):
        jax.config.update("jax_compilation_cache_dir", None)
        if used and hosts.is_first():
            print(f"warning: {used} is no folder that all hosts share: what is compiled is not kept", file=sys.stderr)


def compile_all(programs: Mapping[str, Program], mesh: Mesh) -> dict[str, jax.stages.Compiled]:
    """Compile every program; XLA compiles several at once, while the next ones are traced."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        lowered = {name: program.lower(mesh) for name, program in programs.items()} if hosts.count() > 1 else {}
        # Hosts that run other programs would wait for each other without end.
        hosts.agree(**{f"program {name}": program.as_text() for name, program in lowered.items()})
        of = lambda name: lowered[name] if lowered else programs[name].lower(mesh)
        compiling = {name: pool.submit(of(name).compile) for name in programs}
        compiled = {name: program.result() for name, program in compiling.items()}
    release_freed()
    return compiled


def release_freed(freed: int | None = None) -> None:
    """Give memory that was freed back to the system, where glibc would keep it in its heaps.

    Compiling leaves gigabytes there, and so do the published weights, whose arrays are small: beside an update, which
    cannot use them, they are the peak of a run on CPU.

    Args:
        freed: bytes there may be of it; few are left where they are, for the call takes milliseconds. None = many.
    """
    if freed is not None and freed < WORTH_RELEASING:
        return
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def memory(compiled: jax.stages.Compiled) -> Memory:
    stats = compiled.memory_analysis()
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        on_host=stats.host_output_size_in_bytes,
    )


def resident_bytes(memories: Mapping[str, Memory], *, keeps_slots: bool, frozen: int = 0) -> int:
    """What lives in a device's memory all through an iteration: learner, ring, the last rollouts, what is frozen.

    The sampler's slots too where it keeps them, as with lookahead; else they go when their rollouts are collected.
    """
    names = ("init_ring", "init_state", "join", "publish_base", *(["init_sampler"] if keeps_slots else []))
    whole = sum(memories[name].outputs for name in names if name in memories)
    rollouts = memories["collect"].outputs - memories["collect"].aliased if "collect" in memories else 0
    rounds = memories["choose"].arguments if "choose" in memories else 0
    return whole + rollouts + rounds + frozen


def in_use_bytes(memories: Mapping[str, Memory], *, keeps_slots: bool, frozen: int = 0) -> dict[str, int]:
    """A device's memory while each program runs: its own peak, and what lives on beside it (``resident_bytes``).

    Args:
        frozen: bytes of weights that do not learn: those of a reference, and those that adapters are of.
    """
    resident = resident_bytes(memories, keeps_slots=keeps_slots, frozen=frozen)

    def one(name: str, m: Memory) -> int:
        if name in START_UP:
            return m.peak
        whose = "eval_" if name.startswith("eval_") else ""
        own = {"publish"} if keeps_slots and not whose else {"publish", f"{whose}init_sampler"}
        beside = own & memories.keys() if name.removeprefix(whose) in SAMPLING else ()
        return max(m.peak, resident + sum(memories[x].outputs for x in beside) + m.temporary + m.outputs - m.aliased)

    return {name: one(name, m) for name, m in memories.items()}


def memory_limit(mesh: Mesh) -> int | None:
    """Bytes that the smallest of the devices, of any host, has; None where none says so, as CPU devices do not."""
    own = [device.memory_stats() for device in mesh.local_devices]
    limits = hosts.exchange([stats["bytes_limit"] for stats in own if stats and "bytes_limit" in stats])
    return min((limit for of_host in limits for limit in of_host), default=None)


def host_share(mesh: Mesh) -> int:
    """Bytes for each device of a CPU: they do not say how much they have, and share their host's."""
    return hosts.memory_bytes() // len(mesh.local_devices)


def check_memory(compiled: Mapping[str, jax.stages.Compiled], limit: int, **beside: int) -> None:
    """Refuse a run that does not fit a device of ``limit`` bytes.

    Raises:
        ConfigError: naming the program, the bytes and the settings that lower them.
    """
    in_use = in_use_bytes({name: memory(c) for name, c in compiled.items()}, **beside)
    name = max(in_use, key=in_use.get)
    if in_use[name] > limit:
        raise ConfigError(
            f"program {name!r} and what lives beside it need {in_use[name] / 2**30:.2f} GiB per device, which has "
            f"{limit / 2**30:.2f} GiB: {MEMORY_SETTINGS}"
        )


def memory_table(compiled: Mapping[str, jax.stages.Compiled]) -> str:
    """One line per program, in MiB per device."""
    lines = ["program           arguments    outputs  temporary    aliased       peak  (MiB per device)"]
    for name, executable in compiled.items():
        m = memory(executable)
        sizes = (m.arguments, m.outputs, m.temporary, m.aliased, m.peak)
        lines.append(f"{name:<16}" + "".join(f"{size / 2**20:11.1f}" for size in sizes))
    return "\n".join(lines)


class CompileCounter:
    """Counts programs XLA compiles once the first iteration is over."""

    def __init__(self):
        self.count = 0
        self.warm = None
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def after_warmup(self) -> int:
        """Call once per iteration; the first call ends the warm-up."""
        if self.warm is None:
            self.warm = self.count
        return self.count - self.warm


def peak_memory_bytes(mesh: jax.sharding.Mesh) -> int:
    """Peak of the fullest device; of this process where devices do not say (CPU)."""
    peaks = [stats["peak_bytes_in_use"] for d in mesh.local_devices if (stats := d.memory_stats())]
    return max(peaks) if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
