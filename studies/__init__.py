"""Experiments that need no language model."""
