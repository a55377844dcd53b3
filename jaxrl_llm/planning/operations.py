"""Operations of one instruction: the multiplications and additions of matrix multiplications and TPU kernels.

Matrix multiplications are dots, convolutions (a TPU's compiler writes batched products as convolutions) and calls of
GPU libraries. The kernels are custom calls for attention and for experts.

Owns: these formulas. Does not know: loops, bytes, how often an instruction runs.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable

from jaxrl_llm.planning.hlo import Instruction, Shape

# Splash attention kernel -> number of matrix multiplications of [queries, keys] by the head size.
SPLASH_PRODUCTS = {
    "mha_fwd": 2,
    "mqa_fwd": 2,
    "dq": 3,
    "fused": 5,
    "dkv": 4,
}
# Data types of arrays that kernels multiply. Other operands are masks and indices.
MULTIPLIED = ("bf16", "f32")

# (queries, keys, queries per block) -> share of [queries, keys] that a Splash kernel computes.
AttendedShare = Callable[[int, int, int], float]


def dot_flops(dot: Instruction, lhs: Shape) -> float:
    """Return the operations of a ``dot`` instruction whose left operand has the shape ``lhs``."""
    contracting = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    listed = contracting[1] if contracting else ""
    return 2.0 * dot.shapes[0].size * _summed_size(listed, lhs)


def library_flops(call: Instruction, lhs: Shape) -> float | None:
    """Return the operations of a GPU library's matrix multiplication, or None for another call."""
    contracting = re.search(r'lhs_contracting_dimensions\\*":\[([^\]]*)\]', call.attributes)
    if contracting is None:
        return None
    return 2.0 * call.shapes[0].size * _summed_size(contracting[1], lhs)


def _summed_size(listed: str, lhs: Shape) -> int:
    """Return the product of the sizes of the left operand's dimensions that a text lists."""
    size = 1
    for dim in re.findall(r"\d+", listed):
        size *= lhs.dims[int(dim)]
    return size


def convolution_flops(convolution: Instruction, lhs: Shape, rhs: Shape) -> float:
    """Return the multiplications and additions that do not touch padding.

    Padding must not count, because compilers write batched matrix multiplications as padded convolutions.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    assert labels is not None, "every convolution has dim_labels"
    left, right, out = labels.groups()
    out_dims = convolution.shapes[0].dims
    spatial = sorted(label for label in out if label.isdigit())
    match = re.search(r"window=\{([^}]*)\}", convolution.attributes)
    window = match[1] if match else ""
    strides = _window_numbers(window, "stride", [1] * len(spatial))
    left_dilations = _window_numbers(window, "lhs_dilate", [1] * len(spatial))
    right_dilations = _window_numbers(window, "rhs_dilate", [1] * len(spatial))
    low_padding = _low_padding(window, [0] * len(spatial))
    num_pairs = 1
    for i, label in enumerate(spatial):
        num_pairs *= _pairs_without_padding(
            lhs.dims[left.index(label)],
            rhs.dims[right.index(label)],
            out_dims[out.index(label)],
            stride=strides[i],
            left_dilation=left_dilations[i],
            right_dilation=right_dilations[i],
            low_padding=low_padding[i],
        )
    batch = out_dims[out.index("b")]
    features = out_dims[out.index("f")]
    in_features = rhs.dims[right.index("i")]
    return 2.0 * batch * features * in_features * num_pairs


def _window_numbers(window: str, name: str, default: list[int]) -> list[int]:
    """Return the numbers of an attribute of a convolution's window, such as ``stride=2x1``."""
    found = re.search(rf"\b{name}=([\dx_-]+)", window)
    if found is None:
        return default
    return [int(number) for number in found[1].split("x")]


def _low_padding(window: str, default: list[int]) -> list[int]:
    """Return the padding before each spatial dimension, from a window such as ``pad=1_2x0_0``."""
    found = re.search(r"pad=([\dx_-]+)", window)
    if found is None:
        return default
    low_padding = []
    for low_and_high in found[1].split("x"):
        low, _, _ = low_and_high.partition("_")
        low_padding.append(int(low))
    return low_padding


