"""Operation counts: FLOPs, memory bytes and link bytes of one device, from the text of a compiled program.

A compiled program is a tree of loops. A region is the code inside one loop, or outside all loops, with the number of
times that it runs. Counts are summed per region, because the iterations of a loop run one after another.

    operations    matrix multiplications, including those that a TPU's compiler writes as convolutions and a GPU's as
                  calls of cuBLAS, and a TPU's kernels of attention and experts, which are custom calls
    memory        for each instruction outside fusions: bytes read from and written to memory outside the chip; for
                  slices and in-place updates only the part that changes. Tiles of a layout count in full.
    links         for each collective: bytes that a device sends in a ring, for arrays without tile padding

Owns: trip counts, the sums of operations and bytes. Does not know: the reader of the text (hlo), chips, seconds, the
program's purpose.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Set

from jaxrl_llm.planning.hlo import COLLECTIVES, Computation, Instruction, Shape, parse

HOST = 5  # the memory space of the host; 0 is the device's, others are on the chip

# Instructions that move no bytes themselves.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "while", "conditional", "call", "domain", "add-dependency"),
    *("async-start", "async-update", "copy-done"),
}
_FREE_CALLS = {"AllocateBuffer", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked", "AsyncCollectiveDone"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_LIBRARY = re.compile(r'target="(__cu\w+\$\w+|__triton\w*)')  # GPU libraries


@dataclasses.dataclass(frozen=True)
class Sent:
    """Collective over more than one device, at its place in the program."""

    kind: str
    shape: str  # shape of the largest input or output array, such as "bf16[128,64]"
    chips: int  # number of chips in one group
    num_bytes: float  # bytes that each chip sends
    op_name: str  # name of the line of Python that it comes from


@dataclasses.dataclass
class Region:
    """Counts of one iteration of a loop, per device, and the number of iterations in the whole program."""

    path: str  # the loops around this region
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


# ---- operations ----------------------------------------------------------------------------------------------


def _dot(x: Instruction, lhs: Shape) -> float:
    over = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.attributes)
    summed = [lhs.dims[int(d)] for d in over[1].split(",") if d] if over else []
    return 2.0 * math.prod(x.shapes[0].dims) * math.prod(summed)


def _gemm(x: Instruction, lhs: Shape) -> float | None:
    """Return the operations of a GPU library's matrix multiplication, or None for another call."""
    over = re.search(r'lhs_contracting_dimensions\\*":\[([^\]]*)\]', x.attributes)
    if over is None:
        return None
    return 2.0 * x.shapes[0].size * math.prod(lhs.dims[int(d)] for d in re.findall(r"\d+", over[1]))


def _numbers(text: str, name: str, default: list[int]) -> list[int]:
    found = re.search(rf"\b{name}=([\dx_-]+)", text)
    return [int(n) for n in found[1].split("x")] if found else default


