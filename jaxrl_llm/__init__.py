"""Reinforcement fine-tuning of language models in JAX, on one mesh, with experience replay."""

__version__ = "0.1.0"
