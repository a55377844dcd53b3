"""What a task module offers. Owns: ``Loaded``. Does not know: any task.

A task module has

    SCORER: str                                  # "package.module:function", or "" when the task has no scorer
    load(config: PromptsConfig, *, seed: int) -> Loaded

and its scorer has the signature of every reward function, ``reward(prompts, completions, **columns)
-> list[float]``, where each column of ``Example.columns`` arrives as a list beside the completions.

Reward workers import the scorer's module in a process of their own: nothing here, nor in a task module
outside ``load``, may import jax.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxrl_llm.types import Example


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The questions of a task, in its own order.

    Attributes:
        examples: at least one.
        bad_rows: one message ("file:line: why") for each row skipped under ``prompts.bad_row="skip"``.
    """

    examples: tuple[Example, ...]
    bad_rows: tuple[str, ...] = ()
