"""Settings of methods: the functions a method is made of (algorithms), what the ring keeps and gives, adapters.

Owns: names, types, defaults of these, what the chosen functions need together and of the rest. Does not know: sizes
that fit together (limits), the rest of a run (config).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from jaxrl_llm.algorithms import advantages, shaping, turns
from jaxrl_llm.algorithms.aggregation import AGGREGATIONS, CROSS_ENTROPIES
from jaxrl_llm.algorithms.corrections import CORRECTIONS, STEP_SIZES
from jaxrl_llm.algorithms.divergences import ANCHORS, ENTROPY_BONUSES
from jaxrl_llm.algorithms.draw_weights import ADMISSIONS, DRAWS, PRIORITIES
from jaxrl_llm.algorithms.inputs import COLUMNS, MADE_BY_CREDIT, OTHER_POLICIES, reward_columns
from jaxrl_llm.algorithms.old_policies import OLD_POLICIES
from jaxrl_llm.algorithms.surrogates import SURROGATES
from jaxrl_llm.algorithms.tracing import reads_of_draw, reads_of_surrogate
from jaxrl_llm.algorithms.use import Chosen, Needs, slot
from jaxrl_llm.settings.schema import Bounds, Count, CountOrZero, NotNegative, Number, Positive, Rate, ReadWhen, Share

LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")

# When settings are read that others switch on.
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


# What a surrogate may ask of the functions in other places, by the fact that these must declare, and why.
ASKED_BY_SURROGATES = {
    "advantage": {"is_centred_reward": "a regression on the reward less its group's mean"},
    "aggregation": {
        "counts_rows_alike": "whose loss is a mean over rows, long and short ones alike",
        "sums_tokens": "whose loss is a sum over the tokens of a row",
    },
}


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
    """A method: a function in each place, with its keywords as settings (``algorithms.use``)."""

    # Advantage: what a reward is compared with, and over which scale.
    advantage: Annotated[Chosen, WITH_ADVANTAGES_OR_TIES] = slot(
        advantages.ADVANTAGES | turns.ADVANTAGES, "rows", "grpo"
    )
    # Reward terms, added to the reward before the advantage is taken: length penalties and the like.
    reward_terms: Annotated[tuple[Chosen, ...], WITH_ADVANTAGES] = slot(shaping.REWARD_TERMS, "rows", (), several=True)
    # Reshapings of the advantage, one after the other.
    reshaping: Annotated[tuple[Chosen, ...], WITH_ADVANTAGES] = slot(
        shaping.RESHAPINGS | turns.RESHAPINGS, "advantage, rows", (), several=True
    )
    # Overlong filter: leave truncated completions out of the loss and out of their group's baseline.
    overlong_filter: bool = False
    # Surrogate objective: the loss term of each token.
    surrogate: Chosen = slot(SURROGATES, "tokens", "clipped")
    # Old (proximal) policy, which ratios are against.
    old_policy: Chosen = slot(OLD_POLICIES, "tokens", "behaviour")
    # Off-policy correction: what becomes of tokens that the behaviour policy drew and the old one (without a ratio in
    # the surrogate: the current one) did not. Where the surrogate's own ratio is to the behaviour policy, or it needs
    # none, a correction can but mask, by the current policy's ratio.
    correction: Chosen = slot(CORRECTIONS, "ratios")
    # Step size: what the learning rate is multiplied by in a step.
    step_size: Chosen = slot(STEP_SIZES, "ratio_sum, ratio_square_sum, num_rows")
    # Aggregation: the weights that tokens are added up by.
    aggregation: Chosen = slot(AGGREGATIONS, "mask, batch", "token_mean")
    # KL penalty, by what it is to.
    divergence: Chosen = slot(ANCHORS, "tokens", settings={"coefficient": (NotNegative, 0.04)})
    # Reference reset: after these iterations the reference becomes the policy of then, and the ring is emptied (ReMix:
    # 50 and 100).
    reference_reset_iterations: tuple[int, ...] = ()
    # Entropy bonus, by how its weight moves; the coefficient is where it starts.
    entropy_bonus: Chosen = slot(
        ENTROPY_BONUSES, "coefficient, entropy", settings={"coefficient": (NotNegative, 0.001)}
    )
    # Cross-entropies that are trained on besides.
    cross_entropies: tuple[Chosen, ...] = slot(
        CROSS_ENTROPIES, "batch", (), several=True, settings={"coefficient": (NotNegative, 0.05)}
    )
    # Critic of an advantage that needs one.
    critic: CriticConfig = CriticConfig()

    @functools.cached_property
    def of_credit(self) -> tuple[Chosen, ...]:
        """Functions that see an iteration's rollouts, once."""
        return (self.advantage, *self.reward_terms, *self.reshaping)

    @functools.cached_property
    def of_loss(self) -> tuple[Chosen, ...]:
        """Functions that see the tokens of each batch."""
        return tuple(one for one in (self.surrogate, self.old_policy, self.divergence) if one)

    @functools.cached_property
    def columns(self) -> frozenset[str]:
        """What its functions need of each row (views.COLUMNS, views.OTHER_POLICIES)."""
        return frozenset().union(*(one.needs.columns for one in (*self.of_credit, *self.of_loss)))

    def functions(self) -> Iterator[tuple[str, Chosen]]:
        """(path, function) of every place."""
        for field in dataclasses.fields(self):
            value, path = getattr(self, field.name), f"algorithm.{field.name}"
            if isinstance(value, Chosen):
                yield path, value
            elif "slot" in field.metadata:
                yield from ((f"{path}.{one.name}", one) for one in value)

    def loss_needs(self, name: str) -> bool:
        """Whether the loss reads a column."""
        return any(name in one.needs.columns for one in self.of_loss)

    @property
    def imitates(self) -> bool:
        """Whether answers of others are trained on as they are."""
        return any(one.fact("others", False) for one in self.cross_entropies)

    @property
    def looks_at_parts(self) -> bool:
        """Whether scores of reward functions are looked at one by one."""
        return bool(self.advantage.fact("by_part", False))

    @property
    def tied_teaches(self) -> bool:
        """Whether a group of equal rewards has an advantage."""
        teaches = self.advantage.fact("tied_teaches", lambda settings: False)
        return not self.advantage.needs.siblings or teaches(self.advantage.settings)

    def compared(self, parts: Any, where: Any) -> Any:
        """What of (values, weight) by reward function the advantage compares; ``where`` is jax's or numpy's."""
        by_part = self.advantage.fact("by_part")
        return by_part(parts, self.advantage.settings, where) if callable(by_part) else parts

    @property
    def average_decay(self) -> float:
        """Decay of the moving average of the weights, per optimizer step."""
        return next(one["decay"] for one in self.of_loss if "average_logp" in one.needs.columns)


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    # Capacity: rollouts the device ring holds; 0 = one iteration's worth (on-policy).
    capacity: int = 0
    # Capacity in tokens, without padding: the oldest go where there are more; 0 = every rollout at full length.
    capacity_tokens: int = 0
    # Positive bias: share of the capacity for the newest evicted rollouts that were correct (rewards.pass_threshold).
    positive_fraction: Share = 0.0
    # Admitted to that share: "correct" rollouts, or those as "likely" in mean log-prob a token as their successors.
    admission: Annotated[Chosen, WITH_SECOND_RING] = slot(ADMISSIONS, "evicted, rows, pass_threshold", "correct")
    # Draw weights, how likely a rollout is drawn: "uniform", "priority" (priority ** exponent) or "age"
    # (exp(-age / scale_iterations)).
    draw: Chosen = slot(DRAWS, "stored", "uniform")
    # Priority, what draw="priority" looks at: "advantage" (its absolute value), "reward" (0 where negative), "length"
    # (tokens of the completion) or "surprise" (minus the mean log-prob of its tokens when they were drawn).
    priority: Annotated[Chosen, WITH_PRIORITIES] = slot(PRIORITIES, "rows", "advantage")
    # Staleness limit: oldest rollout that may be drawn, in iterations since insertion; 0 = no limit.
    max_age_steps: int = 0
    # Delay: draw only rollouts exactly this old, in iterations, staleness without reuse; 0 = no delay.
    delay_iterations: int = 0
    # Reuse: times a rollout may be drawn; 0 = no limit.
    max_uses: int = 0
    # Fresh share of each update batch: rollouts inserted in this iteration; the others are older ones while there are
    # any. With fresh_batches the share of batches that are wholly fresh; the others have none while there are older.
    fresh_fraction: Share = 0.0
    fresh_batches: bool = False
    # From this iteration on (the first is 0) draw the rollouts of the same iteration alone; 0 = never.
    fresh_from_iteration: int = 0
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
    # Solved groups: never draw one of which at least this share is correct, nor earlier ones of its prompt; 0 = all.
    solved_fraction: Share = 0.0
    # Cost ratio: seconds to generate a rollout over seconds to train on one, for the curves' compute; 0 = as measured.
    cost_ratio: float = 0.0
    # Shards of the ring; 0 = the mesh's data-parallel size. Fix it to get the same draws on another mesh.
    shards: int = 0
    # Memory, where the rows lie: "device", or for a large capacity "host" (pinned; rows inserted or drawn alone move).
    memory: Literal["device", "host"] = "device"

    @property
    def reads_priority(self) -> bool:
        """Whether draws depend on the rows' priorities."""
        return "priority" in reads_of_draw(self.draw)


