"""jaxrl_llm as ``train`` runs it: whole groups drawn from a ring of one iteration, prompts shared within a group."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.iteration import Iteration
from benchmarks.workers.link import Link, reward
from jaxrl_llm.config import PromptsConfig, freeze
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.questions.stream import encode_examples
from jaxrl_llm.types import Example


def main() -> None:
    link = Link()
    job = link.job
    samples = len(job["questions"]) * job["samples_per_question"]
    config = freeze(
        {
            "model": {"remat": job["remat"]},
            "prompts": {"max_tokens": max(job["prompt_tokens"])},
            "sampling": {"max_completion_tokens": job["completion_tokens"]},
            "rollout": {
                "prompts_per_iteration": len(job["questions"]),
                "group_size": job["samples_per_question"],
                "chunk_steps": job["completion_tokens"],
            },
            "replay": {"unit": "group"},
            "update": {"batch_size": samples, "micro_batch_size": job["micro_batch"]},
            "optimizer": {"learning_rate": job["learning_rate"]},
        }
    )
    source = pretrained.resolve(job["model"])
    tokenizer = source.tokenizer()
    encoded, _ = encode_examples(
        [Example(question, {}) for question in job["questions"]],
        tokenizer,
        PromptsConfig(max_tokens=config.prompts.max_tokens),
    )

    def load(model, mesh):
        return source.load_params(model, mesh, seed=0)

    iteration = Iteration(config, source.architecture(), load, encoded)
    link.ready("jaxrl_llm", "jax", "jaxlib")
    for _ in link.steps():
        start = time.perf_counter()
        rollout, groups = iteration.generate()
        generated = time.perf_counter()
        completions = [completion for group in groups for completion in group.completions]
        rewards = np.array([reward(tokenizer.decode(completion)) for completion in completions])
        scored = time.perf_counter()
        iteration.update(rollout, rewards)
        end = time.perf_counter()
        tokens = sum(map(len, completions))
        times = {"generate_s": generated - start, "update_s": end - scored, "step_s": end - start}
        link.report(**times, tokens=tokens, samples=len(completions))


if __name__ == "__main__":
    main()
