"""Operation counts: FLOPs, memory bytes and link bytes of one device, from the text of a compiled program.

A compiled program is a tree of loops. A region is the code inside one loop, or outside all loops, with the number of
times that it runs. Counts are summed per region, because the iterations of a loop run one after another.

    operations    of matrix multiplications and of a TPU's kernels for attention and experts
    memory        bytes that instructions outside fusions read from and write to memory outside the chip
    links         bytes that a device sends in collectives

Owns: trip counts, the walk through a program, the sums. Does not know: how the text is read (hlo), the counts of one
instruction (operations, traffic, collectives), chips, seconds, the program's purpose.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Set

from jaxrl_llm.planning import collectives, operations
from jaxrl_llm.planning.collectives import Sent
from jaxrl_llm.planning.hlo import Computation, Instruction, Shape, parse
from jaxrl_llm.planning.operations import AttendedShare, causal_share
from jaxrl_llm.planning.traffic import LIBRARY, Traffic, is_free_call

DEVICE = 0  # the memory space of the device
HOST = 5  # the memory space of the host; others are on the chip


@dataclasses.dataclass
class Region:
    """Counts of one iteration of a loop, per device, and the number of iterations in the whole program."""

    path: str  # the loop: the name of its operation, "" outside all loops
    turns: float
    flops: float = 0.0
    read_bytes: float = 0.0  # from the device's memory
    written_bytes: float = 0.0
    host_read_bytes: float = 0.0  # from the host's memory
    host_written_bytes: float = 0.0
    sent: list[Sent] = dataclasses.field(default_factory=list)
    kernels: Counter[str] = dataclasses.field(default_factory=Counter)  # by name

    @property
    def hbm_bytes(self) -> float:
        return self.read_bytes + self.written_bytes

    @property
    def host_bytes(self) -> float:
        return self.host_read_bytes + self.host_written_bytes

    @property
    def link_bytes(self) -> dict[str, float]:
        """Return the bytes that a device sends, by kind of collective."""
        total: dict[str, float] = {}
        for sent in self.sent:
            total[sent.kind] = total.get(sent.kind, 0.0) + sent.num_bytes
        return total

    @property
    def collectives(self) -> dict[str, int]:
        """Return the number of collectives by kind."""
        return dict(Counter(sent.kind for sent in self.sent))

    def add(self, other: Region) -> None:
        """Add the counts of one iteration of another region."""
        self.flops += other.flops
        self.read_bytes += other.read_bytes
        self.written_bytes += other.written_bytes
        self.host_read_bytes += other.host_read_bytes
        self.host_written_bytes += other.host_written_bytes
        self.sent += other.sent
        self.kernels += other.kernels


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of a program.

    Attributes:
        guessed: loops whose trip count the text does not contain, by operation name, with the assumed count.
        uncounted: custom calls with unknown operations, with the number of times that each runs.
    """

    regions: tuple[Region, ...]
    guessed: dict[str, float]
    uncounted: dict[str, float]

    def total(self, name: str) -> float:
        return sum(region.turns * getattr(region, name) for region in self.regions)

    def by_collective(self, name: str = "link_bytes") -> dict[str, float]:
        """Return the sum of a region's property by kind of collective, over all regions and iterations."""
        total: dict[str, float] = {}
        for region in self.regions:
            for kind, count_of_kind in getattr(region, name).items():
                total[kind] = total.get(kind, 0.0) + region.turns * count_of_kind
        return total

    @property
    def sent(self) -> list[tuple[float, Sent]]:
        """Return every collective, with the number of times that it runs."""
        return [(region.turns, sent) for region in self.regions for sent in region.sent]


def _once(_: str) -> float:
    """Return the trip count of a loop if nothing is known about it."""
    return 1


def _always(_: str) -> float:
    """Return the largest share."""
    return 1.0


