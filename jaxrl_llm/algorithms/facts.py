"""Facts that the functions of a method declare about themselves: one record for each slot of a config.

    @needs("ref_logp", siblings=True)            columns that the function reads, and facts
    def my_surrogate(x, *, beta: Positive = 0.1): ...

A record also has the rules that follow from its facts. ``broken_rules`` yields the error message of each rule that a
config breaks, and ``limits`` checks them before a run begins. In a message, [update.batch_size] stands for the
setting's name and value. A rule about one function only is defined next to that function, which declares it as
``rule``.

Owns: the records, their rules. Does not know: any function. ``config`` is always a ``jaxrl_llm.config.Config``, whose
module stands above this folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import jax
import numpy as np

from jaxrl_llm.algorithms.inputs import COLUMNS, COMPUTED_BY_LEARNER, GROUP_MEAN, OTHER_POLICIES, Sizes
from jaxrl_llm.settings.schema import ConfigError, near
from jaxrl_llm.settings.use import Chosen, Facts, declare
from jaxrl_llm.types import Rewards

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

Settings = Mapping[str, Any]  # settings of a function, value by name
Config = Any  # a jaxrl_llm.config.Config, which stands above this folder
# Receives the path of the function, its settings and the config. Returns the error message; "" if the rule is kept.
RuleOfFunction = Callable[[str, Settings, Config], str]
# The scores of each reward function, and the weight of each reward function.
Parts = Sequence[tuple[Any, float]]


def credit_columns() -> tuple[str, ...]:
    """Return the columns that functions of credit may read. "group_mean" is a result of credit."""
    return ("entropy", *_columns_from_rewards(), *COMPUTED_BY_LEARNER)


def loss_columns() -> tuple[str, ...]:
    """Return the columns that functions of a loss may read: the ring stores them, or the learner computes them."""
    names = (*_columns_from_rewards(), *COMPUTED_BY_LEARNER)
    stored = [name for name in names if COLUMNS[name].is_stored]
    return (*stored, GROUP_MEAN, *OTHER_POLICIES)


def _columns_from_rewards() -> tuple[str, ...]:
    return tuple(name for name, column in COLUMNS.items() if column.from_rewards)


def needs(*columns: str, **facts: Any) -> Callable[[Decorated], Decorated]:
    """Return a decorator that declares the columns that a function reads, and facts of its slot's record."""
    if columns:
        facts["columns"] = frozenset(columns)
    return declare(**facts)


class MethodMemory(Protocol):
    """Memory of a function between iterations, on the host. See ``algorithms.memory``."""

    columns: tuple[str, ...]
    whole: dict[str, tuple[int, ...]]

    def values(self, rewards: Rewards, questions: Sequence[int]) -> dict[str, np.ndarray]: ...

    def observe(self, rewards: Rewards, questions: Sequence[int], sums: Mapping[str, Any]) -> None: ...

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


# Receives the function's settings, sizes of the run, and the ledger of questions (``questions.ledger.Ledger``).
MemoryClass = Callable[[Settings, Sizes, Any], MethodMemory]


@dataclasses.dataclass(frozen=True)
class FunctionFacts(Facts):
    """Facts of every slot.

    Attributes:
        columns: names in ``inputs.COLUMNS`` or ``inputs.OTHER_POLICIES`` that the function reads.
        rule: a rule of this function about other settings.
    """

    columns: frozenset[str] = frozenset()
    rule: RuleOfFunction | None = None

    def allowed_columns(self) -> tuple[str, ...]:
        """Return the columns that functions of this slot may read."""
        return ()

    def __post_init__(self) -> None:
        names = self.allowed_columns()
        for column in sorted(self.columns):
            if column not in names:
                allowed = near(column, names) if names else "they receive no columns"
                raise ConfigError(f"must not need {column!r}, which functions of this slot do not read: {allowed}")

    def broken_rules(self, path: str, chosen: Chosen[Any], config: Config) -> Iterator[str]:
        """Yield the error message of each rule about these facts that the config breaks.

        Args:
            path: dotted path of the function in the config.
            chosen: the function with its settings.
            config: the whole config.
        """
        message = self.rule(path, chosen.settings, config) if self.rule is not None else ""
        if message:
            yield message


# ---- credit


def _never(settings: Settings) -> bool:
    return False


