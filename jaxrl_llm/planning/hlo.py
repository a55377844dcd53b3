"""HLO reader: the text of a compiled program as computations, instructions and shapes with their memory layout.

Owns: the parser of the text. Does not know: the meaning of instructions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Bytes per element.
SIZES = {
    "pred": 1,
    "s4": 0.5,
    "u4": 0.5,
    "bf16": 2,
    "f16": 2,
    "c64": 8,
    "c128": 16,
    "token": 0,
}
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*)$")
_END = re.compile(r"^\}(, execution_thread=.*)?$")
_NAME = re.compile(r"%([\w.-]+(?:#\d+)?)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Array with its memory layout. ``space``: 0 the device's memory, 5 the host's memory, others on the chip."""

    dtype: str
    dims: tuple[int, ...]
    space: int
    num_bytes: float

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def size(self) -> int:
        """Return the number of elements, without the padding of tiles."""
        return math.prod(self.dims)

    @property
    def dense_bytes(self) -> float:
        return self.size * bytes_of_element(self.dtype)


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shapes: tuple[Shape, ...]  # the shapes of the elements, if the result is a tuple
    op: str
    operands: tuple[str, ...]
    attributes: str
    literal: str  # arguments: the text inside the brackets

    def called(self, *names: str) -> list[str]:
        found = re.findall(rf"(?:{'|'.join(names)})=(?:%([\w.-]+)|\{{([^}}]*)\}})", self.attributes)
        return [name for one, many in found for name in ([one] if one else _NAME.findall(many))]

    @property
    def op_name(self) -> str:
        """Return the name that JAX gives its place in the Python program, or "" if the text does not contain it."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: str = ""
    is_entry: bool = False

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in dict.fromkeys(instruction.operands):
                found.setdefault(name, []).append(instruction)
        return found

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(x.literal): x for x in self.instructions.values() if x.op == "parameter"}


def bytes_of_element(dtype: str) -> float:
    width = re.search(r"\d+", dtype)
    return SIZES.get(dtype, int(width[0]) / 8 if width else 4)


def _shape(dtype: str, dims: str, layout: str | None) -> Shape:
    sizes = tuple(int(n.removeprefix("<=")) for n in dims.split(",") if n)
    order, _, rest = (layout or "").partition(":")
    space = re.search(r"\bS\((\d+)\)", rest)
    tile = re.search(r"T\(([\d,]+)\)", rest)
    padded = list(sizes)
    if tile and sizes:
        minor = [int(n) for n in order.split(",") if n]
        # The last dimension of a tile belongs to the innermost dimension of the array.
        for dim, size in zip(minor, reversed(tile[1].split(",")), strict=False):
            padded[dim] = -(-padded[dim] // int(size)) * int(size)
    return Shape(
        dtype,
        sizes,
        int(space[1]) if space else 0,
        math.prod(padded) * bytes_of_element(dtype),
    )


def _end_of_bracket(text: str, start: int) -> int:
    """Return the index after the bracket that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    return len(text)


def parse(text: str) -> dict[str, Computation]:
    """Return the computations of a module by name."""
    computations: dict[str, Computation] = {}
    current = None
    for line in text.splitlines():
        if current is None:
            if head := _HEAD.match(line):
                current = computations[head[2]] = Computation(head[2], is_entry=bool(head[1]))
            continue
        if _END.match(line):
            current = None
        elif found := _INSTRUCTION.match(line):
            is_root, name, rest = found.groups()
            end = _end_of_bracket(rest, 0) if rest.startswith("(") else rest.find(" ")
            start = rest.find("(", end)
            close = _end_of_bracket(rest, start)
            shapes = tuple(_shape(*x) for x in _SHAPE.findall(rest[:end]))
            inside = rest[start + 1 : close - 1]
            op, operands = rest[end:start].strip(), tuple(_NAME.findall(inside))
            for part in (x for x in operands if "#" in x):  # newer texts have no line for an element of a tuple
                whole, index = part.split("#")
                shape = current.instructions[whole].shapes[int(index)]
                element = Instruction(
                    part,
                    (shape,),
                    "get-tuple-element",
                    (whole,),
                    f"index={index}",
                    f"%{whole}",
                )
                current.instructions.setdefault(part, element)
            current.instructions[name] = Instruction(name, shapes, op, operands, rest[close:], inside)
            if is_root:
                current.root = name
        elif current.instructions:  # a kernel's description has line breaks
            name, last = current.instructions.popitem()
            current.instructions[name] = dataclasses.replace(last, attributes=last.attributes + line)
    return computations


def sizes(text: str, *ops: str) -> list[int]:
    """Return the number of elements of each array that instructions with one of ``ops`` produce.

    Fusions are included.
    """
    found = (x for computation in parse(text).values() for x in computation.instructions.values())
    return [shape.size for x in found if x.op in ops for shape in x.shapes]


def moved(text: str, *kinds: str) -> list[int]:
    """Return the number of elements of each array that collectives of these kinds produce. Without kinds, all count.

    Collectives may be split into a start and a done instruction.
    """
    return sizes(text, *(kind + end for kind in kinds or COLLECTIVES for end in ("", "-start")))
