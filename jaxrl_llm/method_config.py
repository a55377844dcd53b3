"""Settings of methods: the functions that a method consists of (algorithms), replay, adapters, environments.

Owns: names, types and defaults of these settings. Does not know: rules between settings (limits, algorithms.facts), the
rest of a run (config).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from jaxrl_llm.algorithms import advantages, facts, shaping, turns
from jaxrl_llm.algorithms.aggregation import AGGREGATIONS, CROSS_ENTROPIES
from jaxrl_llm.algorithms.corrections import CORRECTIONS, STEP_SIZES
from jaxrl_llm.algorithms.divergences import DIVERGENCES, ENTROPY_BONUSES
from jaxrl_llm.algorithms.draw_weights import ADMISSIONS, DRAWS, PRIORITIES, RETIREMENTS
from jaxrl_llm.algorithms.old_policies import OLD_POLICIES
from jaxrl_llm.algorithms.surrogates import SURROGATES
from jaxrl_llm.algorithms.tracing import reads_of_draw
from jaxrl_llm.settings.schema import Bounds, Count, CountOrZero, NotNegative, Number, Positive, Rate, ReadWhen, Share
from jaxrl_llm.settings.use import Chosen, slot

LoraTarget = Literal["q", "k", "v", "o", "gate", "up", "down"]
LORA_TARGETS: tuple[LoraTarget, ...] = ("q", "k", "v", "o", "gate", "up", "down")

# Conditions under which a run reads a setting.
WITH_ADAPTERS = ReadWhen(lambda config: config.model.lora.rank > 0, "with model.lora.rank=0")
WITH_MODULES = ReadWhen(lambda config: config.model.lora.modules > 1, "with model.lora.modules=1")
WITH_TURNS = ReadWhen(lambda config: config.environments.factory != "", "without environments.factory")
WITH_CRITIC = ReadWhen(
    lambda config: config.has_critic,
    "without a critic (algorithm.advantage='gae' has one)",
)
WITH_BINS = ReadWhen(lambda config: config.algorithm.critic.bins > 0, "with algorithm.critic.bins=0")
WITH_SECOND_RING = ReadWhen(
    lambda config: config.replay.positive_fraction > 0,
    "with replay.positive_fraction=0",
)
WITH_PRIORITIES = ReadWhen(
    lambda config: config.replay.reads_priority,
    "with a replay.draw that reads no priority",
)
NO_ADVANTAGE = "with an algorithm.surrogate that reads no advantage"
WITH_ADVANTAGES = ReadWhen(lambda config: config.reads_advantage, NO_ADVANTAGE)
WITH_ADVANTAGES_OR_TIES = ReadWhen(lambda config: config.reads_function_of_advantage, NO_ADVANTAGE)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    # Rank of the adapters (LoRA). Only the adapters learn, in float32; the weights of model.path stay unchanged. 0 = no
    # adapters.
    rank: Annotated[int, Bounds(0, 1024)] = 0
    # Scale: the output of the adapters is multiplied by alpha / rank.
    alpha: Annotated[Positive, WITH_ADAPTERS] = 32.0
    # Rank-stabilised scale: multiply the output of the adapters by alpha / sqrt(rank) instead of alpha / rank.
    rank_stabilised: Annotated[bool, WITH_ADAPTERS] = False
    # Weight-decomposed (DoRA): also learn the norm of each row of a weight matrix.
    dora: Annotated[bool, WITH_ADAPTERS] = False
    # Matrices of each layer that have an adapter.
    targets: Annotated[tuple[LoraTarget, ...], WITH_ADAPTERS] = LORA_TARGETS
    # Folder of adapters (PEFT) to start from, with this rank, scale and targets; "" = new adapters, which add nothing
    # at first.
    path: Annotated[str, WITH_ADAPTERS] = ""
    # Modules: equal parts of the rank (DPS-LoRA). One part learns at a time. The next part begins when rewards stall.
    modules: Annotated[Count, WITH_ADAPTERS] = 1
    # Stall: rewards have stalled if the mean rewards of the batches do not rise over this many optimizer steps.
    module_steps: Annotated[int, Bounds(2, 10_000), WITH_MODULES] = 20


@dataclasses.dataclass(frozen=True)
class EnvironmentsConfig:
    # Environment that answers the policy's turns, so that a completion has several turns. "package.module:name" or
    # "path/to/file.py:name" of a class with TRL's interface, a function or an agent
    # (docs/reference/environments.md); "" = no environment.
    factory: str = ""
    # Largest number of turns of the policy in a completion.
    max_turns: Annotated[Count, WITH_TURNS] = 4
    # Longest turn of the policy in tokens. A longer turn is cut and ends the completion; 0 = no limit for single turns.
    # sampling.max_completion_tokens limits all turns and answers together.
    max_turn_tokens: Annotated[CountOrZero, WITH_TURNS] = 0
    # Longest answer in tokens, with the text that the chat template adds. The answer counts towards
    # sampling.max_completion_tokens.
    max_answer_tokens: Annotated[Count, WITH_TURNS] = 64
    # Workers: processes that run environments. An episode stays in one process.
    num_workers: Annotated[int, Bounds(1, 1024), WITH_TURNS] = 2
    # Timeout: seconds that an answer may take before its process is replaced.
    timeout_s: Annotated[float, Bounds(0.01, 86400.0), WITH_TURNS] = 10.0


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The value head, which a run has if a function of its method needs "value"."""

    # Gradient share: share of the value loss's gradient that the critic's head passes into the policy's hidden states;
    # 0 = no gradient. The head itself receives the whole gradient.
    gradient_share: Annotated[NotNegative, WITH_CRITIC] = 0.1
    # Learning rate of the head. Schedule, gradient clip and decay are the same as for the policy.
    learning_rate: Annotated[Rate, WITH_CRITIC] = 1e-3
    # Value clip: distance from the value at rollout time up to which a prediction improves the loss, in units of
    # reward; 0 = no limit.
    clip: Annotated[NotNegative, WITH_CRITIC] = 0.0
    # Bins: values are the mean of a distribution over this many equal bins (HL-Gauss); 0 = one number, squared error.
    bins: Annotated[int, Bounds(0, 10_000), WITH_CRITIC] = 0
    # Range of the bins, which should hold all returns.
    low: Annotated[Number, WITH_CRITIC, WITH_BINS] = 0.0
    high: Annotated[Number, WITH_CRITIC, WITH_BINS] = 1.0


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """A method: one function for each of its parts. The functions' keywords are settings (``settings.use``)."""

    # Advantage of a rollout: how its reward is compared with a baseline and scaled.
    advantage: Annotated[Chosen[facts.AdvantageFacts], WITH_ADVANTAGES_OR_TIES] = slot(
        advantages.ADVANTAGES | turns.ADVANTAGES,
        "rows",
        "grpo",
        facts=facts.AdvantageFacts,
    )
    # Reward terms, such as length penalties. They are added to the reward before the advantage is computed.
    reward_terms: Annotated[tuple[Chosen[facts.RewardTermFacts], ...], WITH_ADVANTAGES] = slot(
        shaping.REWARD_TERMS, "rows", (), facts=facts.RewardTermFacts, several=True
    )
    # Reshapings of the advantage, applied in order.
    reshaping: Annotated[tuple[Chosen[facts.ReshapingFacts], ...], WITH_ADVANTAGES] = slot(
        shaping.RESHAPINGS | turns.RESHAPINGS,
        "advantage, rows",
        (),
        facts=facts.ReshapingFacts,
        several=True,
    )
    # Overlong filter: leave truncated completions out of the loss and out of their group's baseline.
    overlong_filter: bool = False
    # Surrogate objective: the loss term of each token.
    surrogate: Chosen[facts.SurrogateFacts] = slot(SURROGATES, "tokens", "clipped", facts=facts.SurrogateFacts)
    # Old (proximal) policy: the denominator of the surrogate's ratios, and the centre of its trust region.
    old_policy: Chosen[facts.OldPolicyFacts] = slot(OLD_POLICIES, "tokens", "behaviour", facts=facts.OldPolicyFacts)
    # Off-policy correction: importance weights of the old policy against the behaviour policy (of the current policy,
    # if the surrogate has no ratio). There are two cases without importance weights: the surrogate's ratio is already
    # relative to the behaviour policy, or the surrogate needs no ratio. A correction can then only mask tokens, by the
    # ratio of the current policy to the behaviour policy.
    correction: Chosen[facts.CorrectionFacts] = slot(CORRECTIONS, "ratios", facts=facts.CorrectionFacts)
    # Step size: function that scales the learning rate in each optimizer step.
    step_size: Chosen[facts.StepSizeFacts] = slot(
        STEP_SIZES, "ratio_sum, ratio_square_sum, num_rows", facts=facts.StepSizeFacts
    )
    # Aggregation: weights of the tokens in the sum of their loss terms.
    aggregation: Chosen[facts.AggregationFacts] = slot(
        AGGREGATIONS, "mask, batch", "token_mean", facts=facts.AggregationFacts
    )
    # KL penalty: the policy that the current policy must stay close to.
    divergence: Chosen[facts.DivergenceFacts] = slot(
        DIVERGENCES,
        "tokens",
        facts=facts.DivergenceFacts,
        settings={"coefficient": (NotNegative, 0.04)},
    )
    # Reference reset: after these iterations the current policy becomes the reference, and the ring is emptied (ReMix:
    # 50 and 100).
    reference_reset_iterations: tuple[int, ...] = ()
    # Entropy bonus: the schedule of its weight. The coefficient is the initial weight.
    entropy_bonus: Chosen[facts.EntropyBonusFacts] = slot(
        ENTROPY_BONUSES,
        "coefficient, entropy",
        facts=facts.EntropyBonusFacts,
        settings={"coefficient": (NotNegative, 0.001)},
    )
    # Cross-entropies: further terms of the loss.
    cross_entropies: tuple[Chosen[facts.CrossEntropyFacts], ...] = slot(
        CROSS_ENTROPIES,
        "batch",
        (),
        facts=facts.CrossEntropyFacts,
        several=True,
        settings={"coefficient": (NotNegative, 0.05)},
    )
    # Critic: the value head, for an advantage that needs values.
    critic: CriticConfig = CriticConfig()

    @functools.cached_property
    def of_credit(self) -> tuple[Chosen[Any], ...]:
        """Functions that see the rollouts of an iteration once: their facts are ``facts.CreditFacts``."""
        return (self.advantage, *self.reward_terms, *self.reshaping)

    @functools.cached_property
    def of_loss(self) -> tuple[Chosen[Any], ...]:
        """Functions that see the tokens of each batch: their facts are ``facts.LossFacts``."""
        functions: tuple[Chosen[Any], ...] = (self.surrogate, self.old_policy, self.divergence)
        return tuple(chosen for chosen in functions if chosen)

    @functools.cached_property
    def columns(self) -> frozenset[str]:
        """Columns that the functions need of each row (inputs.COLUMNS, inputs.OTHER_POLICIES)."""
        return frozenset().union(*(chosen.facts.columns for chosen in (*self.of_credit, *self.of_loss)))

    def functions(self) -> Iterator[tuple[str, Chosen[Any]]]:
        """Yield (path, function) of every part of the method."""
        for field in dataclasses.fields(self):
            if "slot" in field.metadata:
                places = field.metadata["slot"].places(getattr(self, field.name), f"algorithm.{field.name}")
                yield from places.items()

    def loss_needs(self, name: str) -> bool:
        """Return whether the loss reads a column."""
        return any(name in chosen.facts.columns for chosen in self.of_loss)

    @property
    def imitates(self) -> bool:
        """Whether the loss trains on external answers without changing them."""
        return any(chosen.facts.others for chosen in self.cross_entropies)

    @property
    def looks_at_parts(self) -> bool:
        """Whether the advantage compares the scores of each reward function separately."""
        return self.advantage.facts.by_part is not None

    @property
    def tied_teaches(self) -> bool:
        """Whether a group of equal rewards can have an advantage other than 0."""
        advantage = self.advantage.facts
        return not advantage.siblings or advantage.tied_teaches(self.advantage.settings)

    def compared(self, parts: facts.Parts, where: Callable[..., Any]) -> facts.Parts:
        """Return (values, weight) by reward function as the advantage compares them. ``where`` is jax's or numpy's."""
        by_part = self.advantage.facts.by_part
        return parts if by_part is None else by_part(parts, self.advantage.settings, where)

    @property
    def average_decay(self) -> float:
        """Decay of the moving average of the weights, per optimizer step."""
        return next(chosen["decay"] for chosen in self.of_loss if "average_logp" in chosen.facts.columns)


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    # Capacity: number of rollouts in the ring; 0 = the rollouts of one iteration (on-policy).
    capacity: int = 0
    # Capacity in tokens, without padding. The oldest rollouts are overwritten first; 0 = every rollout at full length.
    capacity_tokens: int = 0
    # Positive bias: share of the capacity that is reserved for correct rollouts (rewards.pass_threshold). It keeps the
    # newest correct rollouts that the rest of the ring has overwritten.
    positive_fraction: Share = 0.0
    # Admission to the share of positive_fraction: "correct" rollouts, or "likely" rollouts. A rollout is likely if its
    # mean log-probability per token is at least that of the rollouts that overwrite it.
    admission: Annotated[Chosen[facts.AdmissionFacts], WITH_SECOND_RING] = slot(
        ADMISSIONS,
        "evicted, rows, pass_threshold",
        "correct",
        facts=facts.AdmissionFacts,
    )
    # Draw weights, in proportion to which rollouts are drawn: "uniform", "priority" (priority ** exponent), "age"
    # (exp(-age / scale_iterations)), "fresh_or_older" (each batch has either fresh rollouts, from this iteration, or
    # older rollouts), or "uniform_then_fresh" (from some iteration on only fresh rollouts).
    draw: Chosen[facts.DrawFacts] = slot(DRAWS, "stored", "uniform", facts=facts.DrawFacts)
    # Priority of a rollout for draw="priority": "advantage" (absolute value), "reward" (0 if negative), "length"
    # (tokens of the completion) or "surprise" (minus the mean log-probability of its tokens when they were drawn).
    priority: Annotated[Chosen[facts.PriorityFacts], WITH_PRIORITIES] = slot(
        PRIORITIES, "rows", "advantage", facts=facts.PriorityFacts
    )
    # Staleness limit: largest age of a rollout that may be drawn, in iterations since insertion; 0 = no limit.
    max_age_steps: int = 0
    # Delay: draw only rollouts of exactly this age in iterations (staleness without reuse); 0 = no delay.
    delay_iterations: int = 0
    # Reuse: number of times that a rollout may be drawn; 0 = no limit.
    max_uses: int = 0
    # Fresh share: share of each update batch from rollouts inserted in this iteration. The rest comes from older
    # rollouts, if there are enough. The draw "fresh_or_older" instead chooses one of the two for a whole batch.
    fresh_fraction: Share = 0.0
    # Unit of a draw: "group" (all samples of a prompt, as neighbours) or "rollout" (each by itself). If a micro-batch
    # holds whole groups, the learner computes their prompt once.
    unit: Literal["group", "rollout"] = "group"
    # Tied groups: draw none of their rollouts. If the advantage compares siblings, a group is tied if all its scores
    # are equal (unless "amplify_positive" gives it an advantage). Otherwise a group without an advantage is tied.
    skip_tied: bool = False
    # Latest visit: draw only the rollouts of each question's latest visit. Visits without a rollout that may be drawn
    # are ignored.
    latest_visit: bool = False
    # Effective sample size: never draw the rollouts of an age again if their effective sample size
    # (update/ess_frac_age_...) falls below this number; 0 = draw all.
    min_ess: Share = 0.0
    # Retirement: which new rollouts are never drawn. Earlier rollouts of their questions are retired too. "solved":
    # groups of which at least a share is correct.
    retirement: Chosen[facts.RetirementFacts] = slot(RETIREMENTS, "rows, pass_threshold", facts=facts.RetirementFacts)
    # Cost ratio: seconds to generate a rollout divided by seconds to train on a rollout. Curves over compute use it; 0
    # = as measured.
    cost_ratio: float = 0.0
    # Number of shards of the ring; 0 = the mesh's data-parallel size. Set it to get the same draws on another mesh.
    shards: int = 0
    # Memory of the rows: "device", or "host" for a large capacity (pinned; only inserted and drawn rows are copied).
    memory: Literal["device", "host"] = "device"

    # Settings of earlier versions: the value that had no effect, and the setting that replaces it.
    REPLACED_SETTINGS: ClassVar[dict[str, tuple[Any, str]]] = {
        "solved_fraction": (0.0, "replay.retirement=solved and replay.retirement.share"),
        "fresh_batches": (
            False,
            "replay.draw=fresh_or_older and replay.draw.fresh_share (with replay.fresh_fraction=0)",
        ),
        "fresh_from_iteration": (
            0,
            "replay.draw=uniform_then_fresh (or fresh_or_older) and replay.draw.fresh_from_iteration",
        ),
    }

    @property
    def reads_priority(self) -> bool:
        """Whether draws depend on the rows' priorities."""
        return "priority" in reads_of_draw(self.draw)
