"""Mixtures of experts in files: keys of config.json, tensor names, and tensors that hold all experts of a layer.

``layout`` reads one tensor per expert, and most families store one tensor per expert. GPT-OSS stores all experts of a
layer in one tensor:

    experts.gate_up_proj [E,D,2F], bias [E,2F]     outputs of gate and up alternate
    experts.down_proj    [E,F,D],  bias [E,D]

GPT-OSS was released in MXFP4. Two tensors replace each matrix [E,I,O]:

    blocks [E,O,I/32,16]    bytes with two 4-bit numbers each, the first in the lower half
    scales [E,O,I/32]       one byte s for 32 numbers: x = 2^(s - 127) FP4[bits]

Qwen3.5 was released with experts.gate_up_proj [E,2F,D], all rows of gate and then all of up, and experts.down_proj
[E,D,F].

Source: OCP Microscaling Formats 1.0, 5.3 and 6.3; transformers' integrations/mxfp4.py.
Letters: E experts, O outputs, I inputs, D width, F ffn.
Owns: keys and names of mixtures, access to single experts in tensors of all experts. Does not know: other families,
any computation.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.dense_mlp import GLU_ALPHA

_LAYER = "model.layers.{layer}."
QWEN3_MOE_KEYS = {
    **dict(num_key_value_heads=4, max_position_embeddings=32768, attention_bias=False),
    **dict(sliding_window=4096, use_sliding_window=False, max_window_layers=28),
    **dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=False),
    **dict(decoder_sparse_step=1, mlp_only_layers=None, num_local_experts=None),
}
MIXTRAL_KEYS = {
    **dict(num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e6),
    **dict(sliding_window=None, num_experts_per_tok=2, num_local_experts=8),
}
_YARN = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
_YARN |= {"original_max_position_embeddings": 4096}
GPT_OSS_KEYS = {
    **dict(num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=150000.0),
    **dict(sliding_window=128, attention_bias=True, rope_parameters=_YARN),
    **dict(num_local_experts=128, num_experts_per_tok=4, swiglu_alpha=GLU_ALPHA, swiglu_limit=7.0),
    **dict(initial_context_length=None, experts_per_token=None),  # transformers reads neither
    "quantization_config": None,
}
GPT_OSS_ONLY = {"swiglu_alpha": (GLU_ALPHA,), "hidden_act": ("silu",)}

# Value of each float4 code: a sign bit, two exponent bits, one mantissa bit.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])
PER_SCALE = 32


def sizes(get: Callable[[str], Any]) -> dict[str, Any]:
    """Return the number of experts, and the number of experts per token."""
    return {"num_experts": get("num_experts", most=32767), "experts_per_token": get("num_experts_per_tok")}


def names(block: str, *stored: str, router: str = "gate") -> dict[str, str]:
    """Return tensor names of the router and of the experts' matrices, with one tensor per expert.

    Args:
        block: the part of the name between layer and router.
        stored: the names of gate, up and down in files.
        router: the name of the router in files.
    """
    found = {}
    for kind, end in (("weight", ""), ("bias", "_bias")):
        found[f"blocks.router{end}"] = f"{_LAYER}{block}{router}.{kind}"
        for name, of in zip(("gate", "up", "down"), stored, strict=True):
            found[f"blocks.experts_{name}{end}"] = f"{_LAYER}{block}experts.{{expert}}.{of}.{kind}"
    return found


def check_quantisation(path: Any, given: Any) -> None:
    """Raise a ``ConfigError`` if ``quantization_config`` in the config.json ``path`` is set and is not MXFP4."""
    if given not in (None, False) and (not isinstance(given, dict) or given.get("quant_method") != "mxfp4"):
        known = "supported: quant_method 'mxfp4'"
        raise ConfigError(f"{path}: quantization_config={given!r:.60} is not supported; {known}")


_TOGETHER = re.compile(r"(.*\.experts\.)(gate_up|down)_proj(|_bias|_blocks|_scales)")
_APART = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_DIMS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}  # number of dimensions of a tensor of all experts
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}


def is_code(name: str) -> bool:
    """Return whether a tensor holds bytes of MXFP4."""
    return name.endswith(("_proj_blocks", "_proj_scales"))


def decoded(blocks_OGb: np.ndarray, scales_OG: np.ndarray) -> np.ndarray:
    """Decode MXFP4 blocks [O,G,16] and scales [O,G] to float32 [O,32 G]."""
    bits = np.stack([blocks_OGb & 15, blocks_OGb >> 4], axis=-1).reshape(*scales_OG.shape, PER_SCALE)
    with np.errstate(over="ignore"):  # a scale of 255 means NaN, and numbers can overflow
        return np.ldexp(FP4[bits], scales_OG.astype(np.int32)[..., None] - 127).reshape(len(scales_OG), -1)


class Apart:
    """A view of a folder's tensors (``layout.TensorFile``) with one tensor per expert.

    Args:
        in_halves: True: tensors of all experts have Qwen3.5's form. False: they have GPT-OSS's form.

    Raises:
        ConfigError: the shape of an experts' tensor is not valid.
    """

    def __init__(self, file: Any, *, in_halves: bool = False):
        self.path, self.modified_ns, self._file, self._in_halves = file.path, file.modified_ns, file, in_halves
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[Any, ...]] = {}  # stored name, its kind, expert, part, number of parts
        for name, shape in file.shapes.items():
            if found := _TOGETHER.fullmatch(name):
                self._add(name, shape, *found.groups())
            else:
                self.shapes[name] = shape

    def _add(self, name: str, shape: tuple[int, ...], block: str, matrix: str, kind: str) -> None:
        parts, other = _PARTS[matrix], name.removesuffix(kind) + "_scales"
        outputs = shape[1 if kind or self._in_halves else 2] if len(shape) == _DIMS[kind] else 0
        if not outputs or outputs % len(parts) or (kind == "_blocks" and shape[3] != PER_SCALE // 2):
            raise ConfigError(f"{self.path}: tensor {name} has shape {shape}, which experts' matrices have not")
        if kind == "_scales":
            return
        if kind == "_blocks" and self._file.shapes.get(other) != shape[:3]:
            raise ConfigError(f"{self.path}: tensor {other} is missing, or its shape is not {shape[:3]}")
        inputs = {"": (shape[2 if self._in_halves else 1],), "_bias": (), "_blocks": (PER_SCALE * shape[-2],)}[kind]
        for expert, (i, part) in itertools.product(range(shape[0]), enumerate(parts)):
            own = f"{block}{expert}.{part}_proj.{'bias' if kind == '_bias' else 'weight'}"
            self.shapes[own] = (outputs // len(parts), *inputs)
            self._places[own] = (name, kind, expert, i, len(parts))

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        if name not in self._places:
            return self._file.read(name, index)
        (stored, kind, expert, i, step), (outputs, *inputs) = self._places[name], index
        of_expert = slice(expert, expert + 1)
        if self._in_halves:
            first = i * self.shapes[name][0]
            return self._file.read(stored, (of_expert, slice(first + outputs.start, first + outputs.stop), *inputs))[0]
        rows = slice(step * outputs.start, step * outputs.stop)
        if kind == "_blocks":
            first, last = inputs[0].start // PER_SCALE, -(-inputs[0].stop // PER_SCALE)
            at = (of_expert, rows, slice(first, last))
            scales = self._file.read(stored.removesuffix(kind) + "_scales", at)[0, i::step]
            whole = decoded(self._file.read(stored, (*at, slice(None)))[0, i::step], scales)
            return whole[:, inputs[0].start - PER_SCALE * first :][:, : inputs[0].stop - inputs[0].start]
        read = self._file.read(stored, (of_expert, *inputs, rows))[0]
        return read.T[i::step]


def name_together(name: str) -> str:
    """Return the name of the tensor of all experts that contains an expert's tensor. Other names are unchanged."""
    if not (apart := _APART.fullmatch(name)):
        return name
    block, _, part, kind = apart.groups()
    return f"{block}{'down' if part == 'down' else 'gate_up'}_proj{'_bias' if kind == 'bias' else ''}"


