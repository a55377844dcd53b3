"""TRL's GRPOTrainer with the generation of transformers. Runs in .venv-trl.

There are three kinds of jobs:

- A job of ``race`` has ``answers``: completions may end early, and are right or wrong.
- A job of ``gpu`` has ``config``: random weights of that shape, questions of ``prompt_tokens`` tokens, on the GPU if
  there is one.
- All other jobs run on the CPU with completions of full length.

``bf16`` in the job is TRL's default autocast. The trainer runs its own loop, and a callback stops it between steps.
"""

from __future__ import annotations

import sys
import tempfile
import time

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from benchmarks.workers.hf import random_model
from benchmarks.workers.link import Link, is_right, reward


class Turns(transformers.TrainerCallback):
    """Waits for a request before each optimizer step, and reports after it."""

    def __init__(self, link: Link):
        self.link = link
        self._clear()

    def _clear(self):
        self.generate_s = 0.0
        self.lengths = []
        self.rewards = []

    def timed(self, generate):
        """Return ``generate`` with a wrapper that records its seconds and the lengths of its completions."""

        def call(prompts):
            start = time.perf_counter()
            result = generate(prompts)
            self.generate_s += time.perf_counter() - start
            self.lengths += [len(ids) for ids in result[1]]
            return result

        return call

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.link.next_step():
            sys.exit()
        self._clear()
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        step_s = time.perf_counter() - self.start
        times = {"generate_s": self.generate_s, "update_s": step_s - self.generate_s, "step_s": step_s}
        rate = sum(self.rewards) / len(self.rewards)
        self.link.report(**times, tokens=sum(self.lengths), samples=len(self.lengths), pass_rate=rate)


def question_of(tokenizer, number: int, tokens: int) -> str:
    """Return a question that has ``tokens`` tokens in the chat template, or the shortest question if that is longer."""

    def length(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    return f"{number}" + " a" * (tokens - length(f"{number}"))


def main() -> None:
    link = Link()
    job = link.job
    answers = job.get("answers")
    shape = job.get("config")
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    on_cpu = not (shape and torch.cuda.is_available())
    if on_cpu:
        torch.set_num_threads(job["threads"])
    if shape:
        job["questions"] = [question_of(tokenizer, i, job["prompt_tokens"]) for i in range(job["num_questions"])]
        model = random_model(shape, torch.float32)
        model_settings = None
    else:
        model = job["model"]
        model_settings = {"dtype": "float32"}
    samples = job["samples_per_step"] if answers else len(job["questions"]) * job["samples_per_question"]
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in job["questions"]]
    if answers:
        rows = [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]
    turns = Turns(link)

    def score(completions, answer=None, **columns):
        texts = [completion[0]["content"] for completion in completions]
        if answers:
            turns.rewards = [float(is_right(text, right)) for text, right in zip(texts, answer, strict=True)]
        else:
            turns.rewards = [reward(text) for text in texts]
        return turns.rewards

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=on_cpu,
            bf16=job["bf16"],
            gradient_checkpointing=False,
            per_device_train_batch_size=job["micro_batch"],
            gradient_accumulation_steps=samples // job["micro_batch"],
            num_generations=job["samples_per_question"],
            max_completion_length=job["completion_tokens"],
            generation_kwargs={} if answers else {"min_new_tokens": job["completion_tokens"]},
            seed=job.get("seed", 42),
            temperature=1.0,
            beta=0.0,
            learning_rate=job["learning_rate"],
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            max_steps=10**6,
            model_init_kwargs=model_settings,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            args=config,
            reward_funcs=score,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[turns],
        )
        trainer._generate = turns.timed(trainer._generate)
        link.ready("trl", "torch", "transformers")
        trainer.train()


if __name__ == "__main__":
    main()
