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
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.dense_mlp import GLU_ALPHA

_LAYER = "model.layers.{layer}."
QWEN3_MOE_KEYS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "num_local_experts": None,
}
MIXTRAL_KEYS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS_KEYS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "attention_bias": True,
    "rope_parameters": _YARN,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": GLU_ALPHA,
    "swiglu_limit": 7.0,
    # transformers does not read these two keys.
    "initial_context_length": None,
    "experts_per_token": None,
    "quantization_config": None,
}
GPT_OSS_ONLY = {"swiglu_alpha": (GLU_ALPHA,), "hidden_act": ("silu",)}

# Value of each float4 code: a sign bit, two exponent bits, one mantissa bit.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])
PER_SCALE = 32


def sizes(get: Callable[..., Any]) -> dict[str, Any]:
    """Return the number of experts, and the number of experts per token."""
    return {
        "num_experts": get("num_experts", most=32767),
        "experts_per_token": get("num_experts_per_tok"),
    }


def names(block: str, *stored: str, router: str = "gate") -> dict[str, str]:
    """Return tensor names of the router and of the experts' matrices, with one tensor per expert.

    Args:
        block: the part of the name between layer and router.
        stored: the names of gate, up and down in files.
        router: the name of the router in files.
    """
    tensor_names = {}
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        tensor_names[f"blocks.router{suffix}"] = f"{_LAYER}{block}{router}.{kind}"
        for name, stored_name in zip(("gate", "up", "down"), stored, strict=True):
            path = f"blocks.experts_{name}{suffix}"
            tensor_names[path] = f"{_LAYER}{block}experts.{{expert}}.{stored_name}.{kind}"
    return tensor_names


def check_quantisation(path: Any, settings: Any) -> None:
    """Raise a ``ConfigError`` if ``quantization_config`` in the config.json ``path`` is set and is not MXFP4."""
    if settings in (None, False):
        return
    if not isinstance(settings, dict) or settings.get("quant_method") != "mxfp4":
        raise ConfigError(
            f"{path}: quantization_config={settings!r:.60} is not supported; supported: quant_method 'mxfp4'"
        )


_TOGETHER = re.compile(r"(.*\.experts\.)(gate_up|down)_proj(|_bias|_blocks|_scales)")
_APART = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_DIMS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}  # number of dimensions of a tensor of all experts
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}


def is_code(name: str) -> bool:
    """Return whether a tensor holds bytes of MXFP4."""
    return name.endswith(("_proj_blocks", "_proj_scales"))


def decoded(blocks_OGb: np.ndarray, scales_OG: np.ndarray) -> np.ndarray:
    """Decode MXFP4 blocks [O,G,16] and scales [O,G] to float32 [O,32 G]."""
    halves = np.stack([blocks_OGb & 15, blocks_OGb >> 4], axis=-1)
    codes = halves.reshape(*scales_OG.shape, PER_SCALE)
    exponents = scales_OG.astype(np.int32)[..., None] - 127
    with np.errstate(over="ignore"):  # a scale of 255 means NaN, and numbers can overflow
        values = np.ldexp(FP4[codes], exponents)
    return values.reshape(len(scales_OG), -1)


class _ExpertPlace(NamedTuple):
    """Place of one expert's tensor in a folder."""

    stored_name: str
    kind: str  # suffix of the stored tensor's name
    expert: int
    part: int  # index among the matrices that the stored tensor holds
    num_parts: int


