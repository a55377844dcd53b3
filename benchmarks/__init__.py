"""Measurements: a step against its peers and its physical floor (run), the parts of a step (micro), one GPU (gpu), and
the operations of an absent GPU (roofline).

Nothing in jaxrl_llm imports this.
"""
