"""Plan: whether a run fits a TPU pod or some GPUs, and how fast it can be, found out on a machine that has none.

    python -m jaxrl_llm.plan --config=FILE --topology=v5e:2x4 [--config.mesh.fsdp=8 ...]
    python -m jaxrl_llm.plan --config=FILE --topology=v5p-32 --preset=llama-3.1-8b --price=4.2 --html=plan.html
    python -m jaxrl_llm.plan --config=FILE --topology=v5litepod-64 --preset=llama-3.1-8b --search=8
    python -m jaxrl_llm.plan --config=FILE --topology=h100:8

The real compiler (package libtpu, extra ``[plan]``, or jax-cuda13-pjrt, extra ``[plan-gpu]``; Linux x86-64) compiles
every program of the run for the named devices from shapes alone: no weight is read and no question is loaded. Prints
the memory of each program per chip, what it computes, reads and sends, and the least time that takes; exit status 1
when one does not fit, with the settings that help.

Owns: the flags, what is printed. Does not know: chips, HLO, costs (planning).
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
    """Compile, print, and say whether it fits.

    Args:
        preset: name of a public model's shape in place of ``model.path``.
        price: dollars of a chip for an hour; 0 = not known.
        json_path, html_path: files to write all of it to; "" = none.
        save: folder for the compiled programs, which ``train`` takes with ``executables=``; "" = none.

    Returns:
        Exit status: 0 when every program fits, 1 when one does not.

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
    found = head(run, topology, chip, model)
    print("program           arguments    outputs  temporary    aliased       peak  (MiB per chip)", flush=True)
    rows = []
    for row in compile_rows(run, keep=bool(save)):
        rows.append(row)
        m = row.memory
        sizes = (m.arguments, m.outputs, m.temporary, m.aliased, m.peak) if m else ()
        print(f"{row.name:<16}" + ("".join(f"{n / 2**20:11.1f}" for n in sizes) or f"  {row.refused}"), flush=True)

    found |= memory_of(run, rows, chip)
    found |= costs_of(run, taken(run, rows, chip), chip, price)
    found["compile_s"] = time.monotonic() - started
    print(f"compiled in {found['compile_s']:.0f} s")
    fits = conclude(run, rows, found)
    if json_path:
        pathlib.Path(json_path).write_text(json_lines.written(found, indent=2))
    if html_path:
        page.write(pathlib.Path(html_path), found)
    if save and fits:
        save_all(rows, mesh, save)
        print(f"programs    {save}  (train takes them with --config.executables={save})")
    return 0 if fits else 1


def check_folder(save: str, mesh: Mesh) -> None:
    """ConfigError where no file can be written into the folder of programs; before any is compiled."""
    folder = saved_in(save, mesh)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        with contextlib.suppress(OSError):  # programs of before are there
            folder.rmdir()
    except OSError as error:
        raise ConfigError(f"--save={save!r:.200} cannot be written: {error.strerror}") from error


def head(run: Run, topology: str, chip: chips.Chip, model: presets.Model) -> dict[str, Any]:
    """Print, and return, what is planned for."""
    devices = run.mesh.devices.flatten().tolist()
    hosts = len({device.process_index for device in devices})
    axes = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
    shape = chips.shape_of(topology)
    named = topology if shape == topology else f"{topology} ({shape})"
    print(f"topology    {named}: {len(devices)} chips, {hosts} hosts, {chip.hbm_gib:g} GiB of HBM a chip; mesh {axes}")
    print(f"model       {model.name}: {model.arch.num_params / 1e6:.1f} M parameters, {run.config.model.compute_dtype}")
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


