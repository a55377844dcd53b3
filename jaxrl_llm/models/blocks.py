"""The form of a transformer block: two slots, the mixer and the MLP, and the scan over layers.

    h = x + post_norm(mixer(norm(x)))
    y = h + post_norm(mlp(norm(h)))

A mixer lets a token read earlier tokens of its row: attention or the gated delta rule. An MLP computes each token by
itself: one dense MLP or experts. A new mixer or MLP is one module with the functions of ``Mixer`` or ``Mlp``, and one
entry in ``mixers.MIXERS`` or ``mlps.MLPS``.

Owns: the interface of the two slots, a block's norms, the scan over layers of several kinds.
Does not know: the computation of any mixer or MLP.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models.architecture import Architecture, Layer
from jaxrl_llm.models.attention import Cache, Groups, Prompt
from jaxrl_llm.models.kernels.learner import Units
from jaxrl_llm.ops.packing import Line


class Parameter(NamedTuple):
    """Form of one parameter of a block, without the layer axis."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]  # logical axes
    constant: float | None = None  # initial value of all elements; None = random


class LayerParameters(Protocol):
    """The parameters of one layer, with the settings of the forward pass that reads them."""

    @property
    def arch(self) -> Architecture: ...

    @property
    def lora(self) -> LoraConfig: ...

    @property
    def implementation(self) -> str:
        """Implementation of attention: "xla", or a kernel of ``kernels.choose``."""
        ...

    @property
    def rounding(self) -> str:
        """Kind that matrices are rounded to, unless they were published rounded (``quantised.KINDS``)."""
        ...

    @property
    def rules(self) -> dict[str, Any]:
        """Sharding rules of the weights: ``sharding.RULES`` with overrides."""
        ...

    @property
    def is_published(self) -> bool:
        """Whether the weights have the sampler's layout and sharding."""
        ...

    def weight(self, name: str) -> jax.Array:
        """Return a parameter."""
        ...

    def norm(self, x: jax.Array, name: str) -> jax.Array:
        """Return RMSNorm of x. If the layer has no such norm, return x."""
        ...

    def project(self, x_BTI: jax.Array, name: str) -> jax.Array:
        """Return the product of x and a matrix, with its adapters and its bias, [B,T,O]."""
        ...


# Rule that defines which tokens a token reads; None = all earlier tokens of its row.
Visible = jax.Array | Groups | Units | Line | None
States = tuple[Any, Any]  # keys and values of the new tokens, the updated cache, or two recurrent states


@dataclasses.dataclass(frozen=True)
class MixerInputs:
    """Inputs of a mixer besides the activations and the parameters.

    Attributes:
        layer: kind of the layer.
        positions: [B,T] i32 position of each token in its row.
        rope: cosines and sines of the layer's rope; None = no rope.
        visible: rule that defines the past of each token; None = all tokens before it.
        visible_in_window: the same rule as attention's implementation expects it for the window of this layer.
        length: [B] i32 number of tokens after which recurrent states are returned; None = all.
        prompt: keys and values (or states) of the rows' prompts in this layer; None = there are none.
        cache: keys and values (or states) of the rows' earlier tokens in this layer. Only for a decode step.
    """

    layer: Layer
    positions: jax.Array
    rope: tuple[jax.Array, jax.Array] | None = None
    visible: Visible = None
    visible_in_window: Any = None
    length: jax.Array | None = None
    prompt: Prompt | None = None
    cache: Cache | None = None


class CacheSizes(NamedTuple):
    """Sizes of the sampler's caches."""

    slots: int
    prompts: int
    prompt_width: int
    completion: int  # most tokens of a completion
    implementation: str  # implementation of attention, as in ``kernels.choose``
    dtype: Any
    spare: int = 0  # further cache positions per slot


class Mixer(Protocol):
    """Functions of a module that implements a mixer."""

    def parameters(self, arch: Architecture) -> Iterator[Parameter]:
        """Yield the mixer's parameters. An architecture without this mixer may yield none."""
        ...

    def apply(self, x_BTD: jax.Array, parameters: LayerParameters, inputs: MixerInputs) -> tuple[jax.Array, States]:
        """Mix whole rows or prompts (learner, prefill). Return [B,T,D], and keys and values or states."""
        ...

    def apply_next(
        self, x_B1D: jax.Array, parameters: LayerParameters, inputs: MixerInputs
    ) -> tuple[jax.Array, States]:
        """Mix one new token per row (decode step). Return [B,1,D] and the updated cache."""
        ...

    def empty_cache(self, arch: Architecture, layer: Layer, sizes: CacheSizes) -> States:
        """Return the empty cache of all decode slots."""
        ...

    def empty_prompts(self, arch: Architecture, layer: Layer, sizes: CacheSizes) -> States:
        """Return empty keys and values, or states, of all prompts."""
        ...

    def begin(self, cache: Any, prompts: Any, entry_MZ: jax.Array, takes_MZ: jax.Array) -> Any:
        """Return one part of the slots' cache when slots start new rows (``mixers.begin``)."""
        ...


