"""Decoder-only transformers of the Llama family, and their files."""
