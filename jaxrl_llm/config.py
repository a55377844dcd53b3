"""Configuration: frozen dataclasses, and ``freeze`` from a ``ConfigDict`` with every check.

A file in ``configs/`` takes ``defaults()`` and sets what differs;
the command line overrides it with ``--config.a.b=v``; ``freeze`` turns it into a ``Config`` once. An unknown key,
a wrong type or an impossible combination is a ``ConfigError`` naming the key, the value and what is
allowed. No default stands in two places.

Owns: names, types with their bounds, defaults. Does not know: methods' settings (method_config), how a mapping becomes
dataclasses (nested), which sizes fit together (limits), devices, files, models.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Annotated, Any, Literal

import ml_collections

from jaxrl_llm import limits
from jaxrl_llm.method_config import AlgorithmConfig, EnvironmentsConfig, LoraConfig, MethodFacts, ReplayConfig
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

# When settings are read that others switch on.
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
    # Hugging Face folder, GGUF file, folder of a run, "smollm2-135m-instruct", hub id, or "random:PRESET".
    path: str = "random:debug"
    # Reference model, frozen, named like `path` and of the same token ids: a teacher, with algorithm.divergence
    # (on-policy distillation). "" = path, as training finds it.
    reference_path: Annotated[str, WITH_REFERENCE] = ""
    # Arithmetic of the forward pass.
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # Weights that are learned, and their gradient; with adapters, of what is not. bfloat16: half the memory, steps are
    # rounded stochastically.
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    # Rematerialisation, what the backward pass keeps: "none" all, "dots" the layers' inputs, the MLPs' and their
    # matmuls, "full" the layers' inputs alone; "auto" is "dots" where that fits the device, else "full" (so on CPU).
    remat: Literal["none", "dots", "full", "auto"] = "full"
    # Attention: "auto" takes a flash kernel where the devices have one (TPU; NVIDIA in bfloat16), "xla" never.
    attention: Literal["auto", "xla"] = "auto"
    lora: LoraConfig = LoraConfig()
    # Routing replay: rollouts carry the experts that the sampler chose for each token, and the learner takes the same.
    routing_replay: bool = False


@dataclasses.dataclass(frozen=True)
class PromptsConfig:
    # Source of the questions: files ("jsonl", "parquet", "code", "text"), "reasoning_gym", or one that is built in.
    source: Literal[
        "letters", "arithmetic", "maze", "kolmogorov", "reasoning_gym", "jsonl", "parquet", "code", "text", "grids"
    ] = "letters"
    # Name of the reasoning-gym dataset, or path of the file, or a pattern of several ("train-*.parquet").
    name: str = ""
    # Arguments of the reasoning-gym dataset, or of another source, as its module says (questions/tasks).
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Questions to make (generated sources) or to read at most (files; 0 = all).
    size: int = 1024
    # Longest prompt in tokens, and the width of the prompt part of every row.
    max_tokens: Count = 32
    # System message put before prompts that have none of their own; "" leaves the chat template's own default.
    system_prompt: str = ""
    # Chat template: wrap prompts in the model's. False: the text is the prompt.
    chat_template: bool = True
    # What the chat template is told besides, by its own names: {"enable_thinking": False}, {"tools": [...]}.
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Special tokens: read what looks like one ("<|im_end|>") in prompts and answers of others as one. False: as text.
    special_tokens: bool = False
    # Bad row, one that cannot be read: "error" stops before the run, "skip" reports, counts and goes on.
    bad_row: Annotated[Literal["error", "skip"], WITH_ROWS_OF_OTHERS] = "error"
    # Long prompt, one of more than max_tokens: "error" or "skip", as of a bad row.
    long_prompt: Literal["error", "skip"] = "error"
    # Shuffle: visit questions in a new random order each epoch.
    shuffle: bool = True
    # Retirement: do not ask again what has passed at this rate over all its answers so far; 0 = ask everything.
    retire_pass_rate: Share = 0.0

    @property
    def encoding(self) -> dict[str, Any]:
        """How prompts become token ids, for ``Tokenizer.encode_prompts``."""
        names = ("chat_template", "chat_template_kwargs", "system_prompt", "special_tokens")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    # Softmax temperature; 0 means greedy and is for generate/evaluate alone.
    temperature: Annotated[float, Bounds(0.01, 100.0)] = 1.0
    # Top-k: keep the k most likely tokens; 0 = all.
    top_k: int = 0
    # Top-p: keep the smallest set of tokens with this much mass; 1.0 = all.
    top_p: Annotated[float, Bounds(0.0, 1.0, closed=False)] = 1.0
    # Min-p: keep tokens at least this fraction as likely as the most likely; 0.0 = all.
    min_p: Share = 0.0
    # Support: where top-k, top-p or min-p leaves tokens out, the most likely ids that are left, so many at most. They
    # are kept with the token, 4 bytes each, so that the learner's ratio is over the same ones. 0 = top_k, or else 64.
    # Evaluations and generate have no learner, and draw among all that are left.
    support_tokens: Annotated[CountOrZero, WITH_FILTER] = 0
    # Longest completion in tokens, EOS counted.
    max_completion_tokens: Count = 16
    # Stop strings: completions end at the first of them (kept in the completion).
    stop_strings: tuple[str, ...] = ()
    # Stop tokens, each by its text ("<|eot_id|>"): they end completions as the model's own ends do.
    stop_tokens: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    prompts_per_iteration: Count = 8
    # Group size, completions sampled for each prompt; 1 only where algorithm.advantage does not compare siblings.
    group_size: Count = 8
    # Slots, sequences decoded side by side; 0 = one for every rollout of the iteration.
    slots: int = 0
    # Chunk: decode steps between refills of finished slots.
    chunk_steps: Count = 8
    # Lookahead: prompts started ahead, lest slots idle. Rollouts may then span policy versions (recorded per token).
    lookahead_prompts: int = 0
    # Stale caches: what becomes of the cached keys and values (or states) of a half-written answer when the weights
    # change. "recompute" computes them anew from the answer's tokens: later tokens are then exactly the new policy's.
    # "keep" goes on with those of the older weights, which costs nothing. Prompts are always computed anew.
    stale_cache: Literal["recompute", "keep"] = "recompute"
    # Staleness gate: no prompt stays open for more than so many iterations beyond its first. Stragglers are waited for,
    # and fewer prompts started ahead if need be; a round of max_resample_rounds counts like one. 0 = it may stay.
    max_lag_iterations: int = 0
    # Dynamic sampling: how often at most an iteration asks prompts_per_iteration more prompts because groups of it are
    # tied (no two rewards differ): mixed ones take their place. What is left out counts as generated. 0 = never.
    max_resample_rounds: Annotated[int, Bounds(0, 1000)] = 0
    # The sampler's matrices: "compute" has them in model.compute_dtype; "int8" and "fp8" a byte a weight, "fp4" 3/4,
    # rounded anew with every policy. Its probabilities are not the learner's: see update.weights and corrections.
    weights: Literal["compute", "int8", "fp8", "fp4"] = "compute"


@dataclasses.dataclass(frozen=True)
class RewardsConfig:
    # "task" (the task's own scorer), "math" (math-verify against column `answer`),
    # "package.module:function" or "path/to/file.py:function".
    functions: tuple[str, ...] = ("task",)
    # One weight per function.
    weights: tuple[Number, ...] = (1.0,)
    # Workers: processes that score.
    num_workers: Annotated[int, Bounds(1, 1024)] = 2
    # Timeout: seconds that a function may take for all completions of one prompt before its process is replaced.
    timeout_s: Annotated[float, Bounds(0.01, 86400.0)] = 10.0
    # Failures: stop with a checkpoint when more than this fraction of an iteration's rewards failed.
    max_failure_frac: Share = 0.5
    # A rollout passes when its total reward is at least this.
    pass_threshold: Number = 1.0


@dataclasses.dataclass(frozen=True)
class ExternalConfig:
    # Answers of others, from each in turn: JSONL files (their form: jaxrl_llm/actor/external.py), workdirs of runs
    # with metrics.share_rollouts, and hindsight functions of the run's own answers (actor/external_sources.py).
    paths: tuple[str, ...] = ()
    # Groups of theirs that go into the ring in each iteration, in addition to the run's own.
    groups_per_iteration: int = 0


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    # Batch size: rollouts in one optimizer step.
    batch_size: Count = 64
    # Micro-batch: rollouts in one forward and backward pass, over all devices.
    micro_batch_size: Count = 16
    # Packing: tokens in one such pass instead, of rollouts side by side in lines without padding; 0 = padded.
    micro_batch_tokens: int = 0
    # Tokens of such a line, at least what one draw takes at full length; 0 = twice that.
    pack_width: int = 0
    # Balance of experts: weight in the loss of their router's balance cost (models/moe.py); transformers' own is 0.001.
    load_balance: Exponent = 0.0
    # Optimizer steps per iteration, all in one dispatch.
    updates_per_iteration: Count = 1
    # Forward pass of the learner: "full", or with what rollout.weights rounds, whose gradient goes to what is learned.
    weights: Annotated[Literal["full", "rollout"], WITH_ROUNDED_SAMPLER] = "full"
    # Positions of a device whose logits are live at once in the learner; 0 = by device (models.row_logp.chunk_tokens).
    logp_chunk_tokens: int = 0
    # Batch size that learning rates and decays of averages (of weights, `norm_decay` of advantages) are
    # meant for; with c times that many rollouts in a step (and in an iteration), rates are multiplied by sqrt(c) and
    # what a decay averages over is divided by c, so that a run does the same per rollout. 0 = meant for batch_size.
    scaled_from_batch_size: int = 0
    # Refuse to train when on the first batch log-probs of learner and sampler differ by more than this many nats: any
    # token's; where one of them rounds (bfloat16, rollout.weights) the mean, or by ten times as many a hundredth.
    max_sampler_learner_gap_nats: Positive = 0.05
    # Stop, with the batch in a file, after so many updates in a row whose loss or gradient was not finite (skipped).
    max_nonfinite_steps: Count = 3


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    # "adamw"; "subset_norm": AdamW with one second moment a row; "adafactor": that by rows and columns alone, no first.
    name: Literal["adamw", "subset_norm", "adafactor"] = "adamw"
    # Moments between steps, rounded stochastically: bfloat16, half the memory; int8 (8-bit Adam), a quarter.
    moment_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    # Adam moves a weight by up to the rate in a step, and divides by what its averages forget.
    learning_rate: Rate = 1e-5
    # "constant", "linear" or "cosine" (to zero at the last step), after the warm-up.
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    b1: Annotated[Decay, WITH_MOMENTS] = 0.9
    b2: Annotated[float, Bounds(0.0, 0.999999), WITH_MOMENTS] = 0.999
    eps: Annotated[float, Bounds(0.0, 1.0, closed=False), WITH_MOMENTS] = 1e-8
    weight_decay: Exponent = 0.0
    # Global-norm clip; 0 = none.
    max_grad_norm: float = 1.0
    # Optimizer reset: start the moments anew, not the schedule, every so many steps (Kimi: an iteration); 0 = never.
    reset_every_steps: Annotated[CountOrZero, WITH_MOMENTS] = 0
    # Offload: keep the moments in the host's pinned memory; an optimizer step moves them to the device and back.
    offload: bool = False


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    # Devices per axis; data = 0 takes what the others leave.
    data: int = 0
    fsdp: Count = 1
    # Expert parallelism: the experts of a mixture are split over these, which have rows of their own as fsdp's have.
    expert: Count = 1
    # Context parallelism: parts that the learner splits the tokens of each row in, which its attention exchanges for
    # parts of the heads; to the sampler they are further devices of fsdp, with rows of their own.
    context: Count = 1
    tensor: Count = 1
    # Tensor parallelism of the sampler: devices that its copy of each layer is split over, of fsdp's and context's in
    # addition to tensor's; 0 = as tensor.
    sampler_tensor: int = 0
    # Sharding rules: axes of weights (vocab, embed, heads, kv_heads, mlp, expert) lying on other mesh axes than
    # runtime/sharding.py says, such as {"embed": ("data", "fsdp")}. Of experts, mlp may lie on tensor alone.
    rules: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    # Beside the one at the end: every so many iterations (0 = not), and when the last is so many minutes old (0 = not).
    every_iterations: int = 0
    every_minutes: float = 30.0
    keep_last: Count = 2
    # Best by eval/pass_rate: so many are kept in addition, and written after such an evaluation.
    keep_best: Annotated[CountOrZero, WITH_HELD_OUT] = 0
    # Grace: seconds from SIGTERM to the end of a preempted host (spot VM: 30; jobs of launch/: 120). A run warns when
    # writing a checkpoint takes longer.
    grace_s: Positive = 30.0
    # Write a Hugging Face folder at the end.
    export: bool = True
    # Where checkpoints lie: gs://BUCKET/FOLDER (extra gcs), for hosts that share no disk; "" = in the workdir.
    bucket: str = ""


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    # 0 = before the first and after the last iteration alone.
    every_iterations: Annotated[CountOrZero, WITH_HELD_OUT] = 0
    # Held-out questions (0 = no evaluation), completions of each, those decoded side by side (0 = as many as training).
    num_prompts: int = 0
    num_samples: Count = 1
    slots: int = 0
    temperature: Exponent = 1.0
    # File of held-out questions; "" holds out num_prompts questions of the training source.
    name: str = ""


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    tensorboard: bool = True
    # Rollouts of each iteration written to samples.jsonl.
    samples_per_iteration: int = 4
    # Write all of them to shared_rollouts.jsonl, where other runs find them (external.paths).
    share_rollouts: bool = False
    # Compare every iteration, bit by bit, what several hosts must have alike; slow, to find out why they do not.
    compare_hosts: bool = False


@dataclasses.dataclass(frozen=True)
class Config(MethodFacts):
    seed: int = 0
    num_iterations: Count = 10
    # Folder that keeps compiled programs for the next start; "" keeps none. JAX_COMPILATION_CACHE_DIR wins over it.
    compilation_cache: str = "~/.cache/jaxrl_llm"
    # Executables: folder of programs that `plan --save` compiled for these devices, in place of compiling; "" = none.
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
        return self.rollout.prompts_per_iteration * self.rollout.group_size

    @property
    def rows_per_iteration(self) -> int:
        """Rollouts that go into the ring: those generated, and those of others."""
        return self.rollouts_per_iteration + self.external.groups_per_iteration * self.rollout.group_size

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.num_iterations * self.update.updates_per_iteration

    @property
    def row_tokens(self) -> int:
        """Width S of every row: prompt + completion."""
        return self.prompts.max_tokens + self.sampling.max_completion_tokens

    @property
    def num_slots(self) -> int:
        return self.rollout.slots or self.rollouts_per_iteration

    @property
    def rows_per_draw(self) -> int:
        """Neighbouring rows of an update batch that are drawn together, and have one prompt."""
        return self.rollout.group_size if self.replay.unit == "group" else 1

    @property
    def draw_tokens(self) -> int:
        """Tokens of the rows of one draw at full length, their prompt counted once."""
        return self.prompts.max_tokens + self.rows_per_draw * self.sampling.max_completion_tokens

    @property
    def line_tokens(self) -> int:
        """Width of the lines that an update batch is packed in; 0 = it is padded."""
        return (self.update.pack_width or 2 * self.draw_tokens) if self.update.micro_batch_tokens else 0

    @property
    def ring_capacity(self) -> int:
        return self.replay.capacity or self.rows_per_iteration

    @functools.cached_property  # of when a run begins, which imports them then: what is edited later it does not use
    def files(self) -> dict[str, str]:
        """Digests of the files that rewards, the environment and hindsight of the user's own are functions of."""
        return functions.digests((*self.rewards.functions, self.environments.factory, *self.external.paths))

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of the ring with replay.capacity_tokens: a row of full width has at most 32 pages."""
        return 2 ** max(0, (self.row_tokens - 1).bit_length() - 5)


class Settings(ml_collections.ConfigDict):
    """A ``ConfigDict`` whose ``update`` is our group of settings, not the dictionary method of that name."""

    @property
    def update(self) -> ml_collections.ConfigDict:
        return self["update"]


def defaults() -> Settings:
    """Every setting with its default, locked: what ``get_config()`` of a config file starts from."""
    return Settings(as_mapping(Config())).lock()


def freeze(mapping: Any) -> Config:
    """Turn a ``ConfigDict`` (or nested dict) into the checked ``Config`` of a run that is about to start.

    Args:
        mapping: names only what differs from the defaults.

    Raises:
        ConfigError: unknown key, wrong type, value out of bounds, impossible combination, a setting that nothing reads.
    """
    config = recorded(mapping)
    if complaint := limits.complaint(config, flatten(config)):
        raise ConfigError(complaint)
    return config


def recorded(mapping: Any) -> Config:
    """Return the ``Config`` that a checkpoint or a config.json has recorded, to be read and not to be run.

    Names, types and bounds are checked. The rules between settings (``limits``) are not: they are for runs that are
    about to start, and an older run may have started under other rules.

    Raises:
        ConfigError: unknown key, wrong type, value out of bounds.
    """
    if hasattr(mapping, "to_dict"):
        mapping = mapping.to_dict()
    return schema.build(Config, moved.with_new_names(mapping))


def to_json(config: Config) -> str:
    return json.dumps(as_mapping(config), indent=2, sort_keys=True)


def from_json(text: str) -> Config:
    """Return the config that ``to_json`` or a run's record has written; see ``recorded``."""
    mapping = json.loads(text)
    mapping.pop("made_with", None)
    return recorded(mapping)


DATE = "strftime_now"  # of prompts.chat_template_kwargs: the day that a chat template prints (models.files.templates)
