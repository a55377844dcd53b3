"""Mixture of experts: a router sends each token to k of E gated MLPs and sums their outputs by its probabilities.

    p = softmax(W_r x) in float32;  y = sum over the k likeliest experts e of p_e MLP_e(x)

Some families normalise the k probabilities to a sum of 1, or have biases. A shared expert adds sigmoid(w_s x) MLP_s(x)
for every token. Routing is dropless: each expert computes all tokens that choose it. Tokens are sorted by expert, and a
grouped matmul computes all experts. Experts are sharded over the mesh axis ``expert``, which splits rows outside MLPs:

    all-gather        each device receives the rows of the other devices
    grouped matmul    each device adds the outputs of its own experts
    reduce-scatter    each device receives the sums of its own rows

Routing replay (R3, arXiv:2510.11370) reuses the experts that the sampler chose, with probabilities of the current
weights. The balance cost is the auxiliary loss of Switch Transformers, as transformers computes it: E sum_e f_e P_e.
f_e is k times expert e's share of all choices, over all tokens and layers. P_e is the expert's mean probability.

Letters: B rows, T tokens, D width, F an expert's ffn, E experts, k experts of a token, X = B T, A = X k choices.
Owns: the experts' parameters, the split of their computation over devices. Does not know: files, losses, samplers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.megablox import ops as megablox

from jaxrl_llm.config import Config, ConfigError, LoraConfig
from jaxrl_llm.models import dense_mlp, quantised
from jaxrl_llm.models import lora as adapters
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.blocks import LayerParameters, Parameter, Routing
from jaxrl_llm.ops import packing
from jaxrl_llm.ops.logp import completion_window
from jaxrl_llm.runtime import sharding

_AXES = {
    "experts_gate": ("expert", "mlp", "embed"),
    "experts_up": ("expert", "mlp", "embed"),
    "experts_down": ("expert", "embed", "mlp"),
}


def check(config: Config, arch: Architecture, mesh: Any, who: str) -> None:
    """Check that the mesh fits the experts, and that settings about experts are used only with experts.

    Args:
        mesh: the learner's or the sampler's.
        who: "model" or "reference", for error messages. Settings that need experts require them only in the model.

    Raises:
        ConfigError: the mesh or a setting does not fit.
    """
    n, E = mesh.shape["expert"], arch.num_experts
    if E % n:
        fit = ", ".join(str(d) for d in range(1, E + 1) if E % d == 0)
        raise ConfigError(f"mesh.expert={n} must divide the {who}'s {E} experts: one of {fit}")
    is_learner = all(mesh.shape[axis] == getattr(config.mesh, axis) for axis in ("context", "tensor"))
    rules = sharding.RULES | dict(sharding.rules_of(config.mesh)) | ({} if is_learner else sharding.OF_SAMPLER)
    lies = {
        name: sharding.axes_of(sharding.partition_spec(size, axes, mesh, rules)[axes.index("mlp")])
        for name, size, axes, _ in (parameters(arch) if E else ())
        if name in _AXES
    }
    # The devices that share an expert's ffn sum their outputs. They must hold the same rows, and the same parts of the
    # ffn in all three matrices.
    if len({*lies.values()}) > 1 or any({*axes} & {*sharding.TOKEN_AXES} for axes in lies.values()):
        where = ", ".join(f"of {name} on {' and '.join(axes) or 'none'}" for name, axes in lies.items())
        raise ConfigError(
            f"mesh.rules={config.mesh.rules!r} must lay `mlp` of the {who}'s experts on `tensor`, or none, and in all "
            f"three matrices on the same; it lies {where}"
        )
    if config.model.routing_replay and config.external.groups_per_iteration:
        others = f"external.groups_per_iteration={config.external.groups_per_iteration}"
        raise ConfigError(f"model.routing_replay=True must be False with {others}: nobody noted the experts of others")
    for name, value, otherwise in (
        ("model.routing_replay", config.model.routing_replay, False),
        ("update.load_balance", config.update.load_balance, 0.0),
    ):
        if value and not E and who == "model":
            raise ConfigError(f"{name}={value!r} must be {otherwise!r}: the model has no experts")


def parameters(arch: Architecture) -> Iterator[Parameter]:
    """Yield the parameters of a block's router, experts and shared expert: matrices, then biases.

    Raises:
        ConfigError: the number of experts per token is not between 1 and the number of experts.
    """
    E, D, F, k = arch.num_experts, arch.width, arch.ffn, arch.experts_per_token
    if not 1 <= k <= E:
        raise ConfigError(f"a model of {E} experts, {k} for each token (num_experts_per_tok): must be from 1 to {E}")
    yield Parameter("router", (E, D), ("activation", "embed"))
    yield Parameter("experts_gate", (E, F, D), _AXES["experts_gate"])
    yield Parameter("experts_up", (E, F, D), _AXES["experts_up"])
    yield Parameter("experts_down", (E, D, F), _AXES["experts_down"])
    if arch.shared_ffn:
        yield from dense_mlp.matrices(D, arch.shared_ffn, prefix="shared_")
        yield Parameter("shared_router", (1, D), ("activation", "embed"))
    if arch.experts_bias:
        yield Parameter("router_bias", (E,), ("activation",), 0.0)
        yield Parameter("experts_gate_bias", (E, F), ("expert", "mlp"), 0.0)
        yield Parameter("experts_up_bias", (E, F), ("expert", "mlp"), 0.0)
        yield Parameter("experts_down_bias", (E, D), ("activation",) * 2, 0.0)


def id_dtype(arch: Architecture) -> Any:
    """Return the smallest integer dtype that can hold an expert's number."""
    return jnp.uint8 if arch.num_experts <= 256 else jnp.int16


