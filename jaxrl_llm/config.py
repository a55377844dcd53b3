"""Configuration: frozen dataclasses, and ``freeze``, which turns a ``ConfigDict`` into a checked ``Config``.

A config file starts from ``defaults()`` and changes settings. The command line overrides settings with
``--config.a.b=VALUE``. ``freeze`` then makes the ``Config`` of the run, once. An unknown key, a wrong type and an
impossible combination raise a ``ConfigError`` with the key, the value and the allowed values. Every default has one
place.

Owns: names, types with their bounds, defaults. Does not know: the settings of methods (method_config), how a mapping
becomes dataclasses (settings.schema), which settings fit together (limits), devices, files, models.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Annotated, Any, Literal

import ml_collections

from jaxrl_llm import limits
from jaxrl_llm.algorithms.inputs import reward_columns
from jaxrl_llm.algorithms.tracing import reads_of_surrogate
from jaxrl_llm.method_config import AlgorithmConfig, EnvironmentsConfig, LoraConfig, ReplayConfig
from jaxrl_llm.settings import functions, moved, schema
from jaxrl_llm.settings.schema import (
    Bounds,
    ConfigError,
    Count,
    CountOrZero,
    Decay,
    Exponent,
    Number,
    Positive,
    Rate,
    ReadWhen,
    Share,
    as_mapping,
    flatten,
)
from jaxrl_llm.settings.use import Chosen

# Conditions under which a run reads a setting.
WITH_REFERENCE = ReadWhen(
    lambda c: c.keeps_reference,
    "without an algorithm.divergence or algorithm.surrogate that reads the reference",
)
WITH_FILTER = ReadWhen(
    lambda c: (c.sampling.top_k, c.sampling.top_p, c.sampling.min_p) != (0, 1.0, 0.0),
    "without sampling.top_k, sampling.top_p or sampling.min_p",
)
WITH_HELD_OUT = ReadWhen(lambda c: c.eval.num_prompts > 0, "with eval.num_prompts=0")
WITH_MOMENTS = ReadWhen(lambda c: c.optimizer.name != "adafactor", "with optimizer.name='adafactor'")
WITH_ROUNDED_SAMPLER = ReadWhen(lambda c: c.rollout.weights != "compute", "with rollout.weights='compute'")
WITH_ROWS_OF_OTHERS = ReadWhen(
    lambda c: c.prompts.source in limits.FILE_SOURCES or c.eval.name != "" or c.environments.factory != "",
    "with questions that prompts.source makes itself, without eval.name and environments.factory",
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    # The model: a Hugging Face folder, a GGUF file, a folder of a run, "smollm2-135m-instruct", a hub id, or
    # "random:PRESET" for random weights.
    path: str = "random:debug"
    # The frozen reference model, named like `path`. It must have the same token ids. If it is another model than
    # `path`, it is a teacher, and the penalty of algorithm.divergence becomes on-policy distillation. "" uses `path` as
    # it is before training.
    reference_path: Annotated[str, WITH_REFERENCE] = ""
    # The dtype of the forward pass.
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # The dtype of the trained weights and their gradient. With adapters, it is the dtype of the frozen weights.
    # bfloat16 needs half the memory, and optimizer steps are rounded stochastically.
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    # Rematerialisation: what the backward pass keeps. "none" keeps everything. "dots" keeps the inputs of layers and of
    # MLPs and the results of their matmuls. "full" keeps only the inputs of layers. "auto" is "dots" if that fits the
    # device, else "full"; on a CPU it is "full".
    remat: Literal["none", "dots", "full", "auto"] = "full"
    # Attention: "auto" uses a flash kernel on devices that have one (TPU; NVIDIA with bfloat16). "xla" never uses a
    # flash kernel.
    attention: Literal["auto", "xla"] = "auto"
    lora: LoraConfig = LoraConfig()
    # Routing replay: rollouts record the experts that the sampler chose for each token. The learner uses the same
    # experts.
    routing_replay: bool = False


@dataclasses.dataclass(frozen=True)
class PromptsConfig:
    # The source of the questions: files ("jsonl", "parquet", "code", "text"), "reasoning_gym", or a built-in source.
    source: Literal[
        "letters", "arithmetic", "maze", "kolmogorov", "reasoning_gym", "jsonl", "parquet", "code", "text", "grids"
    ] = "letters"
    # The name of the reasoning-gym dataset, the path of a file, or a pattern for several files ("train-*.parquet").
    name: str = ""
    # Arguments of the reasoning-gym dataset or of another source. docs/reference/questions.md lists the arguments of
    # each source.
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    # The number of questions to generate, or the largest number of questions to read from files. 0 reads all.
    size: int = 1024
    # The longest prompt in tokens. It is also the width of the prompt part of every row.
    max_tokens: Count = 32
    # The system message of prompts that have no system message of their own. "" keeps the chat template's default.
    system_prompt: str = ""
    # Whether prompts are wrapped in the model's chat template. If False, the text is the prompt.
    chat_template: bool = True
    # Additional arguments of the chat template: {"enable_thinking": False}, {"tools": [...]}.
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Whether text such as "<|im_end|>" in prompts and in external answers becomes a special token. If False, it stays
    # text.
    special_tokens: bool = False
    # What to do with a row that cannot be read. "error" stops before the run begins. "skip" reports and counts the row.
    bad_row: Annotated[Literal["error", "skip"], WITH_ROWS_OF_OTHERS] = "error"
    # What to do with a prompt of more than max_tokens tokens: "error" or "skip", as for bad_row.
    long_prompt: Literal["error", "skip"] = "error"
    # Whether each epoch visits the questions in a new random order.
    shuffle: bool = True
    # A question is retired when its pass rate over all answers so far reaches this value. 0 retires no question.
    retire_pass_rate: Share = 0.0

    @property
    def encoding(self) -> dict[str, Any]:
        """Settings that determine how prompts become token ids, for ``Tokenizer.encode_prompts``."""
        names = ("chat_template", "chat_template_kwargs", "system_prompt", "special_tokens")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    # The temperature of the softmax. 0 is greedy decoding, which only generate and evaluate allow.
    temperature: Annotated[float, Bounds(0.01, 100.0)] = 1.0
    # Top-k keeps the k most likely tokens. 0 keeps all.
    top_k: int = 0
    # Top-p keeps the smallest set of tokens with at least this probability mass. 1.0 keeps all.
    top_p: Annotated[float, Bounds(0.0, 1.0, closed=False)] = 1.0
    # Min-p keeps the tokens whose probability is at least this fraction of the largest probability. 0.0 keeps all.
    min_p: Share = 0.0
    # If top-k, top-p or min-p makes tokens impossible, at most this many of the most likely remaining ids are sampled
    # from. The ids are stored with each token (4 bytes each), so that the learner's ratio is over the same ids. 0 =
    # top_k if it is set, else 64. Evaluations and the command generate need no learner; they sample from all ids that
    # the filters leave.
    support_tokens: Annotated[CountOrZero, WITH_FILTER] = 0
    # The longest completion in tokens. The end-of-sequence token is included.
    max_completion_tokens: Count = 16
    # Completions end at the first stop string. The stop string stays in the completion.
    stop_strings: tuple[str, ...] = ()
    # Stop tokens by their text ("<|eot_id|>"). They end a completion like the model's own end tokens.
    stop_tokens: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    prompts_per_iteration: Count = 8
    # The number of completions of each prompt. 1 is allowed if algorithm.advantage does not compare the completions of
    # a prompt.
    group_size: Count = 8
    # The number of sequences that are decoded side by side. 0 = one for every rollout of the iteration.
    slots: int = 0
    # The number of decode steps after which finished slots take new rows.
    chunk_steps: Count = 8
    # The number of prompts that are started ahead, so that no slot is idle. A rollout can then have tokens of several
    # policy versions, which are recorded per token.
    lookahead_prompts: int = 0
    # What happens to the cached keys and values (or states) of an unfinished completion when the weights change.
    # "recompute" computes them again from the tokens: later tokens then come from exactly the new policy. "keep" uses
    # the cache of the older weights, which costs nothing. Caches of prompts are always computed again.
    stale_cache: Literal["recompute", "keep"] = "recompute"
    # Staleness gate: a prompt stays open for at most this many iterations after the iteration that started it. The
    # sampler waits for stragglers and starts fewer prompts ahead if necessary. A round of max_resample_rounds counts as
    # an iteration. 0 = no limit.
    max_lag_iterations: int = 0
    # Dynamic sampling: the largest number of times that an iteration samples prompts_per_iteration more prompts because
    # groups are tied (all rewards are equal). Groups with different rewards replace tied groups. Rollouts that are left
    # out count as generated. 0 = never.
    max_resample_rounds: Annotated[int, Bounds(0, 1000)] = 0
    # The weights of the sampler's matmuls. "compute" has them in model.compute_dtype. "int8" and "fp8" need one byte
    # per weight, "fp4" 3/4 of a byte. They are rounded again for every policy version. The sampler's probabilities then
    # differ from the learner's: see update.weights and algorithm.correction.
    weights: Literal["compute", "int8", "fp8", "fp4"] = "compute"


@dataclasses.dataclass(frozen=True)
class RewardsConfig:
    # Reward functions: "task" (the scorer of the task), "math" (math-verify against the column `answer`),
    # "package.module:function" or "path/to/file.py:function".
    functions: tuple[str, ...] = ("task",)
    # One weight for each function.
    weights: tuple[Number, ...] = (1.0,)
    # The number of processes that score completions.
    num_workers: Annotated[int, Bounds(1, 1024)] = 2
    # The time in seconds that a function may take for all completions of one prompt. After that its process is
    # replaced.
    timeout_s: Annotated[float, Bounds(0.01, 86400.0)] = 10.0
    # The run stops with a checkpoint if more than this fraction of an iteration's rewards failed.
    max_failure_frac: Share = 0.5
    # A rollout passes if its total reward is at least this value.
    pass_threshold: Number = 1.0


@dataclasses.dataclass(frozen=True)
class ExternalConfig:
    # Sources of external answers, used in turn: JSONL files (format: jaxrl_llm/actor/external.py), workdirs of runs
    # with metrics.share_rollouts, and functions that rewrite the run's own answers in hindsight
    # (actor/external_sources.py).
    paths: tuple[str, ...] = ()
    # The number of groups from these sources that enter the ring in each iteration, in addition to the run's own.
    groups_per_iteration: int = 0


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    # The number of rollouts in one optimizer step.
    batch_size: Count = 64
    # The number of rollouts in one forward and backward pass, over all devices.
    micro_batch_size: Count = 16
    # The number of tokens in one forward and backward pass, if rollouts are packed side by side in lines without
    # padding. 0 = rollouts are padded, and micro_batch_size applies.
    micro_batch_tokens: int = 0
    # The number of tokens of a packed line. It must hold the rows of one draw at full length. 0 = twice the number of
    # tokens of the rows of one draw.
    pack_width: int = 0
    # The weight of the balance cost of the experts' routers in the loss (models/moe.py). transformers uses 0.001.
    load_balance: Exponent = 0.0
    # The number of optimizer steps per iteration, all in one dispatch.
    updates_per_iteration: Count = 1
    # The weights of the learner's forward pass. "rollout" rounds them like rollout.weights, and the gradient goes to
    # the unrounded weights. "full" does not round.
    weights: Annotated[Literal["full", "rollout"], WITH_ROUNDED_SAMPLER] = "full"
    # The number of positions per device whose logits the learner holds at a time. 0 = a default for the device
    # (models.row_logp.chunk_tokens).
    logp_chunk_tokens: int = 0
    # The batch size for which learning rates and decays of averages (of the weights, `norm_decay` of advantages) are
    # chosen. With c times as many rollouts in a step and in an iteration, rates are multiplied by sqrt(c), and the
    # number of steps that a decay averages over is divided by c. Each rollout then has about the same effect as with
    # the reference batch size. 0 = batch_size.
    scaled_from_batch_size: int = 0
    # Training is refused if the log-probabilities of learner and sampler differ by more than this many nats on the
    # first batch. The limit applies to every token. If learner or sampler round their numbers (bfloat16,
    # rollout.weights), the limit applies to the mean, and at most one token in a hundred may differ by more than ten
    # times the limit.
    max_sampler_learner_gap_nats: Positive = 0.05
    # The run stops after this many consecutive updates with a loss or gradient that is not finite. Such updates are
    # skipped. The last batch is written to a file.
    max_nonfinite_steps: Count = 3


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    # The optimizer. "subset_norm" is AdamW with one second moment per row. "adafactor" has second moments only by rows
    # and columns, and no first moment.
    name: Literal["adamw", "subset_norm", "adafactor"] = "adamw"
    # The dtype of the moments between steps. Moments are rounded stochastically. bfloat16 needs half the memory, int8
    # (8-bit Adam) a quarter.
    moment_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    # The learning rate. Adam changes a weight by about this much in a step, whatever the size of the gradient.
    learning_rate: Rate = 1e-5
    # The learning rate after the warm-up: "constant", or "linear" or "cosine" to zero at the last step.
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    # The number of steps in which the learning rate rises from zero.
    warmup_steps: int = 0
    # The decay of the first moment.
    b1: Annotated[Decay, WITH_MOMENTS] = 0.9
    # The decay of the second moment.
    b2: Annotated[float, Bounds(0.0, 0.999999), WITH_MOMENTS] = 0.999
    eps: Annotated[float, Bounds(0.0, 1.0, closed=False), WITH_MOMENTS] = 1e-8
    weight_decay: Exponent = 0.0
    # The gradient is scaled down to this global norm. 0 = no limit.
    max_grad_norm: float = 1.0
    # The moments, but not the schedule, start anew every so many steps. Kimi k1.5 resets the moments after every
    # iteration. 0 = never.
    reset_every_steps: Annotated[CountOrZero, WITH_MOMENTS] = 0
    # Whether the moments are in the pinned memory of the host. An optimizer step moves them to the device and back.
    offload: bool = False


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    # The number of devices on each axis. data = 0 uses all devices that the other axes leave.
    data: int = 0
    fsdp: Count = 1
    # Expert parallelism: the experts of a mixture are split over these devices. Each of these devices also has its own
    # rows, like the devices of fsdp.
    expert: Count = 1
    # Context parallelism: the learner splits the tokens of each row over these devices, and in attention each device
    # has whole rows of some heads instead. The sampler uses these devices as further devices of fsdp, each with its own
    # rows.
    context: Count = 1
    tensor: Count = 1
    # Tensor parallelism of the sampler: the number of devices that split each layer of its copy of the weights. It may
    # use the devices of fsdp and context in addition to the devices of tensor. 0 = the value of tensor.
    sampler_tensor: int = 0
    # Sharding rules: mesh axes of the axes of weights (vocab, embed, heads, kv_heads, mlp, expert) that differ from
    # runtime/sharding.py, such as {"embed": ("data", "fsdp")}. The axis mlp of experts may be on tensor only.
    rules: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    # The number of iterations between checkpoints. 0 = the number of iterations does not cause a checkpoint. A
    # checkpoint is always written at the end.
    every_iterations: int = 0
    # The number of minutes after which the next checkpoint is written. 0 = the time does not cause a checkpoint.
    every_minutes: float = 30.0
    # The number of newest checkpoints that are kept.
    keep_last: Count = 2
    # The number of checkpoints with the best eval/pass_rate that are kept in addition. If the number is not 0, a
    # checkpoint is written after every evaluation whose pass rate is among the best.
    keep_best: Annotated[CountOrZero, WITH_HELD_OUT] = 0
    # The time in seconds from SIGTERM to the end of a preempted host (spot VM: 30; jobs of launch/: 120). The run warns
    # if writing a checkpoint takes longer.
    grace_s: Positive = 30.0
    # Whether a Hugging Face folder is written at the end.
    export: bool = True
    # The bucket for checkpoints: gs://BUCKET/FOLDER (extra gcs), for hosts that share no disk. "" = the workdir.
    bucket: str = ""


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    # The number of iterations between evaluations. 0 = evaluate only before the first and after the last iteration.
    every_iterations: Annotated[CountOrZero, WITH_HELD_OUT] = 0
    # The number of held-out questions. 0 = no evaluation.
    num_prompts: int = 0
    # The number of completions of each held-out question.
    num_samples: Count = 1
    # The number of sequences that are decoded side by side. 0 = as many as in training.
    slots: int = 0
    temperature: Exponent = 1.0
    # The file of held-out questions. "" holds out num_prompts questions of the training source.
    name: str = ""


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    # Whether metrics are also written for TensorBoard.
    tensorboard: bool = True
    # The number of rollouts of each iteration that are written to samples.jsonl.
    samples_per_iteration: int = 4
    # Whether all rollouts are written to shared_rollouts.jsonl. Other runs can read them (external.paths).
    share_rollouts: bool = False
    # Whether every iteration compares, bit by bit, the values that must be equal on all hosts. This is slow. Use it to
    # find the cause of a difference.
    compare_hosts: bool = False


@dataclasses.dataclass(frozen=True)
class Config:
    # The seed of all random numbers.
    seed: int = 0
    # The number of iterations of the whole run.
    num_iterations: Count = 10
    # The folder of compiled programs, which the next start reuses. "" keeps none. The environment variable
    # JAX_COMPILATION_CACHE_DIR takes precedence.
    compilation_cache: str = "~/.cache/jaxrl_llm"
    # The folder of programs that `plan --save` compiled for these devices. They replace compilation. "" = none.
    executables: str = ""
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig = dataclasses.field(default_factory=PromptsConfig)
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardsConfig = RewardsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    replay: ReplayConfig = ReplayConfig()
    environments: EnvironmentsConfig = EnvironmentsConfig()
    external: ExternalConfig = ExternalConfig()
    update: UpdateConfig = UpdateConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def rollouts_per_iteration(self) -> int:
        """Number of rollouts that an iteration generates and keeps."""
        return self.rollout.prompts_per_iteration * self.rollout.group_size

    @property
    def rows_per_iteration(self) -> int:
        """Number of rollouts that enter the ring in an iteration: generated and external rollouts."""
        return self.rollouts_per_iteration + self.external.groups_per_iteration * self.rollout.group_size

    @property
    def num_updates(self) -> int:
        """Number of optimizer steps of the whole run."""
        return self.num_iterations * self.update.updates_per_iteration

    @property
    def row_tokens(self) -> int:
        """Width S of every row: prompt + completion."""
        return self.prompts.max_tokens + self.sampling.max_completion_tokens

    @property
    def num_slots(self) -> int:
        """Number of sequences that the sampler decodes side by side."""
        return self.rollout.slots or self.rollouts_per_iteration

    @property
    def rows_per_draw(self) -> int:
        """Number of neighbouring rows of an update batch that are drawn together and share a prompt."""
        return self.rollout.group_size if self.replay.unit == "group" else 1

    @property
    def draw_tokens(self) -> int:
        """Number of tokens of the rows of one draw at full length. Their prompt counts once."""
        return self.prompts.max_tokens + self.rows_per_draw * self.sampling.max_completion_tokens

    @property
    def line_tokens(self) -> int:
        """Width of the lines that an update batch is packed in; 0 = the batch is padded."""
        if not self.update.micro_batch_tokens:
            return 0
        return self.update.pack_width or 2 * self.draw_tokens

    @property
    def ring_capacity(self) -> int:
        """Number of rollouts that the ring holds."""
        return self.replay.capacity or self.rows_per_iteration

    # Computed once, when the run begins and imports the files. Later changes of the files do not affect the run.
    @functools.cached_property
    def files(self) -> dict[str, str]:
        """Digests of the files of the user's own rewards, environment and hindsight functions."""
        return functions.digests((*self.rewards.functions, self.environments.factory, *self.external.paths))

    @property
    def page_tokens(self) -> int:
        """Number of tokens of a page of the ring with replay.capacity_tokens.

        A row of full width has at most 32 pages.
        """
        return 2 ** max(0, (self.row_tokens - 1).bit_length() - 5)

    @property
    def keeps_reference(self) -> bool:
        """Whether rollouts carry their log-probabilities under the frozen reference."""
        return "ref_logp" in self.algorithm.columns

    @property
    def keeps_old_logp(self) -> bool:
        """Whether rollouts carry the learner's log-probabilities under the weights that drew each token."""
        return "generation_logp" in self.algorithm.columns

    @property
    def keeps_entropy(self) -> bool:
        """Whether rollouts carry the entropy of the distribution that each token was drawn from."""
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
        """Whether the learner has a value head."""
        return "value" in self.algorithm.columns

    @property
    def keeps_average(self) -> bool:
        """Whether the learner keeps a moving average of its weights."""
        return "average_logp" in self.algorithm.columns

    @property
    def keeps_previous(self) -> bool:
        """Whether the learner keeps the weights from before the last iteration's updates."""
        return "previous_logp" in self.algorithm.columns

    @property
    def reads_advantage(self) -> bool:
        """Whether a run depends on the advantages of rows: in its loss, or in the draw of its batches."""
        by_priority = self.replay.reads_priority and self.replay.priority.facts.reads_advantage
        return by_priority or "advantage" in reads_of_surrogate(self.algorithm.surrogate)

    @property
    def reads_function_of_advantage(self) -> bool:
        """Whether a run depends on the advantage function: on its values, or on whether tied groups have any."""
        return self.reads_advantage or self.replay.skip_tied or self.rollout.max_resample_rounds > 0

    @property
    def learns_without_rewards(self) -> bool:
        """Whether a term of the loss has a gradient if all rewards are 0, by the facts that functions declare."""
        algorithm = self.algorithm
        if self.model.reference_path:
            for chosen in (algorithm.surrogate, algorithm.divergence):
                if "ref_logp" in chosen.facts.columns and chosen.settings.get("coefficient", 1):
                    return True
        bonus = algorithm.entropy_bonus
        if bonus and (bonus["coefficient"] > 0 or bonus.facts.moves):
            return True
        if any(chosen["coefficient"] > 0 for chosen in algorithm.cross_entropies):
            return True
        if algorithm.reward_terms or self.update.load_balance > 0:
            return True
        # It is not known what a user's function computes.
        return any(chosen.source for _, chosen in algorithm.functions())

    def rows_per_prompt(self, ring_shards: int) -> int:
        """Return the number of neighbouring rows of a micro-batch whose shared prompt is computed once.

        This is a group if a micro-batch holds whole groups, else 1.
        """
        holds_groups = self.update.micro_batch_size % (ring_shards * self.rows_per_draw) == 0
        return self.rows_per_draw if self.line_tokens or holds_groups else 1

    def scaled(self) -> Config:
        """Return the config with learning rates and decays scaled from ``update.scaled_from_batch_size``.

        Source: Hilton et al. 2021, arXiv:2110.00641, batch size-invariance with Adam: its step times sqrt(c), the
        centre of mass d / (1 - d) of averages over c. Differs: Adam's own decays stay.
        """
        if not self.update.scaled_from_batch_size:
            return self
        c = self.update.batch_size / self.update.scaled_from_batch_size

        def scaled_decay(decay: float) -> float:
            return decay / (c * (1 - decay) + decay)

        def scaled_average(chosen: Chosen[Any]) -> Chosen[Any]:
            if "average_logp" not in chosen.facts.columns:
                return chosen
            return chosen.replace(decay=scaled_decay(chosen["decay"]))

        algorithm = self.algorithm
        advantage = algorithm.advantage
        if "norm_decay" in advantage.settings:
            advantage = advantage.replace(norm_decay=scaled_decay(advantage["norm_decay"]))
        critic_rate = math.sqrt(c) * algorithm.critic.learning_rate
        algorithm = dataclasses.replace(
            algorithm,
            advantage=advantage,
            old_policy=scaled_average(algorithm.old_policy),
            divergence=scaled_average(algorithm.divergence),
            surrogate=scaled_average(algorithm.surrogate),
            critic=dataclasses.replace(algorithm.critic, learning_rate=critic_rate),
        )
        return dataclasses.replace(
            self,
            update=dataclasses.replace(self.update, scaled_from_batch_size=0),
            optimizer=dataclasses.replace(
                self.optimizer,
                learning_rate=math.sqrt(c) * self.optimizer.learning_rate,
            ),
            algorithm=algorithm,
        )


