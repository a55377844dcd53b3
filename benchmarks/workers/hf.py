"""Generation by transformers alone, of random weights in bfloat16, on the GPU if there is one. Runs in .venv-trl."""

from __future__ import annotations

import time

import torch
import transformers

from benchmarks.workers.link import Link


def random_model(config: dict, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Return a model with random weights and the shape of ``config``, the content of a config.json."""
    rest = {name: value for name, value in config.items() if name != "model_type"}
    shape = transformers.AutoConfig.for_model(config["model_type"], **rest)
    return transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype)


def main() -> None:
    link = Link()
    job = link.job
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = random_model(job["config"], torch.bfloat16).to(device).eval()
    prompts = torch.randint(0, job["config"]["vocab_size"], (job["rows"], job["prompt_tokens"]), device=device)
    new = job["completion_tokens"]
    link.ready("transformers", "torch")
    for _ in link.steps():
        start = time.perf_counter()
        rows = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            pad_token_id=0,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            min_new_tokens=new,
            max_new_tokens=new,
        )
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        tokens = rows.numel() - prompts.numel()
        link.report(generate_s=seconds, update_s=0.0, step_s=seconds, tokens=tokens, samples=len(rows))


if __name__ == "__main__":
    main()
