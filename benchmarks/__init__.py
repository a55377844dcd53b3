"""Measurements: a step against its peers and its physical floor (run), its parts (micro), one GPU (gpu).

Nothing in jaxrl_llm imports this.
"""
