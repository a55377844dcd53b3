"""Decoder-only transformers, dense, mixtures of experts and hybrids, and their files."""