@dataclasses.dataclass(frozen=True)
class CreditFacts(FunctionFacts):
    """Facts of functions that see the rollouts of an iteration.

    Attributes:
        memory: class of the memory of earlier iterations.
    """

    memory: MemoryClass | None = None

    def allowed_columns(self) -> tuple[str, ...]:
        return credit_columns()


@dataclasses.dataclass(frozen=True)
class AdvantageFacts(CreditFacts):
    """Facts of an advantage.

    Attributes:
        siblings: the advantage compares the rows of a group, so a group must have at least two rows.
        tied_teaches: function of the settings that returns whether a group of equal rewards has an advantage other than
            0. This is always the case if an advantage does not compare the rows of a group.
        by_part: returns the scores and the weight of each reward function, as the advantage compares them. None if the
            advantage compares the weighted sum of the scores.
        is_centred_reward: the advantage is the reward minus the mean of the group.
    """

    siblings: bool = False
    tied_teaches: Callable[[Settings], bool] = _never
    by_part: Callable[[Parts, Settings, Callable[..., Any]], Parts] | None = None
    is_centred_reward: bool = False

    def broken_rules(self, path: str, chosen: Chosen[Any], config: Config) -> Iterator[str]:
        yield from super().broken_rules(path, chosen, config)
        if self.siblings:
            yield from _without_siblings(path, config)


@dataclasses.dataclass(frozen=True)
class RewardTermFacts(CreditFacts):
    """Facts of a reward term."""


@dataclasses.dataclass(frozen=True)
class ReshapingFacts(CreditFacts):
    """Facts of a reshaping of the advantage.

    Attributes:
        of_row: the reshaping needs one advantage for all tokens of a row.
    """

    of_row: bool = False

    def broken_rules(self, path: str, chosen: Chosen[Any], config: Config) -> Iterator[str]:
        yield from super().broken_rules(path, chosen, config)
        advantage_is_by_token = bool({"value", "turn_reward"} & config.algorithm.advantage.facts.columns)
        if self.of_row and advantage_is_by_token:
            yield (
                f"[algorithm.reshaping] must not have {chosen.name!r} with [algorithm.advantage]: it needs one "
                "advantage for each row, and this advantage differs between the tokens of a row. Remove it, or choose "
                "another algorithm.advantage"
            )


def _without_siblings(path: str, config: Config) -> Iterator[str]:
    """Yield an error message if groups have one row, for a function that compares the rows of a group."""
    if config.rollout.group_size < 2:
        yield (
            f"[rollout.group_size] must be at least 2 for [{path}], which compares the answers of a group. Set "
            f"rollout.group_size=2 or choose another {path}"
        )


# ---- the loss


@dataclasses.dataclass(frozen=True)
class LossFacts(FunctionFacts):
    """Facts of functions that see the tokens of a batch."""

    def allowed_columns(self) -> tuple[str, ...]:
        return loss_columns()

    def broken_rules(self, path: str, chosen: Chosen[Any], config: Config) -> Iterator[str]:
        yield from super().broken_rules(path, chosen, config)
        decay = chosen.settings.get("decay")
        has_decay = isinstance(decay, float) and 0 <= decay < 1
        if "average_logp" in self.columns and not has_decay:
            yield (
                f"{path}={chosen.name!r} needs 'average_logp', so it must have a setting `decay`, a float in [0, 1). "
                "Add the keyword to the function"
            )


# Facts that a surrogate may require of the advantage or of the aggregation, and the reason.
REQUIRED_OF_ADVANTAGE = {"is_centred_reward": "a regression on the reward minus the mean of its group"}
REQUIRED_OF_AGGREGATION = {
    "counts_rows_alike": "whose loss is a mean over rows, long and short ones alike",
    "sums_tokens": "whose loss is a sum over the tokens of a row",
}


