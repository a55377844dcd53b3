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

LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")

# Conditions under which a run reads a setting.
WITH_ADAPTERS = ReadWhen(lambda c: c.model.lora.rank > 0, "with model.lora.rank=0")
WITH_MODULES = ReadWhen(lambda c: c.model.lora.modules > 1, "with model.lora.modules=1")
WITH_TURNS = ReadWhen(lambda c: c.environments.factory != "", "without environments.factory")
WITH_CRITIC = ReadWhen(lambda c: c.has_critic, "without a critic (algorithm.advantage='gae' has one)")
WITH_BINS = ReadWhen(lambda c: c.algorithm.critic.bins > 0, "with algorithm.critic.bins=0")
WITH_SECOND_RING = ReadWhen(lambda c: c.replay.positive_fraction > 0, "with replay.positive_fraction=0")
WITH_PRIORITIES = ReadWhen(lambda c: c.replay.reads_priority, "with a replay.draw that reads no priority")
NO_ADVANTAGE = "with an algorithm.surrogate that reads no advantage"
WITH_ADVANTAGES = ReadWhen(lambda c: c.reads_advantage, NO_ADVANTAGE)
WITH_ADVANTAGES_OR_TIES = ReadWhen(lambda c: c.reads_function_of_advantage, NO_ADVANTAGE)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    # Rank of the adapters (LoRA): they learn, in float32, and the weights of model.path do not; 0 = no adapters.
    rank: Annotated[int, Bounds(0, 1024)] = 0
    # What adapters add is multiplied by alpha / rank.
    alpha: Annotated[Positive, WITH_ADAPTERS] = 32.0
    # Rank-stabilised: by alpha / sqrt(rank) instead.
    rank_stabilised: Annotated[bool, WITH_ADAPTERS] = False
    # Weight-decomposed (DoRA): the length of each row of weights, an output's, is learned too.
    dora: Annotated[bool, WITH_ADAPTERS] = False
    # Matrices of each layer that have one.
    targets: Annotated[tuple[Literal["q", "k", "v", "o", "gate", "up", "down"], ...], WITH_ADAPTERS] = LORA_TARGETS
    # Folder of adapters (PEFT) to start from, of this rank, scale and targets; "" = new ones, which add nothing yet.
    path: Annotated[str, WITH_ADAPTERS] = ""
    # Modules: equal parts of the rank of which one learns at a time (DPS-LoRA): the next begins where rewards stall.
    modules: Annotated[Count, WITH_ADAPTERS] = 1
    # Stall: when the batches' mean rewards of the last so many optimizer steps of a module have no slope above 0.
    module_steps: Annotated[int, Bounds(2, 10_000), WITH_MODULES] = 20