def memory_of(run: Run, rows: list[Row], chip: chips.Chip) -> dict[str, Any]:
    """Print what lives on a chip between programs and at the fullest time; return that by program."""
    limit = chip.hbm_gib * 2**30
    compiled = {row.name: row.memory for row in rows if row.memory}
    resident, need = resident_bytes(compiled, **run.beside), in_use_bytes(compiled, **run.beside)
    largest = max(need, key=need.get)
    there = {"sampler": run.beside["keeps_slots"], "frozen weights": run.beside["frozen"]}
    what = ", ".join(["learner, ring, rollouts", *(name for name, is_there in there.items() if is_there)])
    print(f"resident    {resident / 2**20:.1f} MiB a chip between iterations: {what}")
    if on_host := verdict.host_bytes(compiled):
        print(f"on hosts    {on_host / 2**20:.1f} MiB a chip between programs, in pinned memory")
    print(f"largest     {need[largest] / 2**20:.1f} MiB of {limit / 2**20:.1f} a chip, while {largest} runs")
    over = [row.name for row in rows if not row.memory or need[row.name] > limit]
    ring = None if over else verdict.ring_that_fits(run, limit - need[largest])
    if ring is not None:
        print(f"ring        up to {ring} rollouts fit (replay.capacity, now {run.config.ring_capacity})")
    memory = {
        row.name: {
            "memory": row.memory and dataclasses.asdict(row.memory) | {"peak": row.memory.peak},
            "refused": row.refused,
            "in_use_bytes": need.get(row.name),
            "made_of": verdict.made_of(run, row),
            "temporary": [dataclasses.asdict(buffer) for buffer in row.buffers[:20]],
        }
        for row in rows
    }
    bytes_between = {"resident_bytes": resident, "on_host_bytes": on_host, "ring_capacity_that_fits": ring}
    return {"programs": memory, "does_not_fit": over, **bytes_between}


def taken(run: Run, rows: list[Row], chip: chips.Chip) -> list[Row]:
    """The programs that ``train`` takes, as ``executables.keep_what_fits`` chooses: what they cost is a bound."""
    if run.config.model.remat != "auto" or not all(row.memory for row in rows):
        return rows
    kept = compile_one(run, "update", keeping_update(run).lower(run.mesh))
    memories = {row.name: row.memory for row in rows} | {"update": kept.memory}
    if not kept.memory or in_use_bytes(memories, **run.beside)["update"] > chip.hbm_gib * 2**30:
        return rows
    print(f"update      keeps the MLPs, in {kept.memory.peak / 2**20:.1f} MiB a chip: it fits (model.remat=auto)")
    return [kept if row.name == "update" else row for row in rows]


def costs_of(run: Run, rows: list[Row], chip: chips.Chip, price: float) -> dict[str, Any]:
    """Print, and return, what each program does, and how long an iteration takes at the least."""
    counts = {row.name: row.counts for row in rows if row.counts}
    often = cost.calls(run, counts)
    print("\nprogram           calls     TFLOP    GB HBM   GB sent        ms  bound by    (per call and chip)")
    costs = {}
    for name, of in counts.items():
        least, links = cost.seconds(of, chip), of.by_collective()
        numbers = (of.total("flops") / 1e12, of.total("hbm_bytes") / 1e9, sum(links.values()) / 1e9, least.total * 1e3)
        costs[name] = {
            "calls": often[name],
            "flops": of.total("flops"),
            "hbm_bytes": of.total("hbm_bytes"),
            "host_bytes": of.total("host_bytes"),
            "link_bytes": links,
            "collectives": of.by_collective("collectives"),
            "seconds": least.total,
            "seconds_by_resource": least.by,
            "bound": least.bound,
            "loops_of_guessed_turns": of.guessed,
            "calls_not_counted": of.uncounted,
        }
        if often[name]:
            print(f"{name:<16}{often[name]:7d}" + "".join(f"{x:10.4g}" for x in numbers) + f"  {least.bound}")
    for name, each in costs.items():
        if each["calls"] and sum(each["link_bytes"].values()) > 1e6:
            kinds = (f"{k} {n / 1e9:.3f} GB in {each['collectives'][k]:.0f}" for k, n in each["link_bytes"].items())
            print(f"sent        {name}: {', '.join(kinds)}")
        for missing, number in each["calls_not_counted"].items():
            print(f"not counted {name}: operations of kernel {missing}, {number:.0f} times")
    least = cost.iteration(run, chip, counts)
    split = ", ".join(f"{part} {s:.3g} s ({s / least.seconds:.0%})" for part, s in least.parts.items() if s)
    print(f"iteration   at least {least.seconds:.3g} s: {split}")
    print(
        f"speed       at most {least.tokens_per_s_chip:.0f} sampled tokens/s/chip; MFU at most {least.mfu:.1%} "
        f"(all completions {run.config.sampling.max_completion_tokens} tokens long)"
    )
    found = dataclasses.asdict(least)
    if price:
        found["dollars_per_1000_iterations"] = least.dollars(1000, chips=run.mesh.size, price=price)
        print(f"price       at least ${found['dollars_per_1000_iterations']:,.2f} for 1,000 iterations")
    return {"costs": costs, "iteration": found}


