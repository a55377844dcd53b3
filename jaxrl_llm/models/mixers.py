"""The kinds of mixers that a layer can have, and the sampler's caches of all layers.

A new kind is one module with the functions of ``blocks.Mixer``, one entry here and one in ``MIXER_KINDS``.

Letters: M data shards, Z decode slots.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxrl_llm.models import attention_mixer, delta_rule
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.blocks import CacheSizes, Mixer

# The module of each mixer. The key is ``Layer.mixer``, as in ``architecture.MIXER_KINDS``.
MIXERS: dict[str, Mixer] = {"attention": attention_mixer, "delta_rule": delta_rule}


def empty_caches(arch: Architecture, sizes: CacheSizes) -> dict[str, tuple[Any, ...]]:
    """Return empty caches by layer: ``cache_k`` and ``cache_v`` of slots, ``prompt_k`` and ``prompt_v`` of prompts.

    Layers with attention have keys and values, as in ``attention.Cache`` and ``Prompt``. Layers with the gated delta
    rule have two states instead (``delta_rule.empty_states``).
    """
    caches = [MIXERS[layer.mixer].empty_cache(arch, layer, sizes) for layer in arch.by_layer]
    prompts = [MIXERS[layer.mixer].empty_prompts(arch, layer, sizes) for layer in arch.by_layer]
    return {
        "cache_k": tuple(keys for keys, _ in caches),
        "cache_v": tuple(values for _, values in caches),
        "prompt_k": tuple(keys for keys, _ in prompts),
        "prompt_v": tuple(values for _, values in prompts),
    }


def begin(
    arch: Architecture,
    caches: Any,
    prompts: Any,
    entry_MZ: jax.Array,
    takes_MZ: jax.Array,
) -> tuple[Any, ...]:
    """Return the slots' caches when some slots start new rows: recurrent states are copied from the rows' prompts.

    Args:
        caches: ``cache_k`` or ``cache_v``, by layer.
        prompts: ``prompt_k`` or ``prompt_v``, by layer.
        entry_MZ: index of each slot's prompt in its shard.
        takes_MZ: whether the slot starts a new row.
    """
    return tuple(
        MIXERS[layer.mixer].begin(cache, prompt, entry_MZ, takes_MZ)
        for layer, cache, prompt in zip(arch.by_layer, caches, prompts, strict=True)
    )
