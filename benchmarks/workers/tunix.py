"""Tunix's GRPOLearner with its own ("vanilla") sampler. Runs in .venv-tunix.

The learner runs its own loop, and the data set stops it between steps. Tunix needs these settings for this workload:

- a mesh with Auto axes;
- a pad token that is not the end of a turn;
- an end-of-sequence id that cannot be drawn, so that completions have full length;
- the rotary base of the model, which Tunix's Llama ignores.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers
from flax import nnx
from jax.sharding import AxisType
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.workers.link import Link, reward


def main() -> None:
    link = Link()
    job = link.job
    group = job["samples_per_question"]
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    tokenizer.pad_token = "<|endoftext|>"
    model = load_model(Path(job["model"]), mesh)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
        for q in job["questions"]
    ]
    longest = max(job["prompt_tokens"])
    cluster = rl_cluster.RLCluster(
        actor=model,
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(
                (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh
            ),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(job["learning_rate"])),
                eval_every_n_steps=10**6,
                max_steps=10**6,
                mini_batch_size=len(prompts),
                train_micro_batch_size=job["micro_batch"] // group,
                rollout_micro_batch_size=len(prompts),
                compute_logps_micro_batch_size=len(prompts),
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=job["completion_tokens"],
                max_prompt_length=longest,
                kv_cache_size=longest + job["completion_tokens"],
                temperature=1.0,
                eos_tokens=[-1],
            ),
        ),
    )
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=group, num_iterations=1, beta=0.0, epsilon=0.2),
        reward_fns=lambda prompts, completions, **columns: [reward(text) for text in completions],
    )
    generated = []  # (seconds, lengths of the completions) of each call in this step

    def timed(*arguments, generate=cluster.generate, **settings):
        start = time.perf_counter()
        output = generate(*arguments, **settings)
        generated.append((time.perf_counter() - start, [len(row) for row in output.tokens]))
        return output

    cluster.generate = timed

    def batches():
        """Yield the questions once per request. The learner asks for a batch after the dispatch of its last update."""
        for _ in link.steps():
            generated.clear()
            start = time.perf_counter()
            yield {"prompts": np.array(prompts)}
            jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
            step_s = time.perf_counter() - start
            generate_s = sum(seconds for seconds, _ in generated)
            lengths = [length for _, rows in generated for length in rows]
            times = {"generate_s": generate_s, "update_s": step_s - generate_s, "step_s": step_s}
            link.report(**times, tokens=sum(lengths), samples=len(lengths))

    link.ready("google-tunix", "jax", "jaxlib", "flax")
    learner.train(batches())


def load_model(folder: Path, mesh: jax.sharding.Mesh) -> nnx.Module:
    """Return Tunix's Llama with the weights of a folder in float32."""
    config = json.loads((folder / "config.json").read_text())
    llama.apply_rope.__defaults__ = (config["rope_theta"],)
    shape = llama.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        weight_tying=config["tie_word_embeddings"],
    )
    return llama_params.create_model_from_safe_tensors(str(folder), shape, mesh, dtype=jnp.float32)


if __name__ == "__main__":
    main()