class MethodFacts:
    """What the method of a config asks for, as its properties."""

    algorithm: AlgorithmConfig

    def scaled(self) -> Any:
        """The same with ``update.scaled_from_batch_size`` carried out.

        Source: Hilton et al. 2021, arXiv:2110.00641, batch size-invariance with Adam: its step times sqrt(c), the
        centre of mass d / (1 - d) of averages over c. Differs: Adam's own decays stay.
        """
        if not self.update.scaled_from_batch_size:
            return self
        c = self.update.batch_size / self.update.scaled_from_batch_size
        decay = lambda d: d / (c * (1 - d) + d)
        a, replace = self.algorithm, dataclasses.replace
        average = {
            name: one.replace(decay=decay(one["decay"]))
            for name, one in (("old_policy", a.old_policy), ("divergence", a.divergence), ("surrogate", a.surrogate))
            if "average_logp" in one.needs.columns
        }
        if "norm_decay" in a.advantage.settings:
            average["advantage"] = a.advantage.replace(norm_decay=decay(a.advantage["norm_decay"]))
        critic = replace(a.critic, learning_rate=math.sqrt(c) * a.critic.learning_rate)
        return replace(
            self,
            update=replace(self.update, scaled_from_batch_size=0),
            optimizer=replace(self.optimizer, learning_rate=math.sqrt(c) * self.optimizer.learning_rate),
            algorithm=replace(a, critic=critic, **average),
        )

    def rows_per_prompt(self, ring_shards: int) -> int:
        """Neighbouring rows of a micro-batch whose prompt is computed once: a group where it holds whole ones."""
        whole = self.line_tokens or self.update.micro_batch_size % (ring_shards * self.rows_per_draw) == 0
        return self.rows_per_draw if whole else 1

    @property
    def keeps_reference(self) -> bool:
        """Whether rollouts carry their log-probs under the frozen starting model."""
        return "ref_logp" in self.algorithm.columns

    @property
    def keeps_old_logp(self) -> bool:
        """Whether rollouts carry the learner's log-probs under the weights that drew each token."""
        return "generation_logp" in self.algorithm.columns

    @property
    def keeps_entropy(self) -> bool:
        """Whether rollouts carry the entropy of what each token was drawn from, for credit."""
        return "entropy" in self.algorithm.columns

    @property
    def reward_columns(self) -> dict[str, tuple[int, ...]]:
        """Shapes per row of the columns that the method reads and that reward functions or environments make.

        "turn_reward" is not among them, because it follows from the scores.
        """
        max_turns = self.environments.max_turns if self.environments.factory else 1
        max_length = self.sampling.max_completion_tokens
        shapes = reward_columns(self.algorithm.columns, max_turns=max_turns, max_length=max_length)
        return {name: shape for name, shape in shapes.items() if name != "turn_reward"}

    @property
    def has_critic(self) -> bool:
        """Whether the learner has a value head beside the policy."""
        return "value" in self.algorithm.columns

    @property
    def reads_advantage(self) -> bool:
        """Whether a run depends on the rows' advantages: in its loss, or by which rows it draws."""
        r = self.replay
        by_priority = r.reads_priority and r.priority.fact("reads_advantage", True)
        return by_priority or "advantage" in reads_of_surrogate(self.algorithm.surrogate)

    @property
    def reads_function_of_advantage(self) -> bool:
        """Whether a run depends on the function of the advantage: on its values, or on whether tied groups have any."""
        return self.reads_advantage or self.replay.skip_tied or self.rollout.max_resample_rounds > 0

    @property
    def learns_without_rewards(self) -> bool:
        """Whether a term of the loss, as the method's functions declare it, has a gradient if all rewards are 0."""
        a = self.algorithm
        anchors = [one for one in (a.surrogate, a.divergence) if "ref_logp" in one.needs.columns]
        has_teacher = self.model.reference_path != "" and any(one.settings.get("coefficient", 1) for one in anchors)
        bonus = a.entropy_bonus
        acts = (
            has_teacher,
            bool(bonus) and (bonus["coefficient"] > 0 or bonus.fact("moves", True)),
            any(one["coefficient"] > 0 for one in a.cross_entropies),
            bool(a.reward_terms),
            self.update.load_balance > 0,
            any(one.source for _, one in a.functions()),  # what a function of the user's own does is not known
        )
        return any(acts)

    @property
    def keeps_average(self) -> bool:
        """Whether the learner keeps a moving average of its weights."""
        return "average_logp" in self.algorithm.columns

    @property
    def keeps_previous(self) -> bool:
        """Whether the learner keeps the weights from before the last iteration's updates."""
        return "previous_logp" in self.algorithm.columns

    def _rules_of_regression(self) -> Iterator[tuple[bool, str]]:
        """Yield (is kept, complaint) of what a surrogate asks of the advantage and of the aggregation.

        A surrogate names for each of the two places the fact that the function there must declare (``algorithms.use``).
        """
        a, surrogate = self.algorithm, self.algorithm.surrogate
        slots = {field.name: field.metadata.get("slot") for field in dataclasses.fields(a)}
        for place, reasons in ASKED_BY_SURROGATES.items():
            asked, table = surrogate.fact(place), slots[place].table
            fitting = [name for name, one in table.items() if getattr(one, "needs", Needs()).facts.get(asked)]
            yield (
                asked is None or bool(getattr(a, place).fact(asked, False)),
                f"[algorithm.{place}] must be {' or '.join(map(repr, fitting))} for [algorithm.surrogate], "
                f"{reasons.get(asked)}: set algorithm.{place}={fitting[0] if fitting else ''}, or choose another "
                "algorithm.surrogate",
            )
        yield (
            surrogate.fact("advantage") is None or not a.reshaping,
            "[algorithm.reshaping] must be () for [algorithm.surrogate], whose optimum is that of rewards as they are: "
            "leave it out, or choose another algorithm.surrogate",
        )

    def rules_of_method(self, flat: dict[str, Any]) -> Iterator[tuple[bool, str]]:
        """(is kept, what to say otherwise) of what functions need of each other and of the rest, as in ``limits``."""
        c, a, r, e = self, self.algorithm, self.replay, self.external
        lone, in_groups = c.rollout.group_size == 1, r.unit == "group"
        held = (c.ring_capacity - round(r.positive_fraction * c.ring_capacity)) // c.rows_per_iteration  # iterations
        for name, must, why in (
            ("replay.positive_fraction", in_groups, "but with replay.unit='rollout': rows are kept one by one"),
            ("replay.positive_fraction", r.capacity_tokens > 0, "with [replay.capacity_tokens]: it has no pages"),
            ("replay.positive_fraction", 0 < r.max_age_steps < held, f"with [replay.max_age_steps] below {held}"),
            ("rollout.max_resample_rounds", lone, "for rollout.group_size=1, which is always tied"),
            ("rollout.max_resample_rounds", a.tied_teaches, "for [algorithm.advantage]: a tied group teaches it"),
            ("rollout.max_lag_iterations", not c.rollout.lookahead_prompts, "without rollout.lookahead_prompts"),
            ("algorithm.critic.clip", a.critic.bins > 0, "for [algorithm.critic.bins]: a clip is of a number"),
        ):
            yield not must or flat[name] == 0, f"[{name}] must be 0 {why}"
        yield (
            c.rollout.lookahead_prompts > 0 or c.rollout.stale_cache == "recompute",
            "[rollout.stale_cache] must be 'recompute' without rollout.lookahead_prompts: then no answer goes on under "
            "other weights",
        )
        n, alone = c.environments, "with environments.factory: the policy's own ends are what ends its turns"
        for name, none in (("sampling.stop_strings", ()), ("external.groups_per_iteration", 0)):
            yield n.factory == "" or flat[name] == none, f"[{name}] must be {none!r} {alone}"
        yield (
            n.factory == "" or not c.metrics.share_rollouts,
            "[metrics.share_rollouts] must be False with environments.factory: what is shared has one turn",
        )
        yield (
            n.factory == "" or n.max_answer_tokens + 2 <= c.sampling.max_completion_tokens,
            "[environments.max_answer_tokens] must leave room in [sampling.max_completion_tokens] for two turns, which "
            "[environments.factory] asks for",
        )
        yield (
            n.factory != "" or "environment" not in c.rewards.functions,
            "[rewards.functions] has 'environment', which needs environments.factory",
        )
        yield (
            not a.imitates or bool(e.paths),
            "[algorithm.cross_entropies] has nothing to imitate without external.groups_per_iteration",
        )
        yield (
            c.prompts.max_tokens > 1 or all(x.fact("reads") != "prompt_logp" for x in a.cross_entropies),
            "[prompts.max_tokens] must be at least 2 for [algorithm.cross_entropies]: a prompt's first token is not "
            "predicted",
        )
        for name, function in (("advantage", a.advantage), ("surrogate", a.surrogate)):
            is_fine = c.rollout.group_size > 1 or not function.needs.siblings
            yield is_fine, f"[rollout.group_size] must be at least 2 for [algorithm.{name}], which compares siblings"
        yield (
            r.unit == "group" or not a.surrogate.needs.siblings,
            "[replay.unit] must be 'group' for [algorithm.surrogate], which compares the rows of a group",
        )
        yield (
            not a.surrogate.needs.siblings or c.update.micro_batch_size % c.rollout.group_size == 0,
            "[update.micro_batch_size] must be a multiple of [rollout.group_size] for [algorithm.surrogate], which "
            "compares the rows of a group",
        )
        resets = a.reference_reset_iterations
        yield (
            not resets or (c.keeps_reference and c.model.reference_path == "" and min(resets) > 0),
            "[algorithm.reference_reset_iterations] must be () or numbers from 1 on with a reference that is read "
            "(algorithm.divergence) and is the run's own ([model.reference_path])",
        )
        yield (
            a.critic.bins != 1 and a.critic.low < a.critic.high,
            "[algorithm.critic.bins] must be 0 or at least 2, and [algorithm.critic.low] below [algorithm.critic.high]",
        )
        is_behaviour, reads_old = a.old_policy.fact("is_behaviour", False), a.surrogate.fact("base") == "old"
        yield (
            is_behaviour or reads_old or a.surrogate.fact("reads_old", False),
            "[algorithm.old_policy] must be 'behaviour' for [algorithm.surrogate], which has no old policy",
        )
        yield (
            not (is_behaviour and a.surrogate.fact("centred_on_old", False)),
            "[algorithm.old_policy] must be another for [algorithm.surrogate]: the window would lie about 1",
        )
        has_weight = a.surrogate.fact("base") == "policy" or (reads_old and not is_behaviour)
        yield (
            not a.correction or has_weight or a.correction.fact("masks", False),
            "[algorithm.correction] must be 'none' or one that masks for [algorithm.surrogate] with "
            "[algorithm.old_policy], which leaves no importance weight over",
        )
        yield (
            not a.correction.fact("of_token", False) or a.surrogate.fact("of_token", False),
            "[algorithm.correction] must be another for [algorithm.surrogate]: it bounds the ratio of a token",
        )
        yield from self._rules_of_regression()
        of_tokens = {"value", "turn_reward"} & {*a.advantage.needs.columns}
        yield (
            not of_tokens or not any(x.fact("of_row", False) for x in a.reshaping),
            "[algorithm.reshaping] is of a row's advantage, and that of [algorithm.advantage] is of a token",
        )
        decays = {x["decay"] for x in a.of_loss if "average_logp" in x.needs.columns and "decay" in x.settings}
        yield (
            len(decays) < 2,
            "[algorithm.old_policy.decay] and [algorithm.divergence.decay] must be equal: there is one average",
        )
        unstored = {name for name, column in COLUMNS.items() if not column.is_stored}
        for path, one in a.functions():
            in_a_loss = {*OTHER_POLICIES, MADE_BY_CREDIT}
            unseen, who = (unstored, "do not") if one in a.of_loss else (in_a_loss, "alone")
            unseen = sorted(one.needs.columns & unseen)
            yield not unseen, f"{path}={one.name!r} must not need {unseen}, which functions of a loss {who} see"
            decay = one.settings.get("decay") if "average_logp" in one.needs.columns else 0.0
            yield (
                isinstance(decay, float) and 0 <= decay < 1,
                f"{path}={one.name!r} needs 'average_logp' and so a setting `decay`, a float in [0, 1)",
            )
            rule = one.fact("rule", lambda path, settings, config: "")(path, one.settings, c)
            yield not rule, rule
