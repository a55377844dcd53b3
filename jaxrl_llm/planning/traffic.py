"""Memory traffic: the bytes that each instruction outside fusions reads from memory and writes to memory.

For slices and in-place updates only the part that changes counts. Tiles of a layout count in full.

Owns: these rules. Does not know: loops, the rates of memory.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping

from jaxrl_llm.planning.hlo import Computation, Instruction, Shape

# Instructions that move no bytes themselves.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "while", "conditional", "call", "domain", "add-dependency"),
    *("async-start", "async-update", "copy-done"),
}
FREE_CALLS = ("AllocateBuffer", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked", "AsyncCollectiveDone")
SLICES = {"dynamic-slice", "slice", "gather"}
LIBRARY = re.compile(r'target="(__cu\w+\$\w+|__triton\w*)')  # GPU libraries
MOST_ALIASING_CHARACTERS = 400  # of a custom call's aliasing table


@dataclasses.dataclass(frozen=True)
class Access:
    """Bytes that an instruction reads from or writes to one memory space."""

    space: int
    num_bytes: float
    is_written: bool


def _read(space: int, num_bytes: float) -> Access:
    return Access(space, num_bytes, is_written=False)


def _written(space: int, num_bytes: float) -> Access:
    return Access(space, num_bytes, is_written=True)


def _total_bytes(shapes: tuple[Shape, ...]) -> float:
    return sum(shape.num_bytes for shape in shapes)


class Traffic:
    """Memory traffic of the instructions of one program.

    Attributes:
        read_share: name of a custom call -> average share that it reads of the operands that it updates in place.
    """

    def __init__(self, computations: Mapping[str, Computation], read_share: Callable[[str], float]):
        self._computations = computations
        self._read_share = read_share

    def accesses(self, inside: Computation, instruction: Instruction) -> Iterator[Access]:
        """Yield each array that an instruction reads or writes."""
        op = instruction.op
        if op.endswith("-done") or op in FREE:
            return
        inputs = inside.operand_shapes(instruction)
        results = instruction.shapes
        if op in ("copy-start", "slice-start") and len(results) >= 2:
            target, source = results[:2]
            size = min(target.num_bytes, source.num_bytes)
            yield _read(source.space, size)
            yield _written(target.space, size)
        elif op in SLICES:
            for result in results:
                yield _written(result.space, result.num_bytes)
            yield _read(inputs[0][0].space, _total_bytes(results))
        elif op == "dynamic-update-slice":
            update = inputs[1][0]
            yield _read(update.space, update.num_bytes)
            yield _written(results[0].space, update.num_bytes)
        elif op == "scatter":
            updates = inputs[-1][0]
            yield _read(results[0].space, updates.num_bytes)
            yield _written(results[0].space, updates.num_bytes)
            yield _read(updates.space, updates.num_bytes)
        elif op == "fusion":
            yield from self._of_fusion(instruction, inputs)
        else:
            yield from self._of_call(instruction, inputs)

    def _of_fusion(self, fusion: Instruction, inputs: list[tuple[Shape, ...]]) -> Iterator[Access]:
        """Yield the arrays that a fusion reads and writes."""
        callee = self._callee(fusion)
        for i, shapes in enumerate(inputs):
            parameter = callee.parameters.get(i)
            for shape in shapes:
                num_bytes = shape.num_bytes
                if parameter is not None and len(shapes) == 1:
                    part = self._parameter_bytes(callee, parameter.name, num_bytes)
                    num_bytes = min(part, num_bytes)
                yield _read(shape.space, num_bytes)
        root = callee.instructions[callee.root]
        has_separate_results = root.op == "tuple" and len(root.operands) == len(fusion.shapes)
        for i, shape in enumerate(fusion.shapes):
            result_name = root.operands[i] if has_separate_results else root.name
            yield _written(shape.space, self._result_bytes(callee, result_name, shape.num_bytes))

    def _of_call(self, instruction: Instruction, inputs: list[tuple[Shape, ...]]) -> Iterator[Access]:
        """Yield the arrays that a custom call reads and writes. The same rule is for all other instructions."""
        read_share = 1.0
        if instruction.op == "custom-call":
            read_share = self._read_share(instruction.name)
        # Results that are updated in place, and the operands that hold them.
        aliasing = instruction.attributes.partition("aliasing={")[2][:MOST_ALIASING_CHARACTERS]
        pairs = re.findall(r"\{(\d*)\}: \((\d+)", aliasing)
        results_in_place = {int(result or 0) for result, _ in pairs}
        operands_in_place = {int(operand) for _, operand in pairs}
        for i, shapes in enumerate(inputs):
            share = read_share if i in operands_in_place else 1.0
            for shape in shapes:
                yield _read(shape.space, shape.num_bytes * share)
        for i, shape in enumerate(_without_workspace(instruction)):
            if i not in results_in_place:
                yield _written(shape.space, shape.num_bytes)

    def _callee(self, fusion: Instruction) -> Computation:
        return self._computations[fusion.called("calls")[0]]

    def _parameter_bytes(self, inside: Computation, name: str, whole: float) -> float:
        """Return the bytes read of a fusion's parameter with ``whole`` bytes.

        The result is inf if the fusion may return the parameter unchanged.
        """
        total = math.inf if name == inside.root else 0.0
        for user in inside.users.get(name, ()):
            is_first_operand = user.operands[0] == name
            if user.op in SLICES and is_first_operand:
                total += _total_bytes(user.shapes)
            elif user.op == "dynamic-update-slice" and is_first_operand:
                continue  # in place
            elif user.op in ("bitcast", "reshape"):
                total += self._parameter_bytes(inside, user.name, whole)
            elif user.op == "fusion":
                total += self._fusion_operand_bytes(inside, user, name, whole)
            else:
                return whole
        return total

    def _fusion_operand_bytes(self, inside: Computation, fusion: Instruction, name: str, whole: float) -> float:
        """Return the bytes that a fusion inside ``inside`` reads of its operand ``name`` with ``whole`` bytes."""
        callee = self._callee(fusion)
        total = 0.0
        for i, operand in enumerate(fusion.operands):
            parameter = callee.parameters.get(i)
            if operand != name or parameter is None:
                continue
            part = self._parameter_bytes(callee, parameter.name, whole)
            if part == math.inf:
                # The operand passes through unchanged: count the reads of the fusion's users.
                part = self._parameter_bytes(inside, fusion.name, whole)
            total += part
        return total

    def _result_bytes(self, inside: Computation, name: str, whole: float) -> float:
        """Return the bytes written of a fusion's result with ``whole`` bytes."""
        result = inside.instructions[name]
        while result.op == "bitcast" and result.operands[0] in inside.instructions:
            result = inside.instructions[result.operands[0]]
        if result.op == "fusion":
            callee = self._callee(result)
            return self._result_bytes(callee, callee.root, whole)
        if result.op == "dynamic-update-slice":
            update = inside.instructions[result.operands[1]]
            return min(whole, _total_bytes(update.shapes))
        if result.op == "scatter":
            updates = inside.instructions[result.operands[-1]]
            return min(whole, 2 * _total_bytes(updates.shapes))
        return whole


def is_free_call(instruction: Instruction) -> bool:
    """Return whether an instruction is a custom call that moves no bytes."""
    if instruction.op != "custom-call":
        return False
    return any(name in instruction.attributes for name in FREE_CALLS)


def _without_workspace(instruction: Instruction) -> tuple[Shape, ...]:
    """Return the results of an instruction, without the workspace of a GPU library's call.

    The text does not show how much of the workspace is used.
    """
    results = instruction.shapes
    is_library_call = LIBRARY.search(instruction.attributes) is not None
    if is_library_call and len(results) > 1 and results[-1].dtype in ("s8", "u8"):
        return results[:-1]
    return results