def _convolution(x: Instruction, lhs: Shape, rhs: Shape) -> float:
    """Return the multiplications and additions that do not touch padding.

    Padding must not count, because compilers write batched matrix multiplications as padded convolutions.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.attributes)
    window = re.search(r"window=\{([^}]*)\}", x.attributes)
    assert labels is not None, "every convolution has dim_labels"
    left, right, out = labels.groups()
    spatial = sorted(c for c in out if c.isdigit())
    n, window = len(spatial), window[1] if window else ""
    ones = [1] * n
    stride, left_gaps = (
        _numbers(window, "stride", ones),
        _numbers(window, "lhs_dilate", ones),
    )
    right_gaps = _numbers(window, "rhs_dilate", ones)
    pad = re.search(r"pad=([\dx_-]+)", window)
    low = [int(p.split("_")[0]) for p in pad[1].split("x")] if pad else [0] * n
    valid = 1
    for i, dim in enumerate(spatial):
        size = (lhs.dims[left.index(dim)] - 1) * left_gaps[i] + 1
        places = range(0, x.shapes[0].dims[out.index(dim)] * stride[i], stride[i])
        taps = range(0, rhs.dims[right.index(dim)] * right_gaps[i], right_gaps[i])
        where = (p + t - low[i] for p in places for t in taps)
        valid *= sum(0 <= w < size and w % left_gaps[i] == 0 for w in where)
    batch, features = x.shapes[0].dims[out.index("b")], x.shapes[0].dims[out.index("f")]
    return 2.0 * batch * features * rhs.dims[right.index("i")] * valid


# Splash attention kernel -> number of matrix multiplications of [queries, keys] by the head size.
_SPLASH = {"mha_fwd": 2, "mqa_fwd": 2, "dq": 3, "fused": 5, "dkv": 4}


def causal_share(queries: int, keys: int, block: int, window: int = 0) -> float:
    """Return the least share of [queries, keys] that a Splash kernel computes in blocks, without fully masked blocks.

    Args:
        queries: number of queries, the last tokens of the keys.
        block: queries per block; a block sees the keys up to its last query.
        window: number of tokens that each query sees; 0 = all before it.
    """
    ends = range(keys - queries + block, keys + 1, block)
    return statistics.fmean(min(end, block + (window or keys) - 1) for end in ends) / keys


def _kernel(x: Instruction, operands: list[Shape], attended: Callable[[int, int, int], float]) -> float | None:
    """Return the operations of a TPU kernel for attention or experts, or None for another kernel."""
    # Each row is multiplied by one expert's matrix; the experts' loads are assumed to be equal.
    if x.name.startswith(("gmm", "tgmm")):
        matrices = [s.dims for s in operands if len(s.dims) == 2 and s.dtype in ("bf16", "f32")]
        num_parts = re.search(r"experts_in_(\d+)_parts", x.attributes)
        return 2.0 * math.prod(matrices[0]) * x.shapes[0].dims[-1] / (int(num_parts[1]) if num_parts else 1)
    four = [s.dims for s in operands if len(s.dims) == 4 and s.dtype in ("bf16", "f32")]
    if "decode_attention" in x.name and four:
        # Queries [B, K, R, H] against caches of C tokens, [B, K, C, H] or in memory order [B, K, H, C].
        B, K, R, H = x.shapes[0].dims
        cache = max((d for d in four if d[:2] == (B, K)), key=math.prod)
        return 4.0 * R * math.prod(cache)
    kind = next((n for key, n in _SPLASH.items() if "splash" in x.name and key in x.name), None)
    arrays = [s.dims for s in operands if s.dtype in ("bf16", "f32") and len(s.dims) >= 3]
    if kind is None or len(arrays) < 2:
        return None
    (*_, N, T, H), (*_, S, _) = arrays[0], arrays[1]
    N *= math.prod(arrays[0][:-3])
    block = re.search(r'block_q(?:_\w+)?\\*": (\d+)', x.attributes)
    size = min(int(block[1]), T) if block else T
    return 2.0 * kind * N * T * S * H * attended(T, S, size)


# ---- counting ------------------------------------------------------------------------------------------------


class _Program:
    """Parsed text of one program, and the sums over it."""

    def __init__(
        self,
        text: str,
        turns_of: Callable,
        read_share: Callable,
        attended: Callable,
        taken: Callable,
    ):
        self.computations = parse(text)
        self.turns_of, self.read_share, self.attended, self.taken = (turns_of, read_share, attended, taken)
        self.regions: list[Region] = []
        self.guessed: dict[str, float] = {}
        self.uncounted: collections.defaultdict[str, float] = collections.defaultdict(float)
        header = re.search(r"num_partitions=(\d+)", text)
        self.num_devices = int(header[1]) if header else 1
        self.entry = next(c for c in self.computations.values() if c.is_entry)

    def _constant(self, inside: Computation, name: str) -> int | None:
        """Return the integer value of an instruction, or None if the text does not contain it."""
        x = inside.instructions.get(name)
        while x is not None:
            if x.op == "constant":
                return int(x.literal) if re.fullmatch(r"-?\d+", x.literal) else None
            if x.op == "get-tuple-element":
                whole = inside.instructions[x.operands[0]]
                if whole.op != "tuple":
                    return None
                x = inside.instructions.get(whole.operands[_index(x)])
            elif x.op in ("copy", "bitcast", "convert", "copy-start", "copy-done") and x.operands:
                x = inside.instructions.get(x.operands[0])
            else:
                return None
        return None

    def turns(self, inside: Computation, loop: Instruction) -> float:
        """Return the trip count of a loop, from the compiler or from its condition's bound and its counter's start."""
        if known := re.search(r'known_trip_count\\?"?:\{\\?"?n\\?"?:\\?"?(\d+)', loop.attributes):
            return int(known[1])
        condition = self.computations[loop.called("condition")[0]]
        begin = inside.instructions[loop.operands[0]]
        root = condition.instructions[condition.root]
        if root.op == "get-tuple-element":
            return 1  # a loop of at most one iteration, from ``runtime.programs.run_if``
        for x in (
            root,
            *(condition.instructions[n] for n in root.operands if root.op == "and"),
        ):
            if x.op != "compare" or "direction=LT" not in x.attributes or begin.op != "tuple":
                continue
            counter, bound = (condition.instructions[n] for n in x.operands)
            if counter.op != "get-tuple-element":
                continue
            if bound.op == "get-tuple-element":
                last = self._constant(inside, begin.operands[_index(bound)])
            else:
                last = self._constant(condition, bound.name)
            first = self._constant(inside, begin.operands[_index(counter)])
            if last is not None:
                return max(0, -(((first or 0) - last) // self._step(loop, _index(counter))))
        name = loop.op_name or loop.name
        self.guessed[name] = self.turns_of(name)
        return self.guessed[name]

    def _step(self, loop: Instruction, index: int) -> int:
        """Return the amount that a loop's body adds to its counter.

        The amount is above 1 if the compiler has unrolled the loop.
        """
        body = self.computations[loop.called("body")[0]]
        root = body.instructions[body.root]
        x = body.instructions[root.operands[index]] if root.op == "tuple" else root
        while x.op in ("copy", "bitcast") and x.operands[0] in body.instructions:
            x = body.instructions[x.operands[0]]
        if x.op == "fusion":
            inner = self.computations[x.called("calls")[0]]
            added = inner.instructions[inner.root]
            found = [self._constant(inner, n) for n in added.operands] if added.op == "add" else []
            found += [self._constant(body, n) for n in x.operands]
        else:
            found = [self._constant(body, n) for n in x.operands] if x.op == "add" else []
        return max((n for n in found if n), default=1)

    def _read(self, inside: Computation, name: str, whole: float) -> float:
        """Return the bytes read of a fusion's parameter with ``whole`` bytes.

        The result is inf if the fusion may return the parameter unchanged.
        """
        total = math.inf if name == inside.root else 0.0
        for user in inside.users.get(name, ()):
            if user.op in _SLICES and user.operands[0] == name:
                total += sum(s.num_bytes for s in user.shapes)
            elif user.op == "dynamic-update-slice" and user.operands[0] == name:
                continue  # in place
            elif user.op in ("bitcast", "reshape"):
                total += self._read(inside, user.name, whole)
            elif user.op == "fusion":
                callee = self.computations[user.called("calls")[0]]
                for i, operand in enumerate(user.operands):
                    if operand == name and i in callee.parameters:
                        part = self._read(callee, callee.parameters[i].name, whole)
                        # If the parameter passes through unchanged, count the reads of its users.
                        total += part if part < math.inf else self._read(inside, user.name, whole)
            else:
                return whole
        return total

    def _written(self, inside: Computation, name: str, whole: float) -> float:
        """Return the bytes written of a fusion's result."""
        x = inside.instructions[name]
        while x.op == "bitcast" and x.operands[0] in inside.instructions:
            x = inside.instructions[x.operands[0]]
        if x.op == "fusion":
            callee = self.computations[x.called("calls")[0]]
            return self._written(callee, callee.root, whole)
        if x.op == "dynamic-update-slice":
            return min(
                whole,
                sum(s.num_bytes for s in inside.instructions[x.operands[1]].shapes),
            )
        if x.op == "scatter":
            return min(
                whole,
                2 * sum(s.num_bytes for s in inside.instructions[x.operands[-1]].shapes),
            )
        return whole

    def _moved(self, inside: Computation, x: Instruction) -> Iterator[tuple[int, float, bool]]:
        """Yield (memory space, bytes, whether it is written) for each array that an instruction reads or writes."""
        inputs = [inside.instructions[n].shapes for n in x.operands if n in inside.instructions]
        if x.op.endswith("-done") or x.op in _FREE:
            return
        if x.op in ("copy-start", "slice-start") and len(x.shapes) >= 2:
            size = min(s.num_bytes for s in x.shapes[:2])
            into, source = x.shapes[:2]
            yield from ((source.space, size, False), (into.space, size, True))
        elif x.op in _SLICES:
            yield from ((s.space, s.num_bytes, True) for s in x.shapes)
            yield inputs[0][0].space, sum(s.num_bytes for s in x.shapes), False
        elif x.op == "dynamic-update-slice":
            size = inputs[1][0].num_bytes
            yield from ((inputs[1][0].space, size, False), (x.shapes[0].space, size, True))
        elif x.op == "scatter":
            size = inputs[-1][0].num_bytes
            yield from ((x.shapes[0].space, size, way) for way in (False, True))
            yield inputs[-1][0].space, size, False
        elif x.op == "fusion":
            callee = self.computations[x.called("calls")[0]]
            for i, shapes in enumerate(inputs):
                for s in shapes:
                    name = callee.parameters[i].name if i in callee.parameters else ""
                    part = self._read(callee, name, s.num_bytes) if name and len(shapes) == 1 else s.num_bytes
                    yield s.space, min(part, s.num_bytes), False
            root = callee.instructions[callee.root]
            for i, s in enumerate(x.shapes):
                is_apart = root.op == "tuple" and len(root.operands) == len(x.shapes)
                yield (
                    s.space,
                    self._written(callee, root.operands[i] if is_apart else root.name, s.num_bytes),
                    True,
                )
        else:
            share = self.read_share(x.name) if x.op == "custom-call" else 1.0
            pairs = re.findall(r"\{(\d*)\}: \((\d+)", x.attributes.partition("aliasing={")[2][:400])
            places, aliased = (
                {int(i or 0) for i, _ in pairs},
                {int(i) for _, i in pairs},
            )
            for i, shapes in enumerate(inputs):
                yield from ((s.space, s.num_bytes * (share if i in aliased else 1.0), False) for s in shapes)
            written = x.shapes
            if _LIBRARY.search(x.attributes) and len(written) > 1 and written[-1].dtype in ("s8", "u8"):
                written = written[:-1]  # ignore workspace, because the text does not show how much of it is used
            yield from ((s.space, s.num_bytes, True) for i, s in enumerate(written) if i not in places)

    def _collectives(self, x: Instruction) -> set[tuple[str, ...]]:
        """Return the collectives that an instruction has started: channel, kind and results of each."""
        if x.op != "fusion":
            return {_identity(x)} if x.op.removesuffix("-start") in COLLECTIVES and x.op.endswith("-start") else set()
        inner = self.computations[x.called("calls")[0]].instructions.values()
        return {_identity(y) for y in inner if y.op.removesuffix("-start") in COLLECTIVES}

    def _going_on(self, inside: Computation, x: Instruction) -> set[tuple[str, ...]]:
        """Return the collectives that were started in the fusions whose results a fusion takes."""
        found = set()
        for name in x.operands:
            y = inside.instructions.get(name)
            while y is not None and y.op in ("get-tuple-element", "bitcast"):
                y = inside.instructions.get(y.operands[0])
            found |= self._collectives(y) if y is not None else set()
        return found

    def _count(
        self,
        region: Region,
        inside: Computation,
        *,
        fused: bool,
        going_on: Set[tuple[str, ...]] = frozenset(),
    ) -> None:
        for x in inside.instructions.values():
            shapes = [inside.instructions[n].shapes for n in x.operands if n in inside.instructions]
            if x.op == "dot":
                region.flops += _dot(x, shapes[0][0])
            elif x.op == "convolution":
                region.flops += _convolution(x, shapes[0][0], shapes[1][0])
            elif x.op == "custom-call" and (library := _LIBRARY.search(x.attributes)):
                flops = _gemm(x, shapes[0][0]) if shapes else None
                region.flops += flops or 0.0
                if flops is None:
                    self.uncounted[library[1]] += region.turns
            elif x.op == "custom-call" and "tpu_custom_call" in x.attributes:
                region.kernels[x.name.rstrip(".0123456789")] += 1
                flops = _kernel(x, [s for each in shapes for s in each], self.attended)
                region.flops += flops or 0.0
                if flops is None:
                    self.uncounted[x.name.rstrip(".0123456789")] += region.turns
            kind = x.op.removesuffix("-start")
            if kind in COLLECTIVES:
                if "all-reduce-scatter" in inside.name:  # a TPU's compiler writes a reduce-scatter like this
                    kind = "reduce-scatter"
                # The same collective can appear in several fusions. The channel id does not identify it, because
                # different calls of one shard_map or function may share a channel.
                if _identity(x) not in going_on:
                    sent = _sent(kind, x, self.num_devices, [s for each in shapes for s in each])
                    region.sent += [sent] if sent.chips > 1 else []
            if not fused and (x.op != "custom-call" or not any(name in x.attributes for name in _FREE_CALLS)):
                for space, size, is_written in self._moved(inside, x):
                    if space in (0, HOST):
                        total = ("host_" if space == HOST else "") + ("written_bytes" if is_written else "read_bytes")
                        setattr(region, total, getattr(region, total) + size)
            if x.op == "while":
                turns = region.turns * self.turns(inside, x)
                inner = Region(x.op_name or x.name, turns)
                self.regions.append(inner)
                for callee in x.called("body", "condition"):
                    self._count(inner, self.computations[callee], fused=False)
            elif x.op == "conditional":
                regions, branches, turns = (
                    self.regions,
                    [],
                    region.turns * (share := self.taken(x.op_name)),
                )
                for callee in x.called("branch_computations", "true_computation", "false_computation"):
                    self.regions = [Region(region.path, turns)]  # inner loops append their own regions
                    self._count(self.regions[0], self.computations[callee], fused=False)
                    branches.append(self.regions)
                whole = lambda its: [sum(r.turns * getattr(r, name) for r in its) for name in ("flops", "hbm_bytes")]
                own, *inner = dearest = max(branches, key=whole)
                self.regions = regions + (inner if share == 1 else dearest)
                if share == 1:
                    _add(region, own)
            else:
                begun = self._going_on(inside, x) if x.op == "fusion" else set()
                for callee in x.called("calls", "to_apply") if x.op in ("fusion", "call", "async-start") else ():
                    self._count(
                        region,
                        self.computations[callee],
                        fused=x.op == "fusion",
                        going_on=begun,
                    )


