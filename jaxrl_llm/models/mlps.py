"""The kinds of MLPs that a block can have. A new kind is one module with the functions of ``blocks.Mlp``."""

from __future__ import annotations

from jaxrl_llm.models import dense_mlp, moe
from jaxrl_llm.models.blocks import Mlp

# The module of each MLP. The key is ``Architecture.mlp``.
MLPS: dict[str, Mlp] = {"dense": dense_mlp, "experts": moe}