@dataclasses.dataclass(frozen=True)
class EnvironmentsConfig:
    # Environment that answers the policy's turns, so that a completion has several: "package.module:name" or
    # "path/to/file.py:name" of a class with TRL's interface, a function or an agent
    # (docs/reference/environments.md); "" = none.
    factory: str = ""
    # Turns of the policy in a completion, at most.
    max_turns: Annotated[Count, WITH_TURNS] = 4
    # Longest turn of the policy in tokens: one that has not ended by then ends the completion, as cut; 0 = no limit but
    # sampling.max_completion_tokens, which is that of all turns and answers together.
    max_turn_tokens: Annotated[CountOrZero, WITH_TURNS] = 0
    # Longest answer in tokens, with what the chat template puts around it. It counts in max_completion_tokens.
    max_answer_tokens: Annotated[Count, WITH_TURNS] = 64
    # Workers: processes that answer. An episode stays with one.
    num_workers: Annotated[int, Bounds(1, 1024), WITH_TURNS] = 2
    # Timeout: seconds an answer may take before its process is replaced.
    timeout_s: Annotated[float, Bounds(0.01, 86400.0), WITH_TURNS] = 10.0


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The value head, which a run has if a function of its method needs "value"."""

    # Gradient share: what of the value loss's gradient the critic's head passes on into the policy's hidden states,
    # which it reads; 0 = none. The head itself always has all of it.
    gradient_share: Annotated[NotNegative, WITH_CRITIC] = 0.1
    # Learning rate of the head; else as the policy's (schedule, clip, decay).
    learning_rate: Annotated[Rate, WITH_CRITIC] = 1e-3
    # Value clip: how far from its value at rollout time a prediction gains from moving, in units of reward; 0 = any
    # distance.
    clip: Annotated[NotNegative, WITH_CRITIC] = 0.0
    # Bins: values are the mean of a distribution over this many equal bins (HL-Gauss); 0 = one number, squared error.
    bins: Annotated[int, Bounds(0, 10_000), WITH_CRITIC] = 0
    # Range of the bins, which should hold all returns.
    low: Annotated[Number, WITH_CRITIC, WITH_BINS] = 0.0
    high: Annotated[Number, WITH_CRITIC, WITH_BINS] = 1.0


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """A method: a function in each place, with its keywords as settings (``settings.use``)."""

    # Advantage of a rollout: what its reward is compared with, and the scale.
    advantage: Annotated[Chosen[facts.AdvantageFacts], WITH_ADVANTAGES_OR_TIES] = slot(
        advantages.ADVANTAGES | turns.ADVANTAGES, "rows", "grpo", facts=facts.AdvantageFacts
    )
    # Reward terms, such as length penalties. They are added to the reward before the advantage is computed.
    reward_terms: Annotated[tuple[Chosen[facts.RewardTermFacts], ...], WITH_ADVANTAGES] = slot(
        shaping.REWARD_TERMS, "rows", (), facts=facts.RewardTermFacts, several=True
    )
    # Reshapings of the advantage, applied in order.
    reshaping: Annotated[tuple[Chosen[facts.ReshapingFacts], ...], WITH_ADVANTAGES] = slot(
        shaping.RESHAPINGS | turns.RESHAPINGS, "advantage, rows", (), facts=facts.ReshapingFacts, several=True
    )
    # Overlong filter: leave truncated completions out of the loss and out of their group's baseline.
    overlong_filter: bool = False
    # Surrogate objective: the loss term of each token.
    surrogate: Chosen[facts.SurrogateFacts] = slot(SURROGATES, "tokens", "clipped", facts=facts.SurrogateFacts)
    # Old (proximal) policy: the denominator of ratios.
    old_policy: Chosen[facts.OldPolicyFacts] = slot(OLD_POLICIES, "tokens", "behaviour", facts=facts.OldPolicyFacts)
    # Off-policy correction: importance weights of the old policy against the behaviour policy (of the current policy,
    # if the surrogate has no ratio). If the surrogate's ratio is already to the behaviour policy, or if the surrogate
    # needs no ratio, a correction can only mask tokens, by the ratio of the current policy.
    correction: Chosen[facts.CorrectionFacts] = slot(CORRECTIONS, "ratios", facts=facts.CorrectionFacts)
    # Step size: factor of the learning rate in each optimizer step.
    step_size: Chosen[facts.StepSizeFacts] = slot(
        STEP_SIZES, "ratio_sum, ratio_square_sum, num_rows", facts=facts.StepSizeFacts
    )
    # Aggregation: weights of the tokens in the sum of their loss terms.
    aggregation: Chosen[facts.AggregationFacts] = slot(
        AGGREGATIONS, "mask, batch", "token_mean", facts=facts.AggregationFacts
    )
    # KL penalty: the policy that the current policy must stay close to.
    divergence: Chosen[facts.DivergenceFacts] = slot(
        DIVERGENCES, "tokens", facts=facts.DivergenceFacts, settings={"coefficient": (NotNegative, 0.04)}
    )
    # Reference reset: after these iterations the current policy becomes the reference, and the ring is emptied (ReMix:
    # 50 and 100).
    reference_reset_iterations: tuple[int, ...] = ()
    # Entropy bonus: how its weight changes. The coefficient is the first weight.
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
    # Critic, for an advantage that needs one.
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
        """Yield (path, function) of every place."""
        for field in dataclasses.fields(self):
            if "slot" in field.metadata:
                places = field.metadata["slot"].places(getattr(self, field.name), f"algorithm.{field.name}")
                yield from places.items()

    def loss_needs(self, name: str) -> bool:
        """Return whether the loss reads a column."""
        return any(name in chosen.facts.columns for chosen in self.of_loss)

    @property
    def imitates(self) -> bool:
        """Whether the loss trains on the answers of others as they are."""
        return any(chosen.facts.others for chosen in self.cross_entropies)

    @property
    def looks_at_parts(self) -> bool:
        """Whether the advantage compares the scores of each reward function separately."""
        return self.advantage.facts.by_part is not None

    @property
    def tied_teaches(self) -> bool:
        """Whether a group of equal rewards has an advantage."""
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
    # Capacity: rollouts the device ring holds; 0 = one iteration's worth (on-policy).
    capacity: int = 0
    # Capacity in tokens, without padding: the oldest go where there are more; 0 = every rollout at full length.
    capacity_tokens: int = 0
    # Positive bias: share of the capacity for the newest evicted rollouts that were correct (rewards.pass_threshold).
    positive_fraction: Share = 0.0
    # Admitted to that share: "correct" rollouts, or those as "likely" in mean log-prob a token as their successors.
    admission: Annotated[Chosen[facts.AdmissionFacts], WITH_SECOND_RING] = slot(
        ADMISSIONS, "evicted, rows, pass_threshold", "correct", facts=facts.AdmissionFacts
    )
    # Draw weights, how likely a rollout is drawn: "uniform", "priority" (priority ** exponent), "age"
    # (exp(-age / scale_iterations)), "fresh_or_older" (each batch has either fresh or older rollouts), or
    # "uniform_then_fresh" (from some iteration on only fresh rollouts).
    draw: Chosen[facts.DrawFacts] = slot(DRAWS, "stored", "uniform", facts=facts.DrawFacts)
    # Priority, what draw="priority" looks at: "advantage" (its absolute value), "reward" (0 where negative), "length"
    # (tokens of the completion) or "surprise" (minus the mean log-prob of its tokens when they were drawn).
    priority: Annotated[Chosen[facts.PriorityFacts], WITH_PRIORITIES] = slot(
        PRIORITIES, "rows", "advantage", facts=facts.PriorityFacts
    )
    # Staleness limit: oldest rollout that may be drawn, in iterations since insertion; 0 = no limit.
    max_age_steps: int = 0
    # Delay: draw only rollouts exactly this old, in iterations, staleness without reuse; 0 = no delay.
    delay_iterations: int = 0
    # Reuse: times a rollout may be drawn; 0 = no limit.
    max_uses: int = 0
    # Fresh share of each update batch: rollouts inserted in this iteration; the others are older ones while there are
    # any. The draw "fresh_or_older" chooses for each batch as a whole.
    fresh_fraction: Share = 0.0
    # Unit of a draw: "group" (all samples of a prompt, side by side; where a micro-batch holds whole groups the learner
    # computes their prompt once), or "rollout" (each by itself).
    unit: Literal["group", "rollout"] = "group"
    # Tied groups: draw none of their rollouts. Where siblings are compared, a group is tied whose rewards as scored are
    # all equal (unless "amplify_positive" gives it an advantage), elsewhere one without an advantage.
    skip_tied: bool = False
    # Latest visit: draw of each question only the rollouts of its latest visit that left any to draw.
    latest_visit: bool = False
    # Effective sample size: give up rollouts of an age whose effective sample size (update/ess_frac_age_...) fell below
    # this; 0 = draw all.
    min_ess: Share = 0.0
    # Retirement: new rollouts that are never drawn, nor earlier rollouts of their prompts: "solved" (groups of which at
    # least a ``share`` is correct).
    retirement: Chosen[facts.RetirementFacts] = slot(RETIREMENTS, "rows, pass_threshold", facts=facts.RetirementFacts)
    # Cost ratio: seconds to generate a rollout over seconds to train on one, for the curves' compute; 0 = as measured.
    cost_ratio: float = 0.0
    # Shards of the ring; 0 = the mesh's data-parallel size. Fix it to get the same draws on another mesh.
    shards: int = 0
    # Memory, where the rows lie: "device", or for a large capacity "host" (pinned; rows inserted or drawn alone move).
    memory: Literal["device", "host"] = "device"

    # Settings of earlier versions: the value without effect, and what to set instead.
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
