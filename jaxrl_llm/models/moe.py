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

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.megablox import ops as megablox
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.config import Config, ConfigError, LoraConfig
from jaxrl_llm.models import dense_mlp, quantised
from jaxrl_llm.models import lora as adapters
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.blocks import LayerParameters, Parameter, Routing
from jaxrl_llm.ops import packing
from jaxrl_llm.ops.logp import completion_window
from jaxrl_llm.runtime import sharding

Grouped = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

_AXES = {
    "experts_gate": ("expert", "mlp", "embed"),
    "experts_up": ("expert", "mlp", "embed"),
    "experts_down": ("expert", "embed", "mlp"),
}


def check(config: Config, arch: Architecture, mesh: Mesh, who: str) -> None:
    """Check that the mesh fits the experts, and that settings about experts are used only with experts.

    Args:
        mesh: the learner's or the sampler's.
        who: "model" or "reference", for error messages. Settings about experts require experts in the model, but not in
            the reference.

    Raises:
        ConfigError: the mesh or a setting does not fit.
    """
    num_parts = mesh.shape["expert"]
    E = arch.num_experts
    if E % num_parts:
        divisors = ", ".join(str(d) for d in range(1, E + 1) if E % d == 0)
        raise ConfigError(f"mesh.expert={num_parts} must divide the {who}'s {E} experts: one of {divisors}")
    if E:
        _check_rules(config, arch, mesh, who)
    if config.model.routing_replay and config.external.groups_per_iteration:
        raise ConfigError(
            f"model.routing_replay=True cannot be used with external.groups_per_iteration="
            f"{config.external.groups_per_iteration}: external rollouts have no record of the experts. Set "
            "model.routing_replay=False"
        )
    if E or who != "model":
        return
    for name, value, off in (
        ("model.routing_replay", config.model.routing_replay, False),
        ("update.load_balance", config.update.load_balance, 0.0),
    ):
        if value:
            raise ConfigError(f"{name}={value!r} needs a model with experts. Set {name}={off!r}")


def _check_rules(config: Config, arch: Architecture, mesh: Mesh, who: str) -> None:
    """Check the sharding of the experts' matrices.

    The devices that share an expert's ffn sum their outputs. They must hold the same rows, and the same parts of the
    ffn in all three matrices.

    Raises:
        ConfigError: ``mesh.rules`` shard the matrices in another way.
    """
    is_learner = all(mesh.shape[axis] == getattr(config.mesh, axis) for axis in ("context", "tensor"))
    rules = sharding.RULES | dict(sharding.rules_of(config.mesh))
    if not is_learner:
        rules |= sharding.OF_SAMPLER
    ffn_axes = {}
    for parameter in parameters(arch):
        if parameter.name in _AXES:
            spec = sharding.partition_spec(parameter.shape, parameter.axes, mesh, rules)
            ffn_axes[parameter.name] = sharding.axes_of(spec[parameter.axes.index("mlp")])
    splits_rows = any({*axes} & {*sharding.TOKEN_AXES} for axes in ffn_axes.values())
    if len(set(ffn_axes.values())) > 1 or splits_rows:
        current = ", ".join(f"{name} on {' and '.join(axes) or 'no axis'}" for name, axes in ffn_axes.items())
        raise ConfigError(
            f"mesh.rules={config.mesh.rules!r} must map `mlp` of the {who}'s experts to `tensor` or to no axis, and to "
            f"the same axes in all three matrices. It is: {current}"
        )


def parameters(arch: Architecture) -> Iterator[Parameter]:
    """Yield the parameters of a block's router, experts and shared expert: matrices, then biases.

    Raises:
        ConfigError: the number of experts per token is not between 1 and the number of experts.
    """
    E = arch.num_experts
    D = arch.width
    F = arch.ffn
    k = arch.experts_per_token
    if not 1 <= k <= E:
        raise ConfigError(f"num_experts_per_tok={k} must be from 1 to {E}, the number of the model's experts")
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