def count(
    text: str,
    *,
    turns_of: Callable[[str], float] = _once,
    read_share: Callable[[str], float] = _always,
    attended: AttendedShare = causal_share,
    taken: Callable[[str], float] = _always,
) -> Counts:
    """Return the counts of one device in one call of a program.

    Args:
        text: optimised HLO, ``compiled.as_text()``.
        turns_of: operation name of a loop -> its trip count, used if the text has no bound.
        read_share: name of a custom call -> average share that it reads of the operands that it updates in place.
        attended: (queries, keys, queries per block) -> share of [queries, keys] that a Splash kernel computes.
        taken: operation name of a conditional -> average share of calls that take its most expensive branch.
    """
    counter = _Counter(text, turns_of, read_share, attended, taken)
    counter.count_program()
    return Counts(
        tuple(counter.regions),
        guessed=counter.loops.guessed,
        uncounted=dict(counter.uncounted),
    )


class _Loops:
    """Trip counts of the loops of a program."""

    def __init__(self, computations: dict[str, Computation], turns_of: Callable[[str], float]):
        self._computations = computations
        self._turns_of = turns_of
        self.guessed: dict[str, float] = {}

    def turns(self, inside: Computation, loop: Instruction) -> float:
        """Return the trip count of a loop, from the compiler or from its condition's bound and its counter's start."""
        known = re.search(r'known_trip_count\\?"?:\{\\?"?n\\?"?:\\?"?(\d+)', loop.attributes)
        if known:
            return int(known[1])
        counted = self._counted_turns(inside, loop)
        if counted is not None:
            return counted
        name = loop.op_name or loop.name
        guess = self._turns_of(name)
        self.guessed[name] = guess
        return guess

    def _counted_turns(self, inside: Computation, loop: Instruction) -> int | None:
        """Return the trip count of a loop from its text, or None if the text does not contain it."""
        condition = self._computations[loop.called("condition")[0]]
        root = condition.instructions[condition.root]
        if root.op == "get-tuple-element":
            return 1  # a loop of at most one iteration, from ``runtime.programs.run_if``
        comparisons = [root]
        if root.op == "and":
            comparisons += [condition.instructions[name] for name in root.operands]
        begin = inside.instructions[loop.operands[0]]
        if begin.op != "tuple":
            return None
        for comparison in comparisons:
            if comparison.op != "compare" or "direction=LT" not in comparison.attributes:
                continue
            counter, bound = (condition.instructions[name] for name in comparison.operands)
            if counter.op != "get-tuple-element":
                continue
            index = _tuple_index(counter)
            if bound.op == "get-tuple-element":
                last = _constant(inside, begin.operands[_tuple_index(bound)])
            else:
                last = _constant(condition, bound.name)
            if last is None:
                continue
            first = _constant(inside, begin.operands[index]) or 0
            step = self._step(loop, index)
            rounded_up = -((first - last) // step)
            return max(0, rounded_up)
        return None

    def _step(self, loop: Instruction, index: int) -> int:
        """Return the amount that a loop's body adds to its counter.

        The amount is above 1 if the compiler has unrolled the loop.
        """
        body = self._computations[loop.called("body")[0]]
        following = body.instructions[body.root]
        if following.op == "tuple":
            following = body.instructions[following.operands[index]]
        while following.op in ("copy", "bitcast") and following.operands[0] in body.instructions:
            following = body.instructions[following.operands[0]]
        addends: list[int | None] = []
        if following.op == "fusion":
            callee = self._computations[following.called("calls")[0]]
            root = callee.instructions[callee.root]
            if root.op == "add":
                addends += [_constant(callee, name) for name in root.operands]
        if following.op in ("fusion", "add"):
            addends += [_constant(body, name) for name in following.operands]
        return max((addend for addend in addends if addend), default=1)


class _Counter:
    """Walk through the computations of one program, and the sums over it."""

    def __init__(
        self,
        text: str,
        turns_of: Callable[[str], float],
        read_share: Callable[[str], float],
        attended: AttendedShare,
        taken: Callable[[str], float],
    ):
        self.computations = parse(text)
        self.loops = _Loops(self.computations, turns_of)
        self.traffic = Traffic(self.computations, read_share)
        self.attended = attended
        self.taken = taken
        self.regions: list[Region] = []
        self.uncounted: collections.defaultdict[str, float] = collections.defaultdict(float)
        header = re.search(r"num_partitions=(\d+)", text)
        self.num_devices = int(header[1]) if header else 1

    def count_program(self) -> None:
        """Count the whole program, from its entry."""
        region = Region("", 1)
        self.regions.append(region)
        entry = next(computation for computation in self.computations.values() if computation.is_entry)
        self._count(region, entry)

    def _count(
        self,
        region: Region,
        inside: Computation,
        *,
        is_fused: bool = False,
        started: Set[tuple[str, ...]] = frozenset(),
    ) -> None:
        """Add the instructions of a computation to a region. The loops inside it become regions of their own.

        Args:
            is_fused: the computation is a fusion, whose inner instructions do not use memory.
            started: collectives that are already counted, because an earlier fusion has started them.
        """
        for instruction in inside.instructions.values():
            self._add_operations(region, inside, instruction)
            self._add_collective(region, inside, instruction, started)
            if not is_fused:
                self._add_traffic(region, inside, instruction)
            if instruction.op == "while":
                self._count_loop(region, inside, instruction)
            elif instruction.op == "conditional":
                self._count_branches(region, instruction)
            elif instruction.op == "fusion":
                started_before = self._started_by_operands(inside, instruction)
                for callee in self._callees(instruction, "calls", "to_apply"):
                    self._count(region, callee, is_fused=True, started=started_before)
            elif instruction.op in ("call", "async-start"):
                for callee in self._callees(instruction, "calls", "to_apply"):
                    self._count(region, callee)

    def _callees(self, instruction: Instruction, *roles: str) -> list[Computation]:
        return [self.computations[name] for name in instruction.called(*roles)]

    def _add_operations(self, region: Region, inside: Computation, instruction: Instruction) -> None:
        """Add the operations of one instruction. A custom call with unknown operations is listed as uncounted."""
        if instruction.op not in ("dot", "convolution", "custom-call"):
            return
        operands = inside.operand_shapes(instruction)
        if instruction.op == "dot":
            region.flops += operations.dot_flops(instruction, operands[0][0])
            return
        if instruction.op == "convolution":
            lhs = operands[0][0]
            rhs = operands[1][0]
            region.flops += operations.convolution_flops(instruction, lhs, rhs)
            return
        library = LIBRARY.search(instruction.attributes)
        if library:
            name = library[1]
            flops = operations.library_flops(instruction, operands[0][0]) if operands else None
        elif "tpu_custom_call" in instruction.attributes:
            name = instruction.name.rstrip(".0123456789")
            region.kernels[name] += 1
            flops = operations.kernel_flops(instruction, _joined(operands), self.attended)
        else:
            return
        if flops is None:
            self.uncounted[name] += region.turns
        else:
            region.flops += flops

    def _add_collective(
        self,
        region: Region,
        inside: Computation,
        instruction: Instruction,
        started: Set[tuple[str, ...]],
    ) -> None:
        """Add the bytes that a collective sends, unless an earlier fusion has started it."""
        kind = collectives.kind_of(instruction)
        if kind is None or collectives.identity(instruction) in started:
            return
        if "all-reduce-scatter" in inside.name:  # a TPU's compiler writes a reduce-scatter like this
            kind = "reduce-scatter"
        inputs = _joined(inside.operand_shapes(instruction))
        sent = collectives.sent(kind, instruction, self.num_devices, inputs)
        if sent.chips > 1:
            region.sent.append(sent)

    def _add_traffic(self, region: Region, inside: Computation, instruction: Instruction) -> None:
        """Add the bytes that an instruction reads from and writes to the memory of the device and of the host."""
        if is_free_call(instruction):
            return
        for access in self.traffic.accesses(inside, instruction):
            if access.space == DEVICE and access.is_written:
                region.written_bytes += access.num_bytes
            elif access.space == DEVICE:
                region.read_bytes += access.num_bytes
            elif access.space == HOST and access.is_written:
                region.host_written_bytes += access.num_bytes
            elif access.space == HOST:
                region.host_read_bytes += access.num_bytes

    def _count_loop(self, region: Region, inside: Computation, loop: Instruction) -> None:
        """Count the body and the condition of a loop as a new region."""
        turns = region.turns * self.loops.turns(inside, loop)
        inner = Region(loop.op_name or loop.name, turns)
        self.regions.append(inner)
        for callee in self._callees(loop, "body", "condition"):
            self._count(inner, callee)

    def _count_branches(self, region: Region, conditional: Instruction) -> None:
        """Count the most expensive branch of a conditional.

        If every call takes it, it belongs to the region around it. Otherwise it becomes a region with fewer turns.
        """
        outer_regions = self.regions
        share = self.taken(conditional.op_name)
        branches = []
        for callee in self._callees(conditional, "branch_computations", "true_computation", "false_computation"):
            branch = Region(region.path, region.turns * share)
            self.regions = [branch]  # inner loops append their own regions
            self._count(branch, callee)
            branches.append(self.regions)
        most_expensive = max(branches, key=_branch_cost)
        self.regions = outer_regions
        if share == 1:
            outside_loops, *loops = most_expensive
            region.add(outside_loops)
            self.regions += loops
        else:
            self.regions += most_expensive

    def _started_by_operands(self, inside: Computation, fusion: Instruction) -> set[tuple[str, ...]]:
        """Return the collectives that were started in the fusions whose results a fusion takes."""
        started = set()
        for name in fusion.operands:
            operand = inside.instructions.get(name)
            while operand is not None and operand.op in ("get-tuple-element", "bitcast"):
                operand = inside.instructions.get(operand.operands[0])
            if operand is not None:
                started |= self._started_by(operand)
        return started

    def _started_by(self, instruction: Instruction) -> set[tuple[str, ...]]:
        """Return the identities of the collectives that an instruction has started."""
        if instruction.op == "fusion":
            callee = self._callees(instruction, "calls")[0]
            inner = callee.instructions.values()
            return {collectives.identity(x) for x in inner if collectives.kind_of(x) is not None}
        if instruction.op.endswith("-start") and collectives.kind_of(instruction) is not None:
            return {collectives.identity(instruction)}
        return set()


def _branch_cost(regions: list[Region]) -> tuple[float, float]:
    """Return the operations and the memory bytes of the regions of a branch."""
    flops = sum(region.turns * region.flops for region in regions)
    hbm_bytes = sum(region.turns * region.hbm_bytes for region in regions)
    return flops, hbm_bytes


def _joined(shapes_of_operands: list[tuple[Shape, ...]]) -> list[Shape]:
    return [shape for shapes in shapes_of_operands for shape in shapes]


def _constant(inside: Computation, name: str) -> int | None:
    """Return the integer value of an instruction, or None if the text does not contain it."""
    instruction = inside.instructions.get(name)
    while instruction is not None:
        if instruction.op == "constant":
            is_integer = re.fullmatch(r"-?\d+", instruction.literal)
            return int(instruction.literal) if is_integer else None
        if instruction.op == "get-tuple-element":
            whole = inside.instructions[instruction.operands[0]]
            if whole.op != "tuple":
                return None
            source = whole.operands[_tuple_index(instruction)]
        elif instruction.op in ("copy", "bitcast", "convert", "copy-start", "copy-done") and instruction.operands:
            source = instruction.operands[0]
        else:
            return None
        instruction = inside.instructions.get(source)
    return None


def _tuple_index(instruction: Instruction) -> int:
    """Return the index of a get-tuple-element instruction."""
    match = re.search(r"index=(\d+)", instruction.attributes)
    assert match is not None, "get-tuple-element has an index"
    return int(match[1])
