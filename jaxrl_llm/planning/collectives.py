"""Collectives: the bytes that a device sends in each collective operation, by the ring algorithm.

Owns: the number of devices in a group, these formulas. Does not know: loops, the rates of links.
"""

from __future__ import annotations

import dataclasses
import math
import re

from jaxrl_llm.planning.hlo import COLLECTIVES, Instruction, Shape


@dataclasses.dataclass(frozen=True)
class Sent:
    """Collective over more than one device, at its place in the program."""

    kind: str
    shape: str  # shape of the largest input or output array, such as "bf16[128,64]"
    chips: int  # number of chips in one group
    num_bytes: float  # bytes that each chip sends
    op_name: str  # name of the line of Python that it comes from


def kind_of(instruction: Instruction) -> str | None:
    """Return the kind of collective that an instruction runs or starts, or None for another instruction."""
    kind = instruction.op.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def identity(collective: Instruction) -> tuple[str, ...]:
    """Return the channel (or the name), the kind and the results of a collective.

    The same collective can appear in several fusions. The channel alone does not identify it, because different calls
    of one shard_map or function may share a channel.
    """
    channel = re.search(r"channel_id=(\d+)", collective.attributes)
    return (
        channel[1] if channel else collective.name,
        collective.op.removesuffix("-start"),
        *map(str, collective.shapes),
    )


def sent(kind: str, collective: Instruction, num_devices: int, inputs: list[Shape]) -> Sent:
    """Return a collective with the bytes that each device sends. Tile padding is not counted.

    Args:
        num_devices: number of devices of the whole program.
        inputs: shapes of the operands of ``collective``.
    """
    group = _group_size(collective.attributes, num_devices)
    input_bytes = sum(shape.dense_bytes for shape in inputs)
    arrays = (*collective.shapes, *inputs)
    largest = max(arrays, key=_dense_bytes)
    return Sent(
        kind,
        shape=str(largest),
        chips=group,
        num_bytes=input_bytes * _sent_share(kind, group),
        op_name=collective.op_name,
    )


def _dense_bytes(shape: Shape) -> float:
    return shape.dense_bytes


def _sent_share(kind: str, group: int) -> float:
    """Return the bytes that each device of a group sends, divided by the bytes of its input."""
    if kind == "all-gather":
        # The input is one device's part, which is passed on to all other devices.
        return group - 1
    if kind == "all-reduce":
        return 2 * (group - 1) / group
    if kind == "collective-permute":
        return 1
    return (group - 1) / group


def _group_size(attributes: str, num_devices: int) -> int:
    """Return the number of devices that a collective joins. The text has several formats for it."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    if listed:
        return listed[1].count(",") + 1
    by_number = re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes)
    if by_number:
        return int(by_number[2])
    by_axis = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes)
    if by_axis:
        return _size_of_axes(mesh=by_axis[1], axes=by_axis[2])
    pairs = re.search(r"source_target_pairs=\{(\{.*?\})\}", attributes)
    if pairs:
        return pairs[1].count("{")
    return num_devices


def _size_of_axes(mesh: str, axes: str) -> int:
    """Return the number of devices of a group along ``axes``: whole axes of the mesh, or parts of them."""
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh))
    whole_or_part = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", axes)
    return math.prod(int(part or sizes[axis]) for axis, part in whole_or_part)