def _pairs_without_padding(
    left_size: int,
    right_size: int,
    out_size: int,
    *,
    stride: int,
    left_dilation: int,
    right_dilation: int,
    low_padding: int,
) -> int:
    """Return how many pairs of an output and a filter element meet an input element along one spatial dimension.

    The other pairs meet padding or the gaps of a dilated input.
    """
    dilated_size = (left_size - 1) * left_dilation + 1
    num_pairs = 0
    for window_start in range(0, out_size * stride, stride):
        for offset in range(0, right_size * right_dilation, right_dilation):
            position = window_start + offset - low_padding
            is_inside = 0 <= position < dilated_size
            if is_inside and position % left_dilation == 0:
                num_pairs += 1
    return num_pairs


def causal_share(queries: int, keys: int, block: int, window: int = 0) -> float:
    """Return the least share of [queries, keys] that a Splash kernel computes in blocks, without fully masked blocks.

    Args:
        queries: number of queries, the last tokens of the keys.
        block: queries per block; a block sees the keys up to its last query.
        window: number of tokens that each query sees; 0 = all before it.
    """
    most_keys = block + (window or keys) - 1
    ends = range(keys - queries + block, keys + 1, block)
    return statistics.fmean(min(end, most_keys) for end in ends) / keys


def kernel_flops(kernel: Instruction, operands: list[Shape], attended: AttendedShare) -> float | None:
    """Return the operations of a TPU kernel for attention or experts, or None for another kernel."""
    multiplied = [shape.dims for shape in operands if shape.dtype in MULTIPLIED]
    if kernel.name.startswith(("gmm", "tgmm")):
        return _expert_flops(kernel, multiplied)
    four_dims = [dims for dims in multiplied if len(dims) == 4]
    if "decode_attention" in kernel.name and four_dims:
        return _decode_attention_flops(kernel, four_dims)
    if "splash" in kernel.name:
        return _splash_flops(kernel, multiplied, attended)
    return None


def _expert_flops(kernel: Instruction, multiplied: list[tuple[int, ...]]) -> float:
    """Return the operations of a grouped matrix multiplication: each row is multiplied by one expert's matrix.

    The experts' loads are assumed to be equal.
    """
    matrices = [dims for dims in multiplied if len(dims) == 2]
    rows_size = math.prod(matrices[0])
    out_width = kernel.shapes[0].dims[-1]
    found = re.search(r"experts_in_(\d+)_parts", kernel.attributes)
    num_parts = int(found[1]) if found else 1
    return 2.0 * rows_size * out_width / num_parts


def _decode_attention_flops(kernel: Instruction, four_dims: list[tuple[int, int, int, int]]) -> float:
    """Return the operations of a decode step's attention.

    Queries [B, K, R, H] meet caches of C tokens: [B, K, C, H], or [B, K, H, C] in memory order.
    """
    B, K, R, _ = kernel.shapes[0].dims
    cache_sizes = [math.prod(dims) for dims in four_dims if dims[:2] == (B, K)]
    return 4.0 * R * max(cache_sizes)


def _splash_flops(
    kernel: Instruction,
    multiplied: list[tuple[int, ...]],
    attended: AttendedShare,
) -> float | None:
    """Return the operations of a Splash attention kernel, or None if its kind is not known."""
    num_products = _splash_products(kernel.name)
    arrays = [dims for dims in multiplied if len(dims) >= 3]
    if num_products is None or len(arrays) < 2:
        return None
    queries = arrays[0]
    keys = arrays[1]
    *_, T, H = queries
    *_, S, _ = keys
    num_heads = math.prod(queries[:-2])  # of all rows
    block = T
    found = re.search(r'block_q(?:_\w+)?\\*": (\d+)', kernel.attributes)
    if found:
        block = min(int(found[1]), T)
    whole = 2.0 * num_products * num_heads * T * S * H
    return whole * attended(T, S, block)


def _splash_products(kernel_name: str) -> int | None:
    """Return the number of matrix multiplications of a Splash kernel, or None if its kind is not known."""
    for kind, number in SPLASH_PRODUCTS.items():
        if kind in kernel_name:
            return number
    return None