class Settings(ml_collections.ConfigDict):
    """A ``ConfigDict`` whose attribute ``update`` is the group of settings, not the method of a dictionary."""

    @property
    def update(self) -> ml_collections.ConfigDict:  # pyrefly: ignore[bad-override], a group has the name of a method
        return self["update"]


class ReplaySettings(ml_collections.ConfigDict):
    """The group ``replay`` of a config file. It refuses settings of earlier versions and names their replacements."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not schema.is_replaced_setting(ReplayConfig, key, value, f"replay.{key}"):
            super().__setitem__(key, value)


def defaults() -> Settings:
    """Return every setting with its default, locked. ``get_config()`` of a config file starts from it."""
    settings = Settings(as_mapping(Config()))
    settings.replay = ReplaySettings(settings.replay)
    settings.lock()
    return settings


def freeze(mapping: Any) -> Config:
    """Return the checked ``Config`` of a run that is about to start.

    Args:
        mapping: a ``ConfigDict`` or a nested dictionary. Settings that it does not contain keep their defaults.

    Raises:
        ConfigError: a key is unknown, a value has a wrong type or is out of bounds, a combination is impossible, or
            nothing reads a setting.
    """
    config = recorded(mapping)
    complaint = limits.complaint(config, flatten(config))
    if complaint:
        raise ConfigError(complaint)
    return config


def recorded(mapping: Any) -> Config:
    """Return the ``Config`` that a checkpoint or a config.json has recorded.

    Names, types and bounds are checked. The rules between settings (``limits``) are not checked, because an older run
    may have started under other rules.

    Raises:
        ConfigError: a key is unknown, or a value has a wrong type or is out of bounds.
    """
    if hasattr(mapping, "to_dict"):
        mapping = mapping.to_dict()
    return schema.build(Config, moved.with_new_names(mapping))


def to_json(config: Config) -> str:
    """Return the settings as JSON text."""
    return json.dumps(as_mapping(config), indent=2, sort_keys=True)


def from_json(text: str) -> Config:
    """Return the config that ``to_json`` or a run's record has written; see ``recorded``."""
    mapping = json.loads(text)
    mapping.pop("made_with", None)
    return recorded(mapping)


# Key of prompts.chat_template_kwargs: the date that a chat template prints (models.files.templates).
DATE = "strftime_now"