def by_token(hidden: jax.Array, results: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    """Return the results of ``Model.forward`` by token, without keys and values.

    Args:
        hidden, results: the two results of ``Model.forward``.

    Returns:
        The hidden states. With experts, also the chosen experts [B,T,layers*k]. If balance costs were computed, also
        their means over the layers, [B,T,1] f32.
    """
    routed = _routed(results)
    return (hidden, *routed)


def _routed(results: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    """Return the results of ``by_token`` without the hidden states."""
    mlp_results = results[2:]  # the routing results follow keys and values
    if not mlp_results:
        return ()
    chosen, *costs = (jnp.stack(x) if isinstance(x, tuple) else x for x in mlp_results)
    chosen = jnp.moveaxis(chosen, 0, 2)
    chosen = chosen.reshape(*chosen.shape[:2], -1)
    mean_costs = [jnp.mean(cost, axis=0)[..., None] for cost in costs]
    return (chosen, *mean_costs)


def in_lines(
    routing: Routing | None,
    prompt_length: jax.Array,
    length: jax.Array,
    *,
    width: int,
    group_size: int,
) -> Routing | None:
    """Return the routing of rows [n,K,S,m] in packed lines [n,W,m], in the order of ``packing.lay``."""
    if routing is None or routing.chosen is None:
        return routing
    n, K, S, m = routing.chosen.shape
    index_1KS = jnp.arange(K * S, dtype=jnp.int32).reshape(1, K, S)
    index = jnp.broadcast_to(index_1KS, (n, K, S))
    line = packing.lay(index, prompt_length, length, width=width, group_size=group_size)
    chosen_nXm = routing.chosen.reshape(n, K * S, m)
    chosen = jnp.take_along_axis(chosen_nXm, line.tokens[:, :, None], axis=1)
    return dataclasses.replace(routing, chosen=chosen)


def of_groups(
    routing: Routing | None,
    prompt_length: jax.Array,
    *,
    completion_width: int,
    group_size: int,
) -> Routing | None:
    """Return the routing of rows [B,S,m] by whole groups, prompt ++ completions: [B/G,L+G*C,m]."""
    if routing is None or routing.chosen is None:
        return routing
    B, S, m = routing.chosen.shape
    by_group = routing.chosen.reshape(B // group_size, group_size, S, m)
    prompts = by_group[:, 0, : S - completion_width]
    completions = completion_window(routing.chosen, prompt_length, completion_width)
    completions = completions.reshape(len(prompts), -1, m)
    return dataclasses.replace(routing, chosen=jnp.concatenate([prompts, completions], axis=1))


def prompt_experts(results: tuple[Any, ...], length: jax.Array, row_width: int) -> jax.Array:
    """Return the experts that the prompts' tokens chose, [P,S,layers*k], shifted right by one token.

    Position t holds the experts that token t - 1 chose. Positions without a choice hold 0.

    Args:
        results: the second result of ``Model.forward`` for the prompts [P,L].
        length: [P] i32 prompt lengths.
        row_width: S.
    """
    chosen_PLm, *_ = _routed(results)
    L = chosen_PLm.shape[1]
    is_prompt_token = jnp.arange(L)[None] < length[:, None]
    chosen_PLm = jnp.where(is_prompt_token[..., None], chosen_PLm, 0)
    return jnp.pad(chosen_PLm, ((0, 0), (1, row_width - L - 1), (0, 0)))


def replay(experts: jax.Array | None, counts: jax.Array | None) -> Routing:
    """Return the routing that replays the sampler's choices.

    Args:
        experts: [...,S,m]; position t holds the experts that token t - 1 chose (``prompt_experts``); None = replay
            nothing.
        counts: ``counts`` of the batch; None = compute no balance cost.
    """
    chosen = None if experts is None else jnp.roll(experts, -1, axis=-2)
    return Routing(chosen, counts)


def counts(chosen: jax.Array, mask: jax.Array, arch: Architecture) -> jax.Array:
    """Return how many tokens chose each expert in each layer, [layers,E] f32.

    Args:
        chosen: [...,layers*k] experts of each token.
        mask: [...] the tokens to count.
    """
    L = arch.num_layers
    E = arch.num_experts
    chosen_XLk = chosen.reshape(-1, L, arch.experts_per_token).astype(jnp.int32)
    index = chosen_XLk + E * jnp.arange(L)[None, :, None]
    mask_X11 = mask.reshape(-1, 1, 1).astype(jnp.float32)
    weight = jnp.broadcast_to(mask_X11, index.shape)
    zeros = jnp.zeros(L * E, jnp.float32)
    sums = zeros.at[index.reshape(-1)].add(weight.reshape(-1))
    return sums.reshape(L, E)


def _load(counts_LE: jax.Array, arch: Architecture) -> jax.Array:
    """Return f_e [E] f32 of ``counts``. The sum of f_e is k, or 0 if nothing was counted."""
    total = jnp.sum(counts_LE)
    return arch.experts_per_token * jnp.sum(counts_LE, axis=0) / jnp.maximum(total, 1.0)


def metrics(sums: dict[str, Any]) -> dict[str, float]:
    """Return metrics about the balance of the experts' loads, or {} without experts.

    Args:
        sums: the sums over an iteration's updates, on the host.
    """
    if "expert_counts" not in sums:
        return {}
    values = {}
    if "balance_sum" in sums:
        num_updates = float(sums["update_count"]) or math.nan
        values["update/expert_balance"] = float(sums["balance_sum"]) / num_updates
    counts_LE = np.asarray(sums["expert_counts"], np.float64)
    num_experts = counts_LE.shape[1]
    if counts_LE.sum() == 0:
        values["update/expert_load_max"] = math.nan
        values["update/expert_load_entropy_frac"] = math.nan
        return values
    share_LE = counts_LE / np.maximum(counts_LE.sum(axis=1, keepdims=True), 1.0)
    entropy_L = -np.sum(share_LE * np.log(np.where(share_LE > 0, share_LE, 1.0)), axis=1)
    values["update/expert_load_max"] = float(share_LE.max()) * num_experts
    values["update/expert_load_entropy_frac"] = float(entropy_L.mean()) / math.log(max(num_experts, 2))
    return values


def sums(
    routed: tuple[jax.Array, ...],
    mask: jax.Array,
    counts_LE: jax.Array | None,
    arch: Architecture,
) -> dict[str, jax.Array]:
    """Return "expert_counts" and "balance_sum" over the tokens of the mask [...].

    "balance_sum" is the contribution of these tokens to the batch's mean balance cost.

    Args:
        routed: results of ``by_token`` without the hidden states; () = there are no experts.
        counts_LE: ``counts`` of the whole batch; None = there are no balance costs.
    """
    sums_by_name = {}
    if routed:
        sums_by_name["expert_counts"] = counts(routed[0], mask, arch)
    if counts_LE is not None:
        num_tokens = jnp.sum(counts_LE[0]) / arch.experts_per_token
        cost = routed[1][..., 0]
        sums_by_name["balance_sum"] = jnp.sum(jnp.where(mask, cost, 0.0)) / jnp.maximum(num_tokens, 1.0)
    return sums_by_name


def counts_of_batch(micros: Any, routed: Callable[[Any], Any], arch: Architecture) -> jax.Array:
    """Return ``counts`` [layers,E] of all trained tokens in the micro-batches (learner.micro_batches).

    Args:
        routed: rows -> their routing results of ``by_token``. This function runs a forward pass. It is called only if
            the sampler's choices are not in the rollout.
    """

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        rows, weights = micros.at(i)
        chosen = rows.rollout.columns.get("experts")
        if chosen is None:
            chosen = routed(rows)[0]
        return total + counts(chosen, weights.policy > 0, arch)

    return jax.lax.fori_loop(
        0,
        micros.count,
        add,
        jnp.zeros((arch.num_layers, arch.num_experts), jnp.float32),
    )


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
    grouped: Grouped,
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
    chosen_BTk, share_BTk, probs_BTE = _route(x_BTD, weight, chosen, arch)
    y_BTD = _by_device(
        x_BTD,
        chosen_BTk,
        share_BTk,
        weight,
        arch,
        lora,
        rules,
        grouped,
        rounded,
    )
    if arch.experts_bias:  # add the output bias here, because devices that share an expert's ffn would each add it
        is_chosen_BTkE = jax.nn.one_hot(chosen_BTk, arch.num_experts)
        share_BTE = jnp.sum(is_chosen_BTkE * share_BTk[..., None], axis=2)
        bias_ED = weight("experts_down_bias").astype(jnp.float32)
        bias_BTD = jnp.einsum("BTE,ED->BTD", share_BTE, bias_ED, precision="highest")
        y_BTD += bias_BTD.astype(y_BTD.dtype)
    if arch.shared_ffn:
        row = weight("shared_router").astype(jnp.float32)
        logits_BT1 = jnp.einsum("BTD,ED->BTE", x_BTD.astype(jnp.float32), row, precision="highest")
        share_BT1 = jax.nn.sigmoid(logits_BT1)
        y_BTD += share_BT1.astype(y_BTD.dtype) * dense(x_BTD, prefix="shared_")
    stored_choice = chosen_BTk.astype(id_dtype(arch))
    if load is None:
        return y_BTD, (stored_choice,)
    cost_BT = arch.num_experts * jnp.einsum("BTE,E->BT", probs_BTE, load)
    return y_BTD, (stored_choice, cost_BT)


def _route(
    x_BTD: jax.Array, weight: Callable[[str], jax.Array], chosen: jax.Array | None, arch: Architecture
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the experts of each token [B,T,k], their shares of the output [B,T,k], and all probabilities [B,T,E].

    Args:
        weight, chosen: as in ``mlp``.
    """
    logits_BTE = jnp.einsum(
        "BTD,ED->BTE",
        x_BTD.astype(jnp.float32),
        weight("router").astype(jnp.float32),
        precision="highest",
    )
    if arch.experts_bias:
        logits_BTE += weight("router_bias").astype(jnp.float32)[None, None]
    probs_BTE = jax.nn.softmax(logits_BTE, axis=-1)
    if chosen is None:
        _, chosen_BTk = jax.lax.top_k(probs_BTE, arch.experts_per_token)
    else:
        chosen_BTk = chosen.astype(jnp.int32)
    share_BTk = jnp.take_along_axis(probs_BTE, chosen_BTk, axis=-1)
    if arch.norm_topk:
        share_BTk = share_BTk / jnp.sum(share_BTk, axis=-1, keepdims=True)
    return chosen_BTk, share_BTk, probs_BTE


def _by_device(
    x_BTD: jax.Array,
    chosen_BTk: jax.Array,
    share_BTk: jax.Array,
    weight: Callable[[str], Any],
    arch: Architecture,
    lora: LoraConfig,
    rules: dict[str, Any],
    grouped: Grouped,
    rounded: str,
) -> jax.Array:
    """Return the sum of the chosen experts' outputs by their shares. Each device computes its own experts."""
    axes_by_name = _expert_axes(arch, lora)
    weights = []
    for name in axes_by_name:
        kind = rounded if name in _AXES else "compute"
        weights.append(quantised.of_experts(weight(name), x_BTD.dtype, kind))
    mesh = jax.sharding.get_abstract_mesh()
    specs = [jax.P()] * len(weights)
    if not (mesh.empty or mesh.size == 1):
        specs = [
            sharding.partition_spec(w.shape, axes, mesh, rules)
            for w, axes in zip(weights, axes_by_name.values(), strict=True)
        ]
        # The constraint keeps the sharding. With the constraint, gradients are values and not refs (see
        # ``sharding.gather_copies``), and a reduce-scatter gives each device its part.
        weights = [jax.lax.with_sharding_constraint(w, spec) for w, spec in zip(weights, specs, strict=True)]
    token_axes = ("batch", "length")
    scale = adapters.scale(lora) if lora.rank else 0.0
    return sharding.by_device(
        functools.partial(
            _by_experts,
            axes=axes_by_name,
            specs=specs,
            arch=arch,
            scale=scale,
            grouped=grouped,
        ),
        x_BTD,
        chosen_BTk,
        share_BTk,
        *weights,
        axes=(token_axes, token_axes, token_axes, *specs),
        shared=2,
    )


def _expert_axes(arch: Architecture, lora: LoraConfig) -> dict[str, tuple[str, ...]]:
    """Return the logical axes, by name, of the experts' matrices, adapters and biases.

    The output bias is not included, because ``mlp`` adds it outside the experts.
    """
    all_parameters = list(parameters(arch))
    matrices = [parameter for parameter in all_parameters if parameter.name in _AXES]
    ordered = [*matrices, *adapters.matrices(lora, matrices), *all_parameters]
    return {parameter.name: parameter.axes for parameter in ordered if "expert" in parameter.axes}


def grouped_by_kernel(
    rows_AI: jax.Array,
    w_EOI: jax.Array,
    sizes_E: jax.Array,
    *,
    turned: bool,
    interpret: bool = False,
) -> jax.Array:
    """Compute the grouped matmul by JAX's TPU kernel (megablox).

    Without this kernel, the TPU compiler would multiply every row by every expert.

    Args:
        turned: the weights are stored in memory as [E,I,O].
        interpret: run the kernel in Pallas' interpreter.
    """
    A = len(rows_AI)
    w = w_EOI.mT if turned else w_EOI
    tile = min(512, -(-A // 128) * 128)
    rows_AI = jnp.pad(rows_AI, ((0, -A % tile), (0, 0)))
    out_AO = megablox.gmm(rows_AI, w, sizes_E, rows_AI.dtype, _tiles, None, None, not turned, interpret)
    return out_AO[:A]


def _tiles(rows: int, num_in: int, num_out: int) -> tuple[int, int, int]:
    """Return the kernel's tile sizes for a grouped matmul, or for its gradients, which contract other dimensions."""
    return min(512, rows), min(1024, num_in), min(1024, num_out)


def _by_experts(
    x_BTD: jax.Array,
    chosen_BTk: jax.Array,
    share_BTk: jax.Array,
    *weights: jax.Array,
    axes: dict[str, tuple[str, ...]],
    specs: list[PartitionSpec],
    arch: Architecture,
    scale: float,
    grouped: Grouped,
) -> jax.Array:
    """Return the outputs of one device's rows, summed over all devices that hold experts or parts of their ffn.

    Args:
        weights: the experts' weights, in the order of ``axes`` (logical axes by name) and ``specs`` (shardings).
        scale: factor of the adapters.
    """
    expert_axes = _mesh_axes(specs[0], 0)
    ffn_axes = _mesh_axes(specs[0], 1)
    local = {}
    for name, w, spec in zip(axes, weights, specs, strict=True):
        local[name] = _gather_width(w, spec, axes[name])
    flat = [x.reshape(-1, x.shape[-1]) for x in (x_BTD, chosen_BTk, share_BTk)]
    if expert_axes:
        flat = [jax.lax.all_gather(x, expert_axes, tiled=True) for x in flat]
    x_XD, chosen_Xk, share_Xk = flat
    E = weights[0].shape[0]
    k = chosen_BTk.shape[-1]
    first_expert = jax.lax.axis_index(expert_axes) * E if expert_axes else 0
    order_A, is_expert_AE = _sort_by_expert(chosen_Xk.reshape(-1) - first_expert, E)
    sizes_E = jnp.sum(is_expert_AE, axis=0, dtype=jnp.int32)
    is_here_A = jnp.arange(order_A.size) < jnp.sum(sizes_E)
    rows_AD = jnp.where(is_here_A[:, None], x_XD[order_A // k], 0)

    def multiply(rows_AI: jax.Array, name: str) -> jax.Array:
        out_AO = grouped(rows_AI, local[name], sizes_E)
        if name + adapters.A in local:
            rows_AR = grouped(rows_AI, local[name + adapters.A], sizes_E) * scale
            out_AO += grouped(rows_AR, local[name + adapters.B], sizes_E)
        bias_EO = local.get(f"{name}_bias")
        if bias_EO is None:
            return out_AO
        return out_AO + is_expert_AE.astype(out_AO.dtype) @ bias_EO

    num_parts = jax.lax.axis_size(expert_axes) if expert_axes else 1
    with jax.named_scope(f"experts_in_{num_parts}_parts"):  # ``plan`` reads this name
        gate_AF = multiply(rows_AD, "experts_gate")
        up_AF = multiply(rows_AD, "experts_up")
        out_AD = multiply(dense_mlp.gated(gate_AF, up_AF, arch), "experts_down")
    out_AD = jnp.where(is_here_A[:, None], out_AD, 0)
    position_A = jnp.zeros_like(order_A).at[order_A].set(jnp.arange(order_A.size), unique_indices=True)
    out_XkD = out_AD[position_A].reshape(-1, k, out_AD.shape[-1])
    y_XD = jnp.einsum("XkD,Xk->XD", out_XkD.astype(jnp.float32), share_Xk).astype(x_BTD.dtype)
    if ffn_axes:
        y_XD = jax.lax.psum(y_XD, ffn_axes)
    if expert_axes:
        y_XD = jax.lax.psum_scatter(y_XD, expert_axes, tiled=True)
    return y_XD.reshape(x_BTD.shape)


def _sort_by_expert(expert_A: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Return the order that sorts choices by expert, and whether each sorted choice is each expert, [A,E].

    Args:
        expert_A: the number of each choice's expert among the experts of this device. Choices of experts of other
            devices are sorted last.
    """
    is_own_A = (expert_A >= 0) & (expert_A < num_experts)
    expert_A = jnp.where(is_own_A, expert_A, num_experts)
    order_A = jnp.argsort(expert_A, stable=True)
    is_expert_AE = expert_A[order_A][:, None] == jnp.arange(num_experts)[None]
    return order_A, is_expert_AE


def _mesh_axes(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    """Return the mesh axes that split a dimension; () if the sharding has no entries."""
    return sharding.axes_of(spec[dim]) if len(spec) else ()


def _gather_width(w: jax.Array, spec: PartitionSpec, logical_axes: tuple[str, ...]) -> jax.Array:
    """Gather a weight along the width, which the learner's sharding splits."""
    if "embed" not in logical_axes:
        return w
    dim = logical_axes.index("embed")
    width_axes = _mesh_axes(spec, dim)
    return jax.lax.all_gather(w, width_axes, axis=dim, tiled=True) if width_axes else w
