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
        """Return the computations that the attributes with these ``names`` refer to."""
        found = re.findall(rf"(?:{'|'.join(names)})=(?:%([\w.-]+)|\{{([^}}]*)\}})", self.attributes)
        callees = []
        for single, listed in found:
            callees += [single] if single else _NAME.findall(listed)
        return callees

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

    def operand_shapes(self, instruction: Instruction) -> list[tuple[Shape, ...]]:
        """Return the shapes of each operand in this computation. An operand that is a tuple has several."""
        shapes = []
        for name in instruction.operands:
            if name in self.instructions:
                shapes.append(self.instructions[name].shapes)
        return shapes

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
        for dim, text in zip(minor, reversed(tile[1].split(",")), strict=False):
            size = int(text)
            num_tiles = -(-padded[dim] // size)
            padded[dim] = num_tiles * size
    return Shape(
        dtype,
        sizes,
        space=int(space[1]) if space else 0,
        num_bytes=math.prod(padded) * bytes_of_element(dtype),
    )


def _end_of_bracket(text: str, start: int) -> int:
    """Return the index after the bracket that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == "(":
            depth += 1
        elif text[i] == ")":
            depth -= 1
        if depth == 0:
            return i + 1
    return len(text)


def parse(text: str) -> dict[str, Computation]:
    """Return the computations of a module by name."""
    computations: dict[str, Computation] = {}
    current = None
    for line in text.splitlines():
        if current is None:
            head = _HEAD.match(line)
            if head:
                current = Computation(head[2], is_entry=bool(head[1]))
                computations[current.name] = current
            continue
        if _END.match(line):
            current = None
            continue
        found = _INSTRUCTION.match(line)
        if found:
            root_mark, name, text_of_instruction = found.groups()
            _add_instruction(current, name, text_of_instruction)
            if root_mark:
                current.root = name
        elif current.instructions:  # a kernel's description has line breaks
            name, last = current.instructions.popitem()
            current.instructions[name] = dataclasses.replace(last, attributes=last.attributes + line)
    return computations


def _add_instruction(computation: Computation, name: str, text: str) -> None:
    """Add the instruction with this name and this text: "SHAPES OP(OPERANDS), ATTRIBUTES"."""
    end_of_shapes = _end_of_bracket(text, 0) if text.startswith("(") else text.find(" ")
    start = text.find("(", end_of_shapes)
    close = _end_of_bracket(text, start)
    shapes = [_shape(*match) for match in _SHAPE.findall(text[:end_of_shapes])]
    literal = text[start + 1 : close - 1]
    operands = tuple(_NAME.findall(literal))
    for operand in operands:
        if "#" in operand:
            _add_tuple_element(computation, operand)
    computation.instructions[name] = Instruction(
        name,
        tuple(shapes),
        op=text[end_of_shapes:start].strip(),
        operands=operands,
        attributes=text[close:],
        literal=literal,
    )


def _add_tuple_element(computation: Computation, name: str) -> None:
    """Add the get-tuple-element instruction of an operand ``whole#index``. Newer texts have no line for it."""
    whole, index = name.split("#")
    shape = computation.instructions[whole].shapes[int(index)]
    element = Instruction(
        name,
        shapes=(shape,),
        op="get-tuple-element",
        operands=(whole,),
        attributes=f"index={index}",
        literal=f"%{whole}",
    )
    computation.instructions.setdefault(name, element)


def sizes(text: str, *ops: str) -> list[int]:
    """Return the number of elements of each array that instructions with one of ``ops`` produce.

    Fusions are included.
    """
    found = []
    for computation in parse(text).values():
        for instruction in computation.instructions.values():
            if instruction.op in ops:
                found += [shape.size for shape in instruction.shapes]
    return found


def moved(text: str, *kinds: str) -> list[int]:
    """Return the number of elements of each array that a collective of one of the ``kinds`` produces. () = all kinds.

    Collectives may be split into a start and a done instruction.
    """
    ops = []
    for kind in kinds or COLLECTIVES:
        ops += [kind, f"{kind}-start"]
    return sizes(text, *ops)