class Apart:
    """A view of a folder's tensors (``layout.TensorFile``) with one tensor per expert.

    Args:
        in_halves: True: tensors of all experts have Qwen3.5's form. False: they have GPT-OSS's form.

    Raises:
        ConfigError: the shape of an experts' tensor is not valid.
    """

    def __init__(self, file: Any, *, in_halves: bool = False):
        self.path = file.path
        self.modified_ns = file.modified_ns
        self._file = file
        self._in_halves = in_halves
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, _ExpertPlace] = {}
        for name, shape in file.shapes.items():
            match = _TOGETHER.fullmatch(name)
            if match is None:
                self.shapes[name] = shape
            else:
                block, matrix, kind = match.groups()
                self._add(name, shape, block, matrix, kind)

    def _add(self, name: str, shape: tuple[int, ...], block: str, matrix: str, kind: str) -> None:
        """Add the experts' tensors of one stored tensor.

        Args:
            block, matrix, kind: the groups of ``_TOGETHER`` in its name.
        """
        parts = _PARTS[matrix]
        num_outputs = 0
        if len(shape) == _DIMS[kind]:
            num_outputs = shape[1 if kind or self._in_halves else 2]
        has_whole_blocks = kind != "_blocks" or num_outputs == 0 or shape[3] == PER_SCALE // 2
        if num_outputs == 0 or num_outputs % len(parts) or not has_whole_blocks:
            raise ConfigError(
                f"{self.path}: tensor {name} has shape {shape}, which is not a shape of experts' matrices"
            )
        if kind == "_scales":
            return
        input_shape: tuple[int, ...]
        if kind == "_blocks":
            scales_name = name.removesuffix(kind) + "_scales"
            if self._file.shapes.get(scales_name) != shape[:3]:
                raise ConfigError(f"{self.path}: tensor {scales_name} is missing, or its shape is not {shape[:3]}")
            input_shape = (PER_SCALE * shape[-2],)
        elif kind == "_bias":
            input_shape = ()
        else:
            input_shape = (shape[2 if self._in_halves else 1],)
        suffix = "bias" if kind == "_bias" else "weight"
        for expert in range(shape[0]):
            for i, part in enumerate(parts):
                expert_name = f"{block}{expert}.{part}_proj.{suffix}"
                self.shapes[expert_name] = (num_outputs // len(parts), *input_shape)
                self._places[expert_name] = _ExpertPlace(name, kind, expert, i, len(parts))

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of one tensor in float32."""
        if name not in self._places:
            return self._file.read(name, index)
        place = self._places[name]
        outputs, *inputs = index
        expert = slice(place.expert, place.expert + 1)
        if self._in_halves:
            first = place.part * self.shapes[name][0]
            rows = slice(first + outputs.start, first + outputs.stop)
            return self._file.read(place.stored_name, (expert, rows, *inputs))[0]
        rows = slice(place.num_parts * outputs.start, place.num_parts * outputs.stop)
        if place.kind == "_blocks":
            return self._read_codes(place, expert, rows, inputs[0])
        stored = self._file.read(place.stored_name, (expert, *inputs, rows))[0]
        return stored.T[place.part :: place.num_parts]

    def _read_codes(self, place: _ExpertPlace, expert: slice, rows: slice, inputs: slice) -> np.ndarray:
        """Return a part of one matrix that is stored in MXFP4."""
        first_scale = inputs.start // PER_SCALE
        stop_scale = -(-inputs.stop // PER_SCALE)
        index = (expert, rows, slice(first_scale, stop_scale))
        part_rows = slice(place.part, None, place.num_parts)
        scales_name = place.stored_name.removesuffix(place.kind) + "_scales"
        scales = self._file.read(scales_name, index)
        blocks = self._file.read(place.stored_name, (*index, slice(None)))
        values = decoded(blocks[0, part_rows], scales[0, part_rows])
        num_skipped = PER_SCALE * first_scale
        return values[:, inputs.start - num_skipped : inputs.stop - num_skipped]


def name_together(name: str) -> str:
    """Return the name of the tensor of all experts that contains an expert's tensor. Other names are unchanged."""
    match = _APART.fullmatch(name)
    if match is None:
        return name
    block, _, part, kind = match.groups()
    matrix = "down" if part == "down" else "gate_up"
    suffix = "_bias" if kind == "bias" else ""
    return f"{block}{matrix}_proj{suffix}"


def together(tensors: Iterable[Any], *, is_together: bool) -> Iterator[Any]:
    """Yield the tensors (``layout.Stored``) with all experts of a layer joined in one tensor.

    Args:
        is_together: False: yield the tensors unchanged.
    """
    joined: dict[str, ExpertTensors] = {}  # by the name of the tensor of all experts
    for name, shape, fetch in tensors:
        match = _APART.fullmatch(name) if is_together else None
        if match is None:
            yield name, shape, fetch
            continue
        _, expert, part, _ = match.groups()
        joined.setdefault(name_together(name), {})[int(expert), part] = (shape, fetch)
    for name, expert_tensors in joined.items():
        parts = _PARTS["gate_up" if "gate_up" in name else "down"]
        first_shape, _ = next(iter(expert_tensors.values()))
        num_outputs, *input_shape = first_shape
        num_experts = len(expert_tensors) // len(parts)
        shape = (num_experts, *input_shape, len(parts) * num_outputs)
        yield name, shape, functools.partial(_join, expert_tensors, parts, num_experts)


ExpertTensors = dict[tuple[int, str], tuple[tuple[int, ...], Callable[[], np.ndarray]]]  # (expert, part): shape, fetch


def _join(expert_tensors: ExpertTensors, parts: tuple[str, ...], num_experts: int) -> np.ndarray:
    """Fetch the tensors of all experts, and return them as one tensor in GPT-OSS's form."""
    by_part = []  # [parts,E,O,...]
    for part in parts:
        by_part.append([expert_tensors[expert, part][1]() for expert in range(num_experts)])
    out = np.moveaxis(np.asarray(by_part), 0, 2)  # [E,O,parts,...]
    outputs_first = out.reshape(num_experts, -1, *out.shape[3:])
    return np.ascontiguousarray(outputs_first.swapaxes(1, -1))