def together(tensors: Iterable[Any], *, is_together: bool) -> Iterator[Any]:
    """Yield the tensors (``layout.Stored``) with all experts of a layer joined in one tensor.

    Args:
        is_together: False: yield the tensors unchanged.
    """
    found: dict[str, dict[tuple[int, str], Any]] = {}
    for name, shape, fetch in tensors:
        apart = _APART.fullmatch(name) if is_together else None
        if not apart:
            yield name, shape, fetch
            continue
        _, expert, part, _ = apart.groups()
        found.setdefault(name_together(name), {})[int(expert), part] = (shape, fetch)
    for name, of in found.items():
        parts = _PARTS["gate_up" if "gate_up" in name else "down"]
        shape, _ = next(iter(of.values()))
        num_experts = len(of) // len(parts)
        yield name, (num_experts, *shape[1:], len(parts) * shape[0]), functools.partial(_joined, of, parts, num_experts)


def _joined(of: dict[tuple[int, str], Any], parts: tuple[str, ...], num_experts: int) -> np.ndarray:
    each = [[of[expert, part][1]() for expert in range(num_experts)] for part in parts]  # [parts,E,O,...]
    out = np.moveaxis(np.asarray(each), 0, 2)  # [E,O,parts,...]
    return np.ascontiguousarray(out.reshape(num_experts, -1, *out.shape[3:]).swapaxes(1, -1))
