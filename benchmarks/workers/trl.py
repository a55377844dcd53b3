"""TRL's GRPOTrainer on the CPU, with transformers' own generation; ``bf16`` in the job is its default autocast.

The trainer runs its own loop; a callback holds it between steps. Runs in .venv-trl.
"""

from __future__ import annotations

import sys
import tempfile
import time

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from benchmarks.workers.link import Link, reward


class Turns(transformers.TrainerCallback):
    """Waits for a request before each optimizer step, and reports after it."""

    def __init__(self, link: Link):
        self.link = link
        self.generate_s, self.lengths = 0.0, []

    def timed(self, generate):
        """``generate`` with its seconds and the lengths of its completions noted."""

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
        self.generate_s, self.lengths, self.start = 0.0, [], time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        step_s = time.perf_counter() - self.start
        times = {"generate_s": self.generate_s, "update_s": step_s - self.generate_s, "step_s": step_s}
        self.link.report(**times, tokens=sum(self.lengths), samples=len(self.lengths))


def main() -> None:
    link = Link()
    job = link.job
    torch.set_num_threads(job["threads"])
    samples = len(job["questions"]) * job["samples_per_question"]
    turns = Turns(link)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=job["bf16"],
            gradient_checkpointing=False,
            per_device_train_batch_size=job["micro_batch"],
            gradient_accumulation_steps=samples // job["micro_batch"],
            num_generations=job["samples_per_question"],
            max_completion_length=job["completion_tokens"],
            generation_kwargs={"min_new_tokens": job["completion_tokens"]},
            temperature=1.0,
            beta=0.0,
            learning_rate=job["learning_rate"],
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            max_steps=10**6,
            model_init_kwargs={"dtype": "float32"},
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=job["model"],
            args=config,
            reward_funcs=lambda completions, **columns: [reward(c[0]["content"]) for c in completions],
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in job["questions"]]),
            processing_class=transformers.AutoTokenizer.from_pretrained(job["model"]),
            callbacks=[turns],
        )
        trainer._generate = turns.timed(trainer._generate)
        link.ready("trl", "torch", "transformers")
        trainer.train()


if __name__ == "__main__":
    main()