@dataclasses.dataclass(frozen=True)
class SurrogateFacts(LossFacts):
    """Facts of a surrogate.

    Attributes:
        siblings: the term compares the rows of a group. A group must have at least two rows, which must be neighbours
            in a batch.
        base: policy whose samples the term assumes. It decides which importance weight a correction must supply: "old"
            (old / behaviour), "policy" (current / behaviour), or "" (the term holds on any data).
        of_token: the term has one probability ratio for each token, not one for each row.
        reads_old: the term reads the old policy, but does not assume that the old policy drew the tokens.
        advantage: fact in ``REQUIRED_OF_ADVANTAGE`` that the advantage must declare.
        aggregation: fact in ``REQUIRED_OF_AGGREGATION`` that the aggregation must declare.
    """

    siblings: bool = False
    base: Literal["", "old", "policy"] = ""
    of_token: bool = False
    reads_old: bool = False
    advantage: str = ""
    aggregation: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, allowed in (
            ("base", self.base, ("", "old", "policy")),
            ("advantage", self.advantage, ("", *REQUIRED_OF_ADVANTAGE)),
            ("aggregation", self.aggregation, ("", *REQUIRED_OF_AGGREGATION)),
        ):
            if value not in allowed:
                raise ConfigError(
                    f"declares {name}={value!r:.200}, which must be one of {', '.join(map(repr, allowed))}"
                )

    def broken_rules(self, path: str, chosen: Chosen[Any], config: Config) -> Iterator[str]:
        yield from super().broken_rules(path, chosen, config)
        if self.siblings:
            yield from _without_siblings(path, config)
            yield from _without_whole_groups(path, config)
        has_old_policy = self.base == "old" or self.reads_old
        if not has_old_policy and not config.algorithm.old_policy.facts.is_behaviour:
            yield f"[algorithm.old_policy] must be 'behaviour' for [{path}], which has no old policy"
        if self.advantage:
            yield from _without_fact(self.advantage, "advantage", REQUIRED_OF_ADVANTAGE, path, config)
            if config.algorithm.reshaping:
                yield (
                    f"[algorithm.reshaping] must be () for [{path}], whose optimum is the optimum of the rewards as "
                    f"they are. Remove the reshapings, or choose another {path}"
                )
        if self.aggregation:
            yield from _without_fact(self.aggregation, "aggregation", REQUIRED_OF_AGGREGATION, path, config)


def _without_whole_groups(path: str, config: Config) -> Iterator[str]:
    """Yield an error message if micro-batches may hold parts of groups, for a surrogate that compares their rows."""
    compares = f"for [{path}], which compares the answers of a group"
    if config.replay.unit != "group":
        yield f"[replay.unit] must be 'group' {compares}. Set replay.unit=group or choose another {path}"
    if config.update.micro_batch_size % config.rollout.group_size:
        yield f"[update.micro_batch_size] must be a multiple of [rollout.group_size] {compares}"


def _without_fact(fact: str, field: str, reasons: Mapping[str, str], path: str, config: Config) -> Iterator[str]:
    """Yield an error message if the function in ``algorithm.FIELD`` does not declare a fact."""
    if getattr(getattr(config.algorithm, field).facts, fact):
        return
    slots = {item.name: item.metadata["slot"] for item in dataclasses.fields(config.algorithm) if item.name == field}
    fitting = []
    for name, function in slots[field].table.items():
        if getattr(function, "declared_facts", {}).get(fact):
            fitting.append(name)
    yield (
        f"[algorithm.{field}] must be {' or '.join(map(repr, fitting))} for [{path}], {reasons[fact]}. Set "
        f"algorithm.{field}={fitting[0]}, or choose another {path}"
    )


@dataclasses.dataclass(frozen=True)
class OldPolicyFacts(LossFacts):
    """Facts of an old policy.

    Attributes:
        is_behaviour: the old policy is the policy that drew the tokens.
    """

    is_behaviour: bool = False


@dataclasses.dataclass(frozen=True)
class DivergenceFacts(LossFacts):
    """Facts of a divergence for the KL penalty."""


@dataclasses.dataclass(frozen=True)
class CorrectionFacts(FunctionFacts):
    """Facts of an off-policy correction.

    Attributes:
        masks: the correction leaves tokens out of the loss.
        of_token: the correction bounds the ratio of each token, so the surrogate must have one ratio for each token.
        over_batch: returns a number for the whole batch from its ratios and the function's settings. The function
            receives the number as ``Ratios.over_batch``.
    """

    masks: bool = False
    of_token: bool = False
    over_batch: Callable[..., jax.Array] | None = None

    def broken_rules(self, path: str, chosen: Chosen[Any], config: Config) -> Iterator[str]:
        yield from super().broken_rules(path, chosen, config)
        surrogate = config.algorithm.surrogate.facts
        is_behaviour = config.algorithm.old_policy.facts.is_behaviour
        has_weight = surrogate.base == "policy" or (surrogate.base == "old" and not is_behaviour)
        if chosen and not has_weight and not self.masks:
            yield (
                f"[{path}] must be 'none' or a correction that masks, with [algorithm.surrogate] and "
                "[algorithm.old_policy]: these leave no importance weight to correct"
            )
        if self.of_token and not surrogate.of_token:
            yield (
                f"[{path}] bounds the ratio of each token, and [algorithm.surrogate] has no such ratio. Choose another "
                f"{path}"
            )


