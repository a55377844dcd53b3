"""The test process is stricter than production: 8 simulated devices, rank promotion raises, warnings are errors."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    # Most of a test's time went to compiling what runs a few times: LLVM unoptimised halves it.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
if "PYTEST_XDIST_WORKER" not in os.environ:
    # One compilation cache for the session, the processes it starts included; gone with it.
    CACHE = tempfile.TemporaryDirectory(prefix="jaxrl_llm_tests_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