@flax.struct.dataclass
class Routing:
    """Expert choices to replay, and the batch's expert counts for the balance cost."""

    chosen: jax.Array | None = None  # [B,T,layers*k] experts to use, or [B,T,k] of one layer; None = the k likeliest
    counts: jax.Array | None = None  # [layers,E] f32 ``moe.counts`` of the batch; None = compute no balance cost


class Mlp(Protocol):
    """Functions of a module that implements an MLP."""

    def parameters(self, arch: Architecture) -> Iterator[Parameter]:
        """Yield the MLP's parameters."""
        ...

    def apply(
        self, x_BTD: jax.Array, parameters: LayerParameters, routing: Routing
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Return the output [B,T,D], and further results for each token.

        Args:
            routing: expert choices of this layer.
        """
        ...


def norms(arch: Architecture) -> Iterator[Parameter]:
    """Yield the norms around the two slots."""
    one = 1.0 - arch.norm_offset
    for slot in ("attention", "mlp"):
        if arch.pre_norm:
            yield Parameter(f"{slot}_norm", (arch.width,), ("activation",), one)
        if arch.post_norm:
            yield Parameter(f"{slot}_post_norm", (arch.width,), ("activation",), one)


def transpose(w: jax.Array) -> jax.Array:
    """Transpose the last two dimensions of an array. A vector is unchanged."""
    return w.mT if w.ndim > 1 else w


def transposed(dims: Sequence[Any]) -> tuple[Any, ...]:
    """Return per-dimension entries, such as a shape or logical axes, in the order after ``transpose``."""
    return (*dims[:-2], *reversed(dims[-2:]))


Block = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


def scan(blocks: dict[Layer, Block], by_layer: tuple[Layer, ...], x: jax.Array, stacked: Any) -> tuple[jax.Array, Any]:
    """Run the layers one after the other by ``lax.scan``, also if the layers are of several kinds.

    One step of the scan runs one period of the pattern of kinds. The kind at each place of a step is therefore static,
    and the program is only as long as one period. Layers after the last whole period run after the scan.

    Args:
        blocks: for each kind, (x, inputs of this layer) -> (x, outputs of this layer).
        by_layer: the kind of each layer.
        stacked: inputs of all layers, with a leading layer axis. The first entry is a dict of parameters. A parameter
            is stacked only over the layers that have it (``Layer.has``); the other layers receive None.

    Returns:
        x, and the stacked outputs of the layers.
    """
    if len(blocks) == 1:
        (block,) = blocks.values()
        return jax.lax.scan(block, x, stacked)
    period = _period(by_layer)
    steps, num_last = divmod(len(by_layer), period)
    kinds_of_step = by_layer[:period]
    last_kinds = by_layer[len(by_layer) - num_last :]
    leaves, tree = jax.tree_util.tree_flatten_with_path(stacked)
    names = [_parameter_name(path) for path, _ in leaves]

    def run(x: jax.Array, inputs: list[Any], kinds: tuple[Layer, ...]) -> tuple[jax.Array, Any]:
        """Run layers of these kinds. Each leaf of ``inputs`` is stacked over the layers that have it."""
        parts = [iter(()) if a is None else iter(_split(a, (1,) * len(a))) for a in inputs]
        outputs = []
        for kind in kinds:
            layer_leaves = []
            for name, part in zip(names, parts, strict=True):
                leaf = None
                if kind.has(name):
                    a = next(part)
                    leaf = a.reshape(a.shape[1:])
                layer_leaves.append(leaf)
            x, new = blocks[kind](x, tree.unflatten(layer_leaves))
            outputs.append(new)
        return x, jax.tree.map(lambda *a: jnp.stack(a), *outputs)

    scanned = []
    last = []
    for name, (_, a) in zip(names, leaves, strict=True):
        num_last_parts = sum(kind.has(name) for kind in last_kinds)
        last_part = None
        if num_last_parts:
            a, last_part = _split(a, (len(a) - num_last_parts, num_last_parts))
        scanned.append(a.reshape(steps, -1, *a.shape[1:]))
        last.append(last_part)
    x, outputs = jax.lax.scan(functools.partial(run, kinds=kinds_of_step), x, scanned)
    outputs = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs)
    if num_last:
        x, last_outputs = run(x, last, last_kinds)
        outputs = jax.tree.map(lambda *a: jnp.concatenate(a), outputs, last_outputs)
    return x, outputs


def _period(by_layer: tuple[Layer, ...]) -> int:
    """Return the smallest number of layers after which the pattern of kinds repeats."""
    sizes = range(1, len(by_layer) + 1)
    return next(size for size in sizes if by_layer[size:] == by_layer[:-size])


def _parameter_name(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf of the parameters, which are the first of a layer's inputs; "" for other inputs."""
    is_parameter = path[:1] == (jax.tree_util.SequenceKey(0),)
    return path[1].key if is_parameter else ""


def _split(a: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """Split an array along the layer axis.

    Do not use slices, because their gradients cannot be added to the refs in which the learner sums gradients.
    """
    return list(jax.lax.split(a, sizes, 0))
