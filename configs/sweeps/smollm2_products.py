"""The replay study with SmolLM2-135M-Instruct on a second task, products: it has the arms of smollm2.py.

    python -m jaxrl_llm.sweep --config=configs/sweeps/smollm2_products.py --workdir=runs/smollm2_products --workers=2
    python -m studies.raw --config=configs/sweeps/smollm2_products.py --runs=runs/smollm2_products \\
        --out=studies/data/smollm2_products.json.xz

A product has two one-digit factors. The sweep takes two and a half hours on 2 cores. The same command continues a sweep
that was stopped.
"""

import runpy

from studies.design import smollm2_sweep

get_config = runpy.run_path("configs/study_smollm2.py")["get_config"]

ARMS = runpy.run_path("configs/sweeps/smollm2.py")["ARMS"]


def get_sweep():
    return smollm2_sweep({"products": ARMS})