def conclude(run: Run, rows: list[Row], found: dict[str, Any]) -> bool:
    """Print whether it fits; where it does not, what fills the memory and which settings help most."""
    over = found["does_not_fit"]
    if not over:
        print("fits")
        return True
    advice: list[str] = []
    for row in rows:
        if row.name in over:
            parts = ", ".join(f"{n / 2**30:.2f} GiB {kind}" for kind, n in list(verdict.made_of(run, row).items())[:4])
            print(f"{row.name:<11} {parts}")
            buffers = ", ".join(f"{b.number} x {b.shape} {b.size / 2**30:.2f} GiB" for b in row.buffers[:3])
            if buffers:
                print(f"            temporary: {buffers}")
            advice += [text for text in verdict.suggestions(run, row) if text not in advice]
    found["advice"] = advice
    print(f"does not fit: {', '.join(over)}; what helps most here: {'; '.join(advice[:4])}")
    return False


def main() -> None:
    """Run the command with the values of its flags."""
    jax.config.update("jax_platforms", "cpu")  # it only compiles, on a machine with chips too
    jax.config.update("jax_enable_compilation_cache", False)  # what is found there has no text
    config = dataclasses.replace(freeze(FLAGS.config), executables="")  # which it may be to write
    if not 0 <= FLAGS.price < math.inf:
        raise ConfigError(f"--price={FLAGS.price} must be at least 0: dollars of a chip for an hour")
    if FLAGS.search:
        if given := [f"--{name}" for name in ("price", "json", "html", "save") if FLAGS[name].value]:
            raise ConfigError(f"--search={FLAGS.search} prints alone; without it plan takes {', '.join(given)}")
        model = presets.model_of(config, FLAGS.preset)
        devices, chip = chips.devices_of(FLAGS.topology)
        sys.exit(search(config, model, devices, chip, most=FLAGS.search))
    sys.exit(
        plan(
            config,
            FLAGS.topology,
            preset=FLAGS.preset,
            price=FLAGS.price,
            json_path=FLAGS.json,
            html_path=FLAGS.html,
            save=FLAGS.save,
        )
    )


def define_flags() -> None:
    """Define the flags of the command."""
    config_flags.DEFINE_config_file("config", None, "Python file with get_config().")
    flags.DEFINE_string(
        "topology", None, "TPU slice or GPUs by name, such as v5e:2x4, v5p-128, v5litepod-256 or h100:8."
    )
    flags.DEFINE_string(
        "preset", "", f"Shape of a public model in place of config.model.path: {', '.join(presets.PRESETS)}."
    )
    flags.DEFINE_float("price", 0.0, "Dollars of a chip for an hour; 0 = not known.")
    flags.DEFINE_integer(
        "search", 0, "Compile so many layouts (mesh, micro-batch, remat) at most, and print the best that fit.", 0
    )
    flags.DEFINE_string("json", "", "File for all numbers.")
    flags.DEFINE_string("html", "", "File for a page with pictures.")
    flags.DEFINE_string("save", "", "Folder for the compiled programs, which train takes (config.executables).")
    flags.mark_flags_as_required(["config", "topology"])


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