def by_layer(routing: Routing | None, num_layers: int) -> jax.Array | None:
    """Return the experts to replay, by layer, [layers,B,T,k]; None = there is nothing to replay."""
    if routing is None or routing.chosen is None:
        return None
    B, T, _ = routing.chosen.shape
    return jnp.moveaxis(routing.chosen.reshape(B, T, num_layers, -1), 2, 0)


def apply(x_BTD: jax.Array, parameters: LayerParameters, routing: Routing) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the output of one layer's experts, and the routing results of ``mlp``."""
    arch = parameters.arch
    if parameters.implementation == "splash":  # on a TPU, with kernels enabled
        grouped = functools.partial(grouped_by_kernel, turned=parameters.is_published)
    else:
        grouped = _grouped_by_xla
    return mlp(
        x_BTD,
        parameters.weight,
        functools.partial(dense_mlp.compute, parameters=parameters),
        chosen=routing.chosen,
        load=None if routing.counts is None else _load(routing.counts, arch),
        arch=arch,
        lora=parameters.lora,
        rules=parameters.rules,
        grouped=grouped,
        rounded=parameters.rounding,
    )


def _grouped_by_xla(rows_AI: jax.Array, w_EOI: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(rows_AI, w_EOI.mT, sizes_E)


def by_token(hidden: jax.Array, made: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    """Return the results of ``Model.forward`` by token, without keys and values.

    Args:
        hidden, made: the two results of ``Model.forward``.

    Returns:
        The hidden states. With experts, also the chosen experts [B,T,layers*k]. If balance costs were computed, also
        their means over the layers, [B,T,1] f32.
    """
    if len(made) == 2:  # keys and values
        return (hidden,)
    chosen, *cost = (jnp.stack(x) if isinstance(x, tuple) else x for x in made[2:])
    chosen = jnp.moveaxis(chosen, 0, 2)
    return (hidden, chosen.reshape(*chosen.shape[:2], -1), *(jnp.mean(x, axis=0)[..., None] for x in cost))


def in_lines(
    routing: Routing | None, prompt_length: jax.Array, length: jax.Array, *, width: int, group_size: int
) -> Routing | None:
    """Return the routing of rows [n,K,S,m] in packed lines [n,W,m], in the order of ``packing.lay``."""
    if routing is None or routing.chosen is None:
        return routing
    n, K, S, m = routing.chosen.shape
    number = jnp.broadcast_to(jnp.arange(K * S, dtype=jnp.int32).reshape(1, K, S), (n, K, S))
    at = packing.lay(number, prompt_length, length, width=width, group_size=group_size).tokens[:, :, None]
    return routing.replace(chosen=jnp.take_along_axis(routing.chosen.reshape(n, K * S, m), at, axis=1))


def of_groups(
    routing: Routing | None, prompt_length: jax.Array, *, completion_width: int, group_size: int
) -> Routing | None:
    """Return the routing of rows [B,S,m] by whole groups, prompt ++ completions: [B/G,L+G*C,m]."""
    if routing is None or routing.chosen is None:
        return routing
    B, S, m = routing.chosen.shape
    prompts = routing.chosen.reshape(B // group_size, group_size, S, m)[:, 0, : S - completion_width]
    completions = completion_window(routing.chosen, prompt_length, completion_width)
    return routing.replace(chosen=jnp.concatenate([prompts, completions.reshape(len(prompts), -1, m)], axis=1))


def noted(made: tuple[Any, ...], length: jax.Array, row_width: int) -> jax.Array:
    """Return the experts that prompts chose, [P,S,layers*k], shifted right by one token.

    Each position holds the choice of the previous token. Positions without a choice hold 0.

    Args:
        made: the second result of ``Model.forward`` for the prompts [P,L].
        length: [P] i32 prompt lengths.
        row_width: S.
    """
    chosen_PLm = by_token(None, made)[1]
    chosen_PLm = jnp.where((jnp.arange(chosen_PLm.shape[1])[None] < length[:, None])[..., None], chosen_PLm, 0)
    return jnp.pad(chosen_PLm, ((0, 0), (1, row_width - chosen_PLm.shape[1] - 1), (0, 0)))


def replay(noted: jax.Array | None, counts: jax.Array | None) -> Routing:
    """Return the routing that replays the sampler's choices.

    Args:
        noted: [...,S,m] with each token, the choice of the previous token (``noted``); None = replay nothing.
        counts: ``counts`` of the batch; None = compute no balance cost.
    """
    return Routing(None if noted is None else jnp.roll(noted, -1, axis=-2), counts)


def counts(chosen: jax.Array, mask: jax.Array, arch: Architecture) -> jax.Array:
    """Return how many tokens chose each expert in each layer, [layers,E] f32.

    Args:
        chosen: [...,layers*k] experts of each token.
        mask: [...] the tokens to count.
    """
    L, E = arch.num_layers, arch.num_experts
    at = chosen.reshape(-1, L, arch.experts_per_token).astype(jnp.int32) + E * jnp.arange(L)[None, :, None]
    weight = jnp.broadcast_to(mask.reshape(-1, 1, 1).astype(jnp.float32), at.shape)
    return jnp.zeros(L * E, jnp.float32).at[at.reshape(-1)].add(weight.reshape(-1)).reshape(L, E)


def _load(counts_LE: jax.Array, arch: Architecture) -> jax.Array:
    """Return f_e [E] f32 of ``counts``. The sum of f_e is k, or 0 if nothing was counted."""
    total = jnp.sum(counts_LE)
    return arch.experts_per_token * jnp.sum(counts_LE, axis=0) / jnp.maximum(total, 1.0)


def metrics(used: dict[str, Any]) -> dict[str, float]:
    """Return metrics about the balance of the experts' loads, or {} without experts.

    Args:
        used: the sums over an iteration's updates, on the host.
    """
    if "expert_counts" not in used:
        return {}
    counts_LE, num_updates = np.asarray(used["expert_counts"], np.float64), float(used["update_count"]) or math.nan
    values = {"update/expert_balance": float(used["balance_sum"]) / num_updates} if "balance_sum" in used else {}
    share_LE = counts_LE / np.maximum(counts_LE.sum(axis=1, keepdims=True), 1.0)
    entropy_L = -np.sum(share_LE * np.log(np.where(share_LE > 0, share_LE, 1.0)), axis=1)
    E, is_any = share_LE.shape[1], counts_LE.sum() > 0
    values["update/expert_load_max"] = float(share_LE.max()) * E if is_any else math.nan
    values["update/expert_load_entropy_frac"] = float(entropy_L.mean()) / math.log(max(E, 2)) if is_any else math.nan
    return values


def sums(
    routed: tuple[jax.Array, ...], mask: jax.Array, counts_LE: jax.Array | None, arch: Architecture
) -> dict[str, jax.Array]:
    """Return "expert_counts" and "balance_sum" over the tokens of the mask [...].

    "balance_sum" is the contribution of these tokens to the batch's mean balance cost.

    Args:
        routed: results of ``by_token`` without the hidden states; () = there are no experts.
        counts_LE: ``counts`` of the whole batch; None = there are no balance costs.
    """
    found = {"expert_counts": counts(routed[0], mask, arch)} if routed else {}
    if counts_LE is not None:
        num_tokens = jnp.sum(counts_LE[0]) / arch.experts_per_token
        found["balance_sum"] = jnp.sum(jnp.where(mask, routed[1][..., 0], 0.0)) / jnp.maximum(num_tokens, 1.0)
    return found


def counts_of_batch(micros: Any, routed: Callable[[Any], Any], arch: Architecture) -> jax.Array:
    """Return ``counts`` [layers,E] of all trained tokens in the micro-batches (learner.micro_batches).

    Args:
        routed: rows -> their routing results of ``by_token``. This function runs a forward pass. It is called only if
            the sampler's choices are not in the rollout.
    """

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        rows, weights = micros.at(i)
        known = rows.rollout.columns.get("experts")
        chosen = routed(rows)[0] if known is None else known
        return total + counts(chosen, weights.policy > 0, arch)

    return jax.lax.fori_loop(0, micros.count, add, jnp.zeros((arch.num_layers, arch.num_experts), jnp.float32))


def mlp(
    x_BTD: jax.Array,
    weight: Callable[[str], jax.Array],
    dense: Callable[..., jax.Array],
    *,
    chosen: jax.Array | None,
    load: jax.Array | None,
    arch: Architecture,
    lora: LoraConfig,
    rules: dict[str, Any],
    grouped: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    rounded: str = "compute",
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the weighted sum of the chosen experts' outputs in the dtype of x, and the routing.

    Args:
        weight: name in ``parameters`` -> parameter.
        dense: (tokens, prefix=) -> output of the dense MLP whose matrices have this prefix; used for the shared expert.
        chosen: [B,T,k] experts to replay; None = the k likeliest.
        load: f_e [E] f32; None = compute no balance cost.
        lora: configuration of adapters, which experts may have.
        rules: sharding rules of the experts' weights (``sharding.RULES`` and its overrides).
        grouped: the grouped matmul: (rows [A,I] sorted by expert, weights [E,O,I], rows per expert [E]) -> [A,O].
            Rows after the last expert's rows may have any value.
        rounded: kind that matrices are rounded to here, unless they were published rounded (``quantised.KINDS``).

    Returns:
        The output [B,T,D], and a tuple. The tuple has the chosen experts [B,T,k], likeliest first unless they are
        replayed. With ``load``, it also has each token's balance cost [B,T] f32: E sum_e f_e p_e.
    """
    k, dtype = arch.experts_per_token, id_dtype(arch)
    logits_BTE = jnp.einsum(
        "BTD,ED->BTE", x_BTD.astype(jnp.float32), weight("router").astype(jnp.float32), precision="highest"
    )
    if arch.experts_bias:
        logits_BTE += weight("router_bias").astype(jnp.float32)[None, None]
    probs_BTE = jax.nn.softmax(logits_BTE, axis=-1)
    chosen_BTk = jax.lax.top_k(probs_BTE, k)[1] if chosen is None else chosen.astype(jnp.int32)
    share_BTk = jnp.take_along_axis(probs_BTE, chosen_BTk, axis=-1)
    if arch.norm_topk:
        share_BTk = share_BTk / jnp.sum(share_BTk, axis=-1, keepdims=True)
    axes_of = _of_experts(arch, lora)
    kind = lambda name: rounded if name in _AXES else "compute"
    weights = [quantised.of_experts(weight(name), x_BTD.dtype, kind(name)) for name in axes_of]
    mesh = jax.sharding.get_abstract_mesh()
    split = [jax.P()] * len(weights)
    if not (mesh.empty or mesh.size == 1):
        both = zip(weights, axes_of.values(), strict=True)
        split = [sharding.partition_spec(w.shape, axes, mesh, rules) for w, axes in both]
        # The constraint keeps the sharding. With it, gradients are values and not refs (see
        # ``sharding.gather_copies``), and a reduce-scatter gives each device its part.
        weights = [jax.lax.with_sharding_constraint(w, spec) for w, spec in zip(weights, split, strict=True)]
    of_tokens, scale = ("batch", "length"), adapters.scale(lora) if lora.rank else 0.0
    y_BTD = sharding.by_device(
        functools.partial(_by_experts, axes=axes_of, split=split, arch=arch, scale=scale, grouped=grouped),
        *(x_BTD, chosen_BTk, share_BTk, *weights),
        axes=(of_tokens, of_tokens, of_tokens, *split),
        shared=2,
    )
    if arch.experts_bias:  # added here: devices that share an expert's ffn would each add the output bias
        share_BTE = jnp.sum(jax.nn.one_hot(chosen_BTk, arch.num_experts) * share_BTk[..., None], axis=2)
        bias_ED = weight("experts_down_bias").astype(jnp.float32)
        y_BTD += jnp.einsum("BTE,ED->BTD", share_BTE, bias_ED, precision="highest").astype(y_BTD.dtype)
    if arch.shared_ffn:
        row = weight("shared_router").astype(jnp.float32)
        share_BT1 = jax.nn.sigmoid(jnp.einsum("BTD,ED->BTE", x_BTD.astype(jnp.float32), row, precision="highest"))
        y_BTD += share_BT1.astype(y_BTD.dtype) * dense(x_BTD, prefix="shared_")
    made = (chosen_BTk.astype(dtype),)
    if load is not None:
        made += (arch.num_experts * jnp.einsum("BTE,E->BT", probs_BTE, load),)
    return y_BTD, made


def _of_experts(arch: Architecture, lora: LoraConfig) -> dict[str, tuple[str, ...]]:
    """Return the logical axes, by name, of the experts' matrices, adapters and biases.

    The output bias is not included, because ``mlp`` adds it outside the experts.
    """
    own = list(parameters(arch))
    matrices = [parameter for parameter in own if parameter.name in _AXES]
    every = [*matrices, *adapters.matrices(lora, matrices), *own]
    return {parameter.name: parameter.axes for parameter in every if "expert" in parameter.axes}


def grouped_by_kernel(
    rows_AI: jax.Array, w_EOI: jax.Array, sizes_E: jax.Array, *, turned: bool, interpret: bool = False
) -> jax.Array:
    """Compute the grouped matmul by JAX's TPU kernel (megablox).

    Without this kernel, the TPU compiler would multiply every row by every expert.

    Args:
        turned: the weights are stored in memory as [E,I,O].
        interpret: run the kernel in Pallas' interpreter.
    """
    A, w = len(rows_AI), w_EOI.mT if turned else w_EOI
    rows_AI = jnp.pad(rows_AI, ((0, -A % min(512, -(-A // 128) * 128)), (0, 0)))
    return megablox.gmm(rows_AI, w, sizes_E, rows_AI.dtype, _tiles, None, None, not turned, interpret)[:A]


def _tiles(rows: int, num_in: int, num_out: int) -> tuple[int, int, int]:
    """Return the kernel's tile sizes for a grouped matmul, or for its gradients, which contract other dimensions."""
    return min(512, rows), min(1024, num_in), min(1024, num_out)


def _by_experts(x_BTD, chosen_BTk, share_BTk, *weights, axes, split, arch, scale, grouped):
    """Return the outputs of one device's rows, summed over all devices that hold experts or parts of their ffn.

    Args:
        weights: the experts' weights, in the order of ``axes`` (logical axes by name) and ``split`` (shardings).
        scale: factor of the adapters.
    """
    named = lambda spec, dim: sharding.axes_of(spec[dim]) if len(spec) else ()
    expert, ffn = named(split[0], 0), named(split[0], 1)

    def whole(w, spec, logical):  # gather along the width, which the learner's sharding splits
        width = named(spec, logical.index("embed")) if "embed" in logical else ()
        return jax.lax.all_gather(w, width, axis=logical.index("embed"), tiled=True) if width else w

    each = zip(weights, split, axes.values(), strict=True)
    own = dict(zip(axes, (whole(*x) for x in each), strict=True))

    def by_matrix(rows_AI, name):
        out_AO = grouped(rows_AI, own[name], sizes_E)
        if name + adapters.A in own:
            rows_AR = grouped(rows_AI, own[name + adapters.A], sizes_E) * scale
            out_AO += grouped(rows_AR, own[name + adapters.B], sizes_E)
        return out_AO + is_of_AE.astype(out_AO.dtype) @ own[f"{name}_bias"] if f"{name}_bias" in own else out_AO

    flat = [x.reshape(-1, x.shape[-1]) for x in (x_BTD, chosen_BTk, share_BTk)]
    if expert:
        flat = [jax.lax.all_gather(x, expert, tiled=True) for x in flat]
    (x_XD, chosen_Xk, share_Xk), E, k = flat, weights[0].shape[0], chosen_BTk.shape[-1]
    first = jax.lax.axis_index(expert) * E if expert else 0
    own_A = chosen_Xk.reshape(-1) - first
    own_A = jnp.where((own_A >= 0) & (own_A < E), own_A, E)  # E marks experts of other devices, sorted last
    order_A = jnp.argsort(own_A, stable=True)
    is_of_AE = own_A[order_A][:, None] == jnp.arange(E)[None]
    sizes_E = jnp.sum(is_of_AE, axis=0, dtype=jnp.int32)
    here_A = jnp.arange(own_A.size) < jnp.sum(sizes_E)
    rows_AD = jnp.where(here_A[:, None], x_XD[order_A // k], 0)
    with jax.named_scope(f"experts_in_{jax.lax.axis_size(expert) if expert else 1}_parts"):  # ``plan`` reads this name
        hidden_AF = dense_mlp.gated(by_matrix(rows_AD, "experts_gate"), by_matrix(rows_AD, "experts_up"), arch)
        said_AD = by_matrix(hidden_AF, "experts_down")
    said_AD = jnp.where(here_A[:, None], said_AD, 0)
    back_A = jnp.zeros_like(order_A).at[order_A].set(jnp.arange(order_A.size), unique_indices=True)
    said_XkD = said_AD[back_A].reshape(-1, k, said_AD.shape[-1])
    y_XD = jnp.einsum("XkD,Xk->XD", said_XkD.astype(jnp.float32), share_Xk).astype(x_BTD.dtype)
    if ffn:
        y_XD = jax.lax.psum(y_XD, ffn)
    if expert:
        y_XD = jax.lax.psum_scatter(y_XD, expert, tiled=True)
    return y_XD.reshape(x_BTD.shape)