@dataclasses.dataclass(frozen=True)
class StepSizeFacts(FunctionFacts):
    """Facts of a step size: a function that scales the learning rate of a step."""


@dataclasses.dataclass(frozen=True)
class AggregationFacts(FunctionFacts):
    """Facts of an aggregation.

    Attributes:
        counts_rows_alike: long and short rows have the same total weight.
        sums_tokens: the loss of a row is the sum over its tokens.
    """

    counts_rows_alike: bool = False
    sums_tokens: bool = False


@dataclasses.dataclass(frozen=True)
class EntropyBonusFacts(FunctionFacts):
    """Facts of an entropy bonus.

    Attributes:
        moves: the weight of the bonus changes during a run.
    """

    moves: bool = True


@dataclasses.dataclass(frozen=True)
class CrossEntropyFacts(FunctionFacts):
    """Facts of a cross-entropy.

    Attributes:
        reads: log-probabilities in the cross-entropy: of the completions ("policy_logp") or of the prompts
            ("prompt_logp").
        others: the cross-entropy trains on external answers (external.paths) without changing them.
    """

    reads: Literal["policy_logp", "prompt_logp"] = "policy_logp"
    others: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reads not in ("policy_logp", "prompt_logp"):
            raise ConfigError(f"declares reads={self.reads!r:.200}, which must be 'policy_logp' or 'prompt_logp'")

    def broken_rules(self, path: str, chosen: Chosen[Any], config: Config) -> Iterator[str]:
        yield from super().broken_rules(path, chosen, config)
        if self.others and not config.external.paths:
            yield (
                f"[algorithm.cross_entropies] has {chosen.name!r}, which trains on the answers of others: set "
                "external.paths and external.groups_per_iteration"
            )
        if self.reads == "prompt_logp" and config.prompts.max_tokens < 2:
            yield (
                "[prompts.max_tokens] must be at least 2 for [algorithm.cross_entropies]: the first token of a prompt "
                "is not predicted"
            )


# ---- replay


@dataclasses.dataclass(frozen=True)
class DrawFacts(FunctionFacts):
    """Facts of a draw.

    Attributes:
        never_draws: function of the settings that returns whether rows of priority 0 are never drawn.
        oldest_age: returns the oldest age in iterations of rows that may be drawn. It receives the settings, the
            iteration [] i32, and the oldest age that the other settings of the run allow. None = that age.
        preferred_ages: returns the youngest and the oldest age that a batch prefers. It receives the settings, a
            uniform number [] f32 in [0, 1) of the batch, and the oldest age. None = no preference.
    """

    never_draws: Callable[[Settings], bool] = _never
    oldest_age: Callable[[Settings, jax.Array, int], jax.Array | int] | None = None
    preferred_ages: Callable[[Settings, jax.Array, jax.Array | int], tuple[jax.Array, jax.Array]] | None = None

    def broken_rules(self, path: str, chosen: Chosen[Any], config: Config) -> Iterator[str]:
        yield from super().broken_rules(path, chosen, config)
        prefers_ages = self.preferred_ages is not None
        if prefers_ages and config.replay.fresh_fraction != 0:
            yield (
                f"[replay.fresh_fraction] must be 0 with [{path}], which chooses between fresh and older rollouts "
                f"itself. Set replay.fresh_fraction=0 and the settings of {path}"
            )
        chooses_ages = self.oldest_age is not None or prefers_ages
        if chooses_ages and config.replay.delay_iterations != 0:
            yield (
                f"[replay.delay_iterations] must be 0 with [{path}], which chooses ages: all rollouts of a delayed "
                f"batch have the same age. Set replay.delay_iterations=0 or choose another {path}"
            )


@dataclasses.dataclass(frozen=True)
class PriorityFacts(FunctionFacts):
    """Facts of a priority.

    Attributes:
        reads_advantage: the priority depends on the advantages of the rows.
    """

    reads_advantage: bool = True


@dataclasses.dataclass(frozen=True)
class AdmissionFacts(FunctionFacts):
    """Facts of an admission: a function that decides which overwritten rows move to the second ring."""


@dataclasses.dataclass(frozen=True)
class RetirementFacts(FunctionFacts):
    """Facts of a retirement: a function that decides which stored rows are never drawn."""
