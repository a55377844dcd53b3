"""Plan: does a run fit a TPU pod or some GPUs, and how fast can it be? The answer does not need the machines.

    python -m jaxrl_llm.plan --config=FILE --topology=v5e:2x4 [--config.mesh.fsdp=8 ...]
    python -m jaxrl_llm.plan --config=FILE --topology=v5p-32 --preset=llama-3.1-8b --price=4.2 --html=plan.html
    python -m jaxrl_llm.plan --config=FILE --topology=v5litepod-64 --preset=llama-3.1-8b --search=8
    python -m jaxrl_llm.plan --config=FILE --topology=h100:8

The real compiler compiles every program of the run for the named devices, from shapes alone: no weight is read and no
question is loaded. The compiler is in the package libtpu (extra ``[plan]``) or jax-cuda13-pjrt (extra ``[plan-gpu]``),
for Linux on x86-64.

The command prints the memory of each program per chip, its operations, its memory traffic and its messages, and the
least time that these take. If a program does not fit, the command also prints the settings that help, and the exit
status is 1.

Owns: the flags, the printed lines. Does not know: chips, HLO, costs (planning).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
from absl import flags
from jax.sharding import Mesh
from ml_collections import config_flags

from jaxrl_llm.config import Config, ConfigError, freeze
from jaxrl_llm.models import presets
from jaxrl_llm.planning import chips, cost, page, verdict
from jaxrl_llm.planning.compiled import Row, compile_one, compile_rows, save_all
from jaxrl_llm.planning.counting import Counts
from jaxrl_llm.planning.search import search
from jaxrl_llm.run import Run, assemble
from jaxrl_llm.runtime import cli, json_lines, row_files, sharding
from jaxrl_llm.runtime.executables import keeping_update, saved_in
from jaxrl_llm.runtime.programs import in_use_bytes, resident_bytes

FLAGS = flags.FLAGS


def plan(
    config: Config,
    topology: str,
    *,
    preset: str = "",
    price: float = 0.0,
    json_path: str = "",
    html_path: str = "",
    save: str = "",
) -> int:
    """Compile the programs of a run for absent devices, and print whether the run fits and how fast it can be.

    Args:
        topology: name of a TPU slice or of GPUs.
        preset: name of a public model's shape, which replaces ``model.path``; "" = none.
        price: dollars per chip and hour; 0 = not known.
        json_path, html_path: files for the complete plan; "" = none.
        save: folder for the compiled programs, which ``train`` takes with ``executables=``; "" = none.

    Returns:
        Exit status: 0 if every program fits, 1 if a program does not fit.

    Raises:
        ConfigError: bad input.
    """
    started = time.monotonic()
    for flag, path in (("--json", json_path), ("--html", html_path)):
        if path:
            row_files.check_output(path, flag)
    devices, chip = chips.devices_of(topology)
    mesh = sharding.make_mesh(config.mesh, devices)
    if save:
        check_folder(save, mesh)
    model = presets.model_of(config, preset)
    run = assemble(config, model.arch, model.eos_ids, mesh, model.reference)
    result = head(run, topology, chip, model)
    rows = _compile(run, keep=bool(save))
    result |= memory_of(run, rows, chip)
    result |= costs_of(run, taken(run, rows, chip), chip, price)
    result["compile_s"] = time.monotonic() - started
    print(f"compiled in {result['compile_s']:.0f} s")
    fits = conclude(run, rows, result)
    if json_path:
        pathlib.Path(json_path).write_text(json_lines.written(result, indent=2))
    if html_path:
        page.write(pathlib.Path(html_path), result)
    if save and fits:
        save_all(rows, mesh, save)
        print(f"programs    {save}  (train takes them with --config.executables={save})")
    return 0 if fits else 1


def check_folder(save: str, mesh: Mesh) -> None:
    """Raise a ``ConfigError`` if the folder of programs cannot be written. This is checked before any compilation."""
    folder = saved_in(save, mesh)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        with contextlib.suppress(OSError):  # the folder has programs of an earlier plan
            folder.rmdir()
    except OSError as error:
        raise ConfigError(f"--save={save!r:.200} cannot be written: {error.strerror}") from error


def head(run: Run, topology: str, chip: chips.Chip, model: presets.Model) -> dict[str, Any]:
    """Print and return the devices and the model of the plan."""
    devices = run.mesh.devices.flatten().tolist()
    hosts = len({device.process_index for device in devices})
    axes = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
    shape = chips.shape_of(topology)
    name = topology if shape == topology else f"{topology} ({shape})"
    memory = f"{chip.hbm_gib:g} GiB of HBM a chip"
    print(f"topology    {name}: {len(devices)} chips, {hosts} hosts, {memory}; mesh {axes}")
    num_millions = model.arch.num_params / 1e6
    print(f"model       {model.name}: {num_millions:.1f} M parameters, {run.config.model.compute_dtype}")
    return {
        "topology": topology,
        "shape": shape,
        "chips": len(devices),
        "hosts": hosts,
        "mesh": dict(run.mesh.shape),
        "model": model.name,
        "parameters": model.arch.num_params,
        "memory_limit_bytes": chip.hbm_gib * 2**30,
    }


def _compile(run: Run, *, keep: bool) -> list[Row]:
    """Compile every program. Print the line of a program right after its compilation. ``keep`` keeps executables."""
    print(
        "program           arguments    outputs  temporary    aliased       peak  (MiB per chip)",
        flush=True,
    )
    rows = []
    for row in compile_rows(run, keep=keep):
        rows.append(row)
        memory = row.memory
        text = f"  {row.refused}"
        if memory:
            sizes = (memory.arguments, memory.outputs, memory.temporary, memory.aliased, memory.peak)
            text = "".join(f"{size / 2**20:11.1f}" for size in sizes)
        print(f"{row.name:<16}{text}", flush=True)
    return rows


def memory_of(run: Run, rows: list[Row], chip: chips.Chip) -> dict[str, Any]:
    """Print and return the memory of a chip between programs and while each program runs."""
    limit = chip.hbm_gib * 2**30
    compiled = {row.name: row.memory for row in rows if row.memory}
    resident = resident_bytes(compiled, **run.beside)
    in_use = in_use_bytes(compiled, **run.beside)
    largest = max(in_use, key=in_use.__getitem__)
    largest_mib = in_use[largest] / 2**20
    limit_mib = limit / 2**20
    contents = ["learner", "ring", "rollouts"]
    if run.beside["keeps_slots"]:
        contents.append("sampler")
    if run.beside["frozen"]:
        contents.append("frozen weights")
    print(f"resident    {resident / 2**20:.1f} MiB a chip between iterations: {', '.join(contents)}")
    on_host = verdict.host_bytes(compiled)
    if on_host:
        print(f"on hosts    {on_host / 2**20:.1f} MiB a chip between programs, in pinned memory")
    print(f"largest     {largest_mib:.1f} MiB of {limit_mib:.1f} a chip, while {largest} runs")
    too_large = [row.name for row in rows if not row.memory or in_use[row.name] > limit]
    ring = None
    if not too_large:
        ring = verdict.ring_that_fits(run, limit - in_use[largest])
    if ring is not None:
        print(f"ring        up to {ring} rollouts fit (replay.capacity, now {run.config.ring_capacity})")
    return {
        "programs": {row.name: _program_memory(run, row, in_use.get(row.name)) for row in rows},
        "does_not_fit": too_large,
        "resident_bytes": resident,
        "on_host_bytes": on_host,
        "ring_capacity_that_fits": ring,
    }


def _program_memory(run: Run, row: Row, in_use: int | None) -> dict[str, Any]:
    """Return the memory of a program for the JSON file. ``in_use``: bytes in use on a chip while the program runs."""
    return {
        "memory": row.memory and dataclasses.asdict(row.memory) | {"peak": row.memory.peak},
        "refused": row.refused,
        "in_use_bytes": in_use,
        "made_of": verdict.made_of(run, row),
        "temporary": [dataclasses.asdict(buffer) for buffer in row.buffers[:20]],
    }


def taken(run: Run, rows: list[Row], chip: chips.Chip) -> list[Row]:
    """Return the programs that ``train`` would use, chosen as in ``executables.keep_what_fits``."""
    if run.config.model.remat != "auto":
        return rows
    memories = {row.name: row.memory for row in rows if row.memory}
    if len(memories) < len(rows):
        return rows
    kept = compile_one(run, "update", keeping_update(run).lower(run.mesh))
    if not kept.memory:
        return rows
    memories["update"] = kept.memory
    if in_use_bytes(memories, **run.beside)["update"] > chip.hbm_gib * 2**30:
        return rows
    print(f"update      keeps the MLPs, in {kept.memory.peak / 2**20:.1f} MiB a chip: it fits (model.remat=auto)")
    return [kept if row.name == "update" else row for row in rows]


def costs_of(run: Run, rows: list[Row], chip: chips.Chip, price: float) -> dict[str, Any]:
    """Print and return the work of each program, and the least time of an iteration."""
    counts = {row.name: row.counts for row in rows if row.counts}
    calls = cost.calls(run, counts)
    print("\nprogram           calls     TFLOP    GB HBM   GB sent        ms  bound by    (per call and chip)")
    costs = {}
    for name, program in counts.items():
        seconds = cost.seconds(program, chip)
        costs[name] = _program_costs(program, seconds, calls[name])
        if calls[name]:
            _print_costs(name, program, seconds, calls[name])
    for name, program in counts.items():
        sizes = program.by_collective()
        if calls[name] and sum(sizes.values()) > 1e6:
            counts_by_kind = program.by_collective("collectives")
            parts = []
            for kind, size in sizes.items():
                parts.append(f"{kind} {size / 1e9:.3f} GB in {counts_by_kind[kind]:.0f}")
            print(f"sent        {name}: {', '.join(parts)}")
        for kernel, number in program.uncounted.items():
            print(f"not counted {name}: operations of kernel {kernel}, {number:.0f} times")
    iteration = cost.iteration(run, chip, counts)
    _print_iteration(run, iteration)
    result = dataclasses.asdict(iteration)
    if price:
        result["dollars_per_1000_iterations"] = iteration.dollars(1000, chips=run.mesh.size, price=price)
        print(f"price       at least ${result['dollars_per_1000_iterations']:,.2f} for 1,000 iterations")
    return {"costs": costs, "iteration": result}


def _program_costs(program: Counts, seconds: cost.Seconds, calls: int) -> dict[str, Any]:
    """Return the work of a program for the JSON file."""
    return {
        "calls": calls,
        "flops": program.total("flops"),
        "hbm_bytes": program.total("hbm_bytes"),
        "host_bytes": program.total("host_bytes"),
        "link_bytes": program.by_collective(),
        "collectives": program.by_collective("collectives"),
        "seconds": seconds.total,
        "seconds_by_resource": seconds.by,
        "bound": seconds.bound,
        "loops_of_guessed_turns": program.guessed,
        "calls_not_counted": program.uncounted,
    }


def _print_costs(name: str, program: Counts, seconds: cost.Seconds, calls: int) -> None:
    """Print the line of a program in the table of costs."""
    numbers = (
        program.total("flops") / 1e12,
        program.total("hbm_bytes") / 1e9,
        sum(program.by_collective().values()) / 1e9,
        seconds.total * 1e3,
    )
    columns = "".join(f"{number:10.4g}" for number in numbers)
    print(f"{name:<16}{calls:7d}{columns}  {seconds.bound}")


def _print_iteration(run: Run, iteration: cost.Iteration) -> None:
    """Print the least time of an iteration by part, and the highest speed."""
    parts = (
        f"{part} {seconds:.3g} s ({seconds / iteration.seconds:.0%})"
        for part, seconds in iteration.parts.items()
        if seconds
    )
    print(f"iteration   at least {iteration.seconds:.3g} s: {', '.join(parts)}")
    print(
        f"speed       at most {iteration.tokens_per_s_chip:.0f} sampled tokens/s/chip; MFU at most {iteration.mfu:.1%} "
        f"(all completions {run.config.sampling.max_completion_tokens} tokens long)"
    )


def conclude(run: Run, rows: list[Row], result: dict[str, Any]) -> bool:
    """Print whether the run fits. If not, print the contents of the memory and the settings that help most.

    Args:
        result: the plan so far. ``conclude`` adds the settings that help under "advice".

    Returns:
        Whether every program fits.
    """
    too_large = result["does_not_fit"]
    if not too_large:
        print("fits")
        return True
    advice: list[str] = []
    for row in rows:
        if row.name not in too_large:
            continue
        contents = list(verdict.made_of(run, row).items())[:4]
        parts = [f"{size / 2**30:.2f} GiB {kind}" for kind, size in contents]
        print(f"{row.name:<11} {', '.join(parts)}")
        buffers = [f"{b.number} x {b.shape} {b.size / 2**30:.2f} GiB" for b in row.buffers[:3]]
        if buffers:
            print(f"            temporary: {', '.join(buffers)}")
        advice += [text for text in verdict.suggestions(run, row) if text not in advice]
    result["advice"] = advice
    print(f"does not fit: {', '.join(too_large)}; what helps most here: {'; '.join(advice[:4])}")
    return False


def main() -> None:
    """Run the command with the values of its flags."""
    jax.config.update("jax_platforms", "cpu")  # this process only compiles, also on a machine with chips
    jax.config.update("jax_enable_compilation_cache", False)  # programs that come from the cache have no text
    # Read no saved programs, because this plan may write them.
    config = dataclasses.replace(freeze(FLAGS.config), executables="")
    if not 0 <= FLAGS.price < math.inf:
        raise ConfigError(f"--price={FLAGS.price} must be at least 0: dollars of a chip for an hour")
    if FLAGS.search:
        others = [f"--{name}" for name in ("price", "json", "html", "save") if FLAGS[name].value]
        if others:
            raise ConfigError(f"--search={FLAGS.search} only prints; leave out {', '.join(others)} or --search")
        model = presets.model_of(config, FLAGS.preset)
        devices, chip = chips.devices_of(FLAGS.topology)
        sys.exit(search(config, model, devices, chip, most=FLAGS.search))
    status = plan(
        config,
        FLAGS.topology,
        preset=FLAGS.preset,
        price=FLAGS.price,
        json_path=FLAGS.json,
        html_path=FLAGS.html,
        save=FLAGS.save,
    )
    sys.exit(status)


def define_flags() -> None:
    """Define the flags of the command."""
    config_flags.DEFINE_config_file("config", None, "Python file with get_config().")
    flags.DEFINE_string(
        "topology",
        None,
        "TPU slice or GPUs by name, such as v5e:2x4, v5p-128, v5litepod-256 or h100:8.",
    )
    flags.DEFINE_string(
        "preset",
        "",
        f"Shape of a public model, which replaces config.model.path: {', '.join(presets.PRESETS)}.",
    )
    flags.DEFINE_float("price", 0.0, "Dollars per chip and hour; 0 = not known.")
    flags.DEFINE_integer(
        "search",
        0,
        "Compile at most this many layouts (mesh, micro-batch, remat), and print the best that fit.",
        0,
    )
    flags.DEFINE_string("json", "", "JSON file for the complete plan.")
    flags.DEFINE_string("html", "", "HTML file for a page with pictures.")
    flags.DEFINE_string(
        "save",
        "",
        "Folder for the compiled programs, which train takes (config.executables).",
    )
    flags.mark_flags_as_required(["config", "topology"])


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