def _add(region: Region, other: Region) -> None:
    for name in (field.name for field in dataclasses.fields(Region) if field.name not in ("path", "turns")):
        setattr(region, name, getattr(region, name) + getattr(other, name))


def _index(x: Instruction) -> int:
    """Return the index of a get-tuple-element instruction."""
    match = re.search(r"index=(\d+)", x.attributes)
    assert match is not None, "get-tuple-element has an index"
    return int(match[1])


def _identity(x: Instruction) -> tuple[str, ...]:
    channel = re.search(r"channel_id=(\d+)", x.attributes)
    return (
        channel[1] if channel else x.name,
        x.op.removesuffix("-start"),
        *map(str, x.shapes),
    )


def _group_size(attributes: str, num_devices: int) -> int:
    """Return the number of devices that a collective joins. The text has several formats for it."""
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes):
        return int(found[2])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        # The group is a whole mesh axis or a part of one.
        of_axis = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in of_axis)
    if found := re.search(r"source_target_pairs=\{(\{.*?\})\}", attributes):
        return found[1].count("{")
    return num_devices


def _sent(kind: str, x: Instruction, num_devices: int, inputs: list[Shape]) -> Sent:
    """Return a collective with the bytes that each device sends by the ring algorithm. Tile padding is not counted."""
    group = _group_size(x.attributes, num_devices)
    # An all-gather's input is one device's part, which is passed on to all other devices.
    share = {
        "all-gather": group - 1,
        "all-reduce": 2 * (group - 1) / group,
        "collective-permute": 1,
    }
    num_bytes = sum(s.dense_bytes for s in inputs) * share.get(kind, (group - 1) / group)
    largest = max((*x.shapes, *inputs), key=lambda s: s.dense_bytes)
    return Sent(kind, str(largest), group, num_bytes, x.op_name)


def count(
    text: str,
    *,
    turns_of: Callable[[str], float] = lambda name: 1,
    read_share: Callable[[str], float] = lambda name: 1.0,
    attended: Callable[[int, int, int], float] = causal_share,
    taken: Callable[[str], float] = lambda name: 1.0,
) -> Counts:
    """Return the counts of one device in one call of a program.

    Args:
        text: optimised HLO, ``compiled.as_text()``.
        turns_of: operation name of a loop -> its trip count, used if the text has no bound.
        read_share: name of a custom call -> average share that it reads of the operands that it updates in place.
        attended: (queries, keys, queries per block) -> share of [queries, keys] that a Splash kernel computes.
        taken: operation name of a conditional -> average share of calls that take its most expensive branch.
    """
    program = _Program(text, turns_of, read_share, attended, taken)
    region = Region("", 1)
    program.regions.append(region)
    program._count(region, program.entry, fused=False)
    return Counts(tuple(program.regions), program.guessed, dict(program.uncounted))
