"""Reinforcement fine-tuning of language models in JAX, on one mesh, with experience replay."""

from jaxrl_llm.settings import moved as _moved

__version__ = "0.1.0"

_moved.accept_old_names()
