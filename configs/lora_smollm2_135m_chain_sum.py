"""The main job with adapters (LoRA): SmolLM2-135M-Instruct stays, and 4.88 M parameters of rank 16 learn.

    python -m jaxrl_llm.train --config=configs/lora_smollm2_135m_chain_sum.py --workdir=runs/lora

Seed 0 ran with these settings on 2026-11-25 on 2 cores that other work had too (jax 0.10.2, Python 3.11): held-out pass
rate 0.164 before and 0.617 after, 0.594 with all weights at 3e-5, of 128 questions; by iteration in studies/log.md. A
checkpoint takes 57 MB. With --config.model.lora.dora=True the lengths of rows learn too.
"""

import runpy


def get_config():
    config = runpy.run_path("configs/grpo_smollm2_135m_chain_sum.py")["get_config"]()
    config.model.lora.rank = 16
    config.optimizer.learning_rate = 3e-4
    return config
